"""A trained pair at any size: wider and deeper models that answer exactly as the small ones do, at the big ones' cost.

A benchmark wants models of real size with a real acceptance rate, and no one trains 1B parameters for it. So every
model of a pair is expanded without changing its function (Net2Net, Chen et al. 2016, arXiv 1511.05641):

* new channels of the residual stream stay zero: nothing writes them (zero rows of ``o_proj`` and ``down_proj``, zero
  columns of the embedding), and what reads them has random weights;
* a mean of squares over H channels of which h are alive is h/H of what it was: norm weights are scaled by
  sqrt(h / H) and epsilon by h / H, which is exact;
* new heads and new channels of the MLP compute with random weights, and the columns that read them are zero;
* new layers are random, with zero ``o_proj`` and ``down_proj``.

Every zero is a value inside a dense matrix: each product, each head and each layer is computed in full, and no graph
optimiser can know better. ``--random`` writes models of the same shapes without any of this, to compare times with.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from scripts.lab.widen.llama import (
    Size,
    logit_difference,
    random_model,
    widen,
    widened_config,
)

ALLOWED_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSize:
    """Sizes of both models of a pair."""

    target: Size
    draft: Size


# Named after their parameters at the demo pair's vocabulary of 4,096. The first is the setting of Leviathan et al.
# 2023, table 4 (GPT-like, 97M and 6M: every head has its own keys); the second has the shape of a Llama 3.2 1B.
PAIRS = {
    "gptlike-125m-6m": PairSize(
        target=Size(hidden=768, layers=12, intermediate=3392, heads=12, kv_heads=12),
        draft=Size(hidden=384, layers=2, intermediate=1408, heads=12, kv_heads=12),
    ),
    # The demo target as it is, with a draft that costs nearly half of it: what Ouroboros was made for.
    "demo-dear-draft": PairSize(
        target=Size(hidden=384, layers=5, intermediate=1152, heads=6, kv_heads=2),
        draft=Size(hidden=256, layers=4, intermediate=768, heads=8, kv_heads=4),
    ),
    # A pair on which no constant of the controller was chosen.
    "unseen-23m-2m": PairSize(
        target=Size(hidden=512, layers=6, intermediate=1792, heads=8, kv_heads=4),
        draft=Size(hidden=192, layers=3, intermediate=512, heads=6, kv_heads=2),
    ),
    "1b-50m": PairSize(
        target=Size(hidden=2048, layers=16, intermediate=8192, heads=32, kv_heads=8),
        draft=Size(hidden=768, layers=6, intermediate=2688, heads=24, kv_heads=8),
    ),
}


def write_model(source: Path, out: Path, size: Size, *, is_random: bool) -> str:
    """Widen the checkpoint ``source`` into the folder ``out``; what was made, in words.

    Raises:
        ValueError: it cannot be widened, or the widened model's logits are not the source's.
    """
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if is_random:
        model, difference = random_model(widened_config(small.config, size)), 0.0
    else:
        model = widen(small, size)
        difference = logit_difference(small, model)
    if not difference <= ALLOWED_DIFFERENCE:
        raise ValueError(f"logits differ by {difference:.1e}, more than {ALLOWED_DIFFERENCE}")
    model.save_pretrained(out)
    for path in source.glob("*.json"):
        if not (out / path.name).exists() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    millions = [sum(weight.numel() for weight in one.parameters()) / 1e6 for one in (small, model)]
    said = "random weights" if is_random else f"logits within {difference:.1e}"
    return f"{out.name}: {millions[0]:.2f}M -> {millions[1]:.1f}M parameters, {said}"


def main(
    pair: Annotated[str, typer.Argument(help=f"one of {', '.join(PAIRS)}")],
    out: Annotated[Path, typer.Argument(help="folder for target/ and draft/")],
    source: Annotated[Path, typer.Option(help="folder with the pair's models")] = Path("demo"),
    is_random: Annotated[
        bool, typer.Option("--random", help="same shapes, random weights")
    ] = False,
) -> None:
    """Write the models of a widened pair as float32 checkpoints, ready for ``outrider export``."""
    sizes = PAIRS.get(pair)
    if sizes is None:
        raise typer.BadParameter(f"{pair} is none of {', '.join(PAIRS)}", param_hint="pair")
    for name in (field.name for field in fields(sizes)):
        size = getattr(sizes, name)
        try:
            said = write_model(source / name, out / name, size, is_random=is_random)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=name) from error
        Console().print(said, highlight=False)


if __name__ == "__main__":
    typer.run(main)
