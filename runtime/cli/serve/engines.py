"""Options of ``outrider serve``: what it computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from outrider.runtime.cli.serve.settings import merge_pairs

PANEL = "Engines"

Device = Annotated[
    str, typer.Option(help="cpu, cuda[:N], tensorrt[:N] or auto.", rich_help_panel=PANEL)
]
Threads = Annotated[int, typer.Option(help="Threads of a CPU backend.", rich_help_panel=PANEL)]
Sampler = Annotated[
    str,
    typer.Option(help="Where drafts are judged: auto, host or device.", rich_help_panel=PANEL),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY=VALUE for ONNX Runtime's CUDA provider.",
        rich_help_panel=PANEL,
        callback=merge_pairs,
    ),
]
IsolateEngine = Annotated[
    bool,
    typer.Option(
        help="Engines in a process of their own, started again where it ends.",
        rich_help_panel=PANEL,
    ),
]


def pairs(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return keys and values of texts such as "a=b"; one without a key or "=" has an empty key."""
    parts = [text.partition("=") for text in texts]
    return tuple((key.strip() if sign else "", value.strip()) for key, sign, value in parts)
