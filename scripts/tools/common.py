"""Prompts of the benchmarks, and a bundle opened in process with timers."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import typer
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.offline.rig import Rig, RigOptions
from outrider.runtime.offline.rig import open_rig as open_offline_rig
from outrider.runtime.serving.tokenizer import TextCodec

__all__ = ["PAUSE_S", "Rig", "code_prompts", "names_of", "open_rig", "token_prompts"]

PAUSE_S = 0.1
"""From the end of one process's work to the start of another's; ONNX Runtime's threads spin for some 40 ms."""
PROMPT_TOKENS = 64
PROSE_CHARACTERS = 800

PROMPT_MODULES = (
    "argparse", "ast", "bdb", "calendar", "cgi", "cmd", "codecs", "configparser", "csv", "dis",
)  # fmt: skip


def names_of(text: str, known: Sequence[str] | None = None) -> list[str]:
    """Return the names of a comma-separated list, each once.

    Raises:
        typer.BadParameter: one is not among those known.
    """
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    if known is not None and (unknown := set(names) - set(known)):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    return names


def code_prompts(count: int, num_lines: int = 12) -> list[str]:
    """Heads of top-level functions and classes of the standard library, the same on every machine of one Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    per_module = -(-count // len(PROMPT_MODULES))
    prompts = []
    for name in PROMPT_MODULES:
        lines = (library / f"{name}.py").read_text().splitlines(keepends=True)
        heads = [
            i
            for i, line in enumerate(lines)
            if line.startswith(("def ", "class ")) and i >= num_lines
        ]
        prompts += ["".join(lines[head - num_lines + 2 : head + 2]) for head in heads[:per_module]]
    return prompts[:count]


def token_prompts(
    kind: str, codec: TextCodec, vocab_size: int, count: int
) -> list[tuple[int, ...]]:
    """Prompts of one kind: "code" as the demo pair was trained on, "prose" it never saw, or "random" tokens."""
    if kind == "random":
        rng = np.random.default_rng(0)
        return [tuple(rng.integers(0, vocab_size, PROMPT_TOKENS).tolist()) for _ in range(count)]
    texts = code_prompts(count)
    if kind == "prose":
        names = sorted(topics, key=lambda name: (-len(topics[name]), name))
        starts = range(0, len(topics[names[0]]), PROSE_CHARACTERS)
        pieces = [topics[name][at : at + PROSE_CHARACTERS] for at in starts for name in names]
        texts = [one for one in pieces if len(one) == PROSE_CHARACTERS][:count]
    return [tuple(codec.encode(text))[:PROMPT_TOKENS] for text in texts]


def open_rig(
    root: Path, *, max_batch: int = 8, num_threads: int = 0, costs: Path | None = None,
    drafting: DraftingConfig | None = None,
) -> Rig:  # fmt: skip
    """Open a bundle for benchmarks.

    Step costs are kept in the folder ``costs``; None leaves them unknown, and every gamma fixed.
    """
    options = RigOptions(
        max_batch=max_batch,
        num_threads=num_threads,
        knows_costs=costs is not None,
        costs_folder=costs,
        drafting=drafting or DraftingConfig(),
    )
    return open_offline_rig(root, options)
