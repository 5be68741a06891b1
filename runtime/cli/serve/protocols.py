"""Options of ``outrider serve``: protocols beside ``outrider.v1`` on the same port."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Protocols beside outrider.v1"

Kserve = Annotated[
    bool,
    typer.Option(
        "--kserve",
        help="Speak KServe's and Triton's Open Inference Protocol on the port, too.",
        rich_help_panel=PANEL,
    ),
]
VllmGrpc = Annotated[
    bool,
    typer.Option(
        "--vllm-grpc",
        help="Speak the gRPC of vLLM's engine on the port, too: for the gateway smg.",
        rich_help_panel=PANEL,
    ),
]
