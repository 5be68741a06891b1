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
What each family needs besides stands in widen_llama.py and widen_t5.py.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from scripts.demo_pair.widen_llama import (
    Size,
    logit_difference,
    random_model,
    widen,
    widened_config,
)
from scripts.demo_pair.widen_t5 import (
    T5Size,
    random_t5,
    t5_logit_difference,
    widen_t5,
    widened_t5_config,
)

ALLOWED_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSize:
    """Sizes of both models of a pair."""

    target: Size
    draft: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class T5PairSize:
    """Sizes of the models of a translating pair, whose second draft reads with the target's encoder."""

    target: T5Size
    draft: T5Size
    shared_draft: T5Size


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


# T5's own shapes in the gated form of v1.1, at the translating pair's vocabulary of 4,096: T5-base has 222M parameters
# and T5-small 60M at theirs of 32,128, these have 205M and 48M.
T5_PAIRS = {
    "t5-base-220m-60m": T5PairSize(
        target=T5Size(hidden=768, encoder_layers=12, decoder_layers=12, intermediate=2048, heads=12, head_size=64),
        draft=T5Size(hidden=512, encoder_layers=6, decoder_layers=6, intermediate=1344, heads=8, head_size=64),
        shared_draft=T5Size(
            hidden=768, encoder_layers=12, decoder_layers=2, intermediate=2048, heads=12, head_size=64
        ),
    ),
}  # fmt: skip


def write_model(source: Path, out: Path, size: Size | T5Size, *, is_random: bool) -> str:
    """Widen the checkpoint ``source`` into the folder ``out``; what was made, in words.

    Raises:
        ValueError: it cannot be widened, or the widened model's logits are not the source's.
    """
    auto = AutoModelForSeq2SeqLM if isinstance(size, T5Size) else AutoModelForCausalLM
    small = auto.from_pretrained(source, dtype=torch.float32).eval()
    if isinstance(size, T5Size):
        model, difference = _widened_t5(small, size, is_random)
    else:
        model, difference = _widened_llama(small, size, is_random)
    if not difference <= ALLOWED_DIFFERENCE:
        raise ValueError(f"logits differ by {difference:.1e}, more than {ALLOWED_DIFFERENCE}")
    model.save_pretrained(out)
    for path in source.glob("*.json"):
        if not (out / path.name).exists() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    millions = [sum(weight.numel() for weight in one.parameters()) / 1e6 for one in (small, model)]
    said = "random weights" if is_random else f"logits within {difference:.1e}"
    return f"{out.name}: {millions[0]:.2f}M -> {millions[1]:.1f}M parameters, {said}"


def _widened_llama(
    small: LlamaForCausalLM, size: Size, is_random: bool
) -> tuple[LlamaForCausalLM, float]:
    """The model of the wanted size and how far its logits are off; 0 for random weights."""
    if is_random:
        return random_model(widened_config(small.config, size)), 0.0
    model = widen(small, size)
    return model, logit_difference(small, model)


def _widened_t5(
    small: T5ForConditionalGeneration, size: T5Size, is_random: bool
) -> tuple[T5ForConditionalGeneration, float]:
    """The model of the wanted size and how far its logits are off; 0 for random weights."""
    if is_random:
        return random_t5(widened_t5_config(small.config, size)), 0.0
    model = widen_t5(small, size)
    return model, t5_logit_difference(small, model)


def main(
    pair: Annotated[str, typer.Argument(help=f"one of {', '.join((*PAIRS, *T5_PAIRS))}")],
    out: Annotated[Path, typer.Argument(help="folder for target/ and draft/")],
    source: Annotated[
        Path | None, typer.Option(help="folder with the pair's models; the demo pair of its kind")
    ] = None,
    is_random: Annotated[
        bool, typer.Option("--random", help="same shapes, random weights")
    ] = False,
) -> None:
    """Write the models of a widened pair as float32 checkpoints, ready for ``outrider export``."""
    sizes = PAIRS.get(pair) or T5_PAIRS.get(pair)
    if sizes is None:
        names = ", ".join((*PAIRS, *T5_PAIRS))
        raise typer.BadParameter(f"{pair} is none of {names}", param_hint="pair")
    folder = source or Path("demo/ende" if isinstance(sizes, T5PairSize) else "demo")
    for name in (field.name for field in fields(sizes)):
        size = getattr(sizes, name)
        try:
            said = write_model(folder / name, out / name, size, is_random=is_random)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=name) from error
        Console().print(said, highlight=False)


if __name__ == "__main__":
    typer.run(main)
