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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ALLOWED_DIFFERENCE = 1e-4
_CHECKED_TOKENS = 96
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a widened Llama; vocabulary, head size, positions and rotary base stay those of the source."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int


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


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Which old head each new head takes over: by new index, the old index, None where the head is an added one."""

    queries: tuple[int | None, ...]
    keys: tuple[int | None, ...]


def plan_heads(config: LlamaConfig, size: Size) -> HeadPlan:
    """Places for the old heads, so that each still reads its own keys; shared keys are copied where groups shrink.

    Raises:
        ValueError: heads are no multiple of key-value heads, or too few for the old ones.
    """
    if size.heads % size.kv_heads:
        raise ValueError(f"heads: {size.heads} is no multiple of kv_heads {size.kv_heads}")
    old_group = config.num_attention_heads // config.num_key_value_heads
    group = size.heads // size.kv_heads
    queries: list[int | None] = []
    keys: list[int | None] = []
    for old_key in range(config.num_key_value_heads):
        heads = list(range(old_key * old_group, (old_key + 1) * old_group))
        for first in range(0, old_group, group):
            taken = heads[first : first + group]
            queries += [*taken, *[None] * (group - len(taken))]
            keys.append(old_key)
    if len(keys) > size.kv_heads:
        raise ValueError(f"kv_heads: at least {len(keys)} are needed in groups of {group}")
    num_added = size.kv_heads - len(keys)
    return HeadPlan((*queries, *[None] * (num_added * group)), (*keys, *[None] * num_added))


def widened_config(config: LlamaConfig, size: Size) -> LlamaConfig:
    """Configuration of the widened model.

    Raises:
        ValueError: not a Llama without biases, or a size smaller than the source's; says which.
    """
    if config.model_type != "llama":
        raise ValueError(f"model_type: {config.model_type} cannot be widened, llama can")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("attention_bias, mlp_bias: models with biases cannot be widened")
    floors = (
        ("hidden", size.hidden, config.hidden_size),
        ("layers", size.layers, config.num_hidden_layers),
        ("intermediate", size.intermediate, config.intermediate_size),
    )
    for name, wanted, least in floors:
        if wanted < least:
            raise ValueError(f"{name}: {wanted} is below the source's {least}")
    if size.hidden % size.heads:
        raise ValueError(f"hidden: {size.hidden} is no multiple of heads {size.heads}")
    return LlamaConfig.from_dict(
        {
            **config.to_dict(),
            "hidden_size": size.hidden,
            "num_hidden_layers": size.layers,
            "intermediate_size": size.intermediate,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps * config.hidden_size / size.hidden,
            "dtype": "float32",
        }
    )


def widen(source: LlamaForCausalLM, size: Size) -> LlamaForCausalLM:
    """A model of the wanted size with the source's logits, float32.

    Raises:
        ValueError: the source cannot be widened to this size.
    """
    old = source.config
    heads = plan_heads(old, size)
    model = random_model(widened_config(old, size))
    norm_scale = (old.hidden_size / size.hidden) ** 0.5
    with torch.no_grad():
        _place(source.model.embed_tokens.weight, model.model.embed_tokens.weight)
        if not old.tie_word_embeddings:
            model.lm_head.weight[:, : old.hidden_size] = source.lm_head.weight
        _scale_norm(source.model.norm.weight, model.model.norm.weight, norm_scale)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            if index < old.num_hidden_layers:
                _fill_layer(source.model.layers[index], layer, heads, norm_scale)
    return model


def _fill_layer(
    old: torch.nn.Module, new: torch.nn.Module, heads: HeadPlan, norm_scale: float
) -> None:
    """Put an old layer into a random one whose outputs are zero."""
    attention, mlp = old.self_attn, old.mlp
    width = attention.q_proj.in_features
    size = attention.head_dim
    rows = {"q_proj": heads.queries, "k_proj": heads.keys, "v_proj": heads.keys}
    for name, plan in rows.items():
        taken, given = getattr(attention, name).weight, getattr(new.self_attn, name).weight
        for at, head in enumerate(plan):
            if head is not None:
                part = taken[head * size : (head + 1) * size]
                given[at * size : (at + 1) * size, :width] = part
    for at, head in enumerate(heads.queries):
        if head is not None:
            part = attention.o_proj.weight[:, head * size : (head + 1) * size]
            new.self_attn.o_proj.weight[:width, at * size : (at + 1) * size] = part
    for name in ("gate_proj", "up_proj"):
        weight = getattr(mlp, name).weight
        getattr(new.mlp, name).weight[: weight.shape[0], :width] = weight
    new.mlp.down_proj.weight[:width, : mlp.down_proj.in_features] = mlp.down_proj.weight
    for name in ("input_layernorm", "post_attention_layernorm"):
        _scale_norm(getattr(old, name).weight, getattr(new, name).weight, norm_scale)


def _place(old: torch.Tensor, new: torch.Tensor) -> None:
    """Old values in the leading corner of a matrix, zeros elsewhere."""
    new.zero_()
    new[: old.shape[0], : old.shape[1]] = old


def _scale_norm(old: torch.Tensor, new: torch.Tensor, scale: float) -> None:
    """Weights of a norm whose new channels are zero; theirs do not matter."""
    new[: old.shape[0]] = old * scale


def random_model(config: LlamaConfig) -> LlamaForCausalLM:
    """Random weights, the same in every run."""
    torch.manual_seed(_SEED)
    return LlamaForCausalLM(config).float().eval()


def logit_difference(first: LlamaForCausalLM, second: LlamaForCausalLM) -> float:
    """Greatest difference of two models' logits over random tokens."""
    generator = torch.Generator().manual_seed(_SEED)
    num_tokens = min(_CHECKED_TOKENS, first.config.max_position_embeddings)
    tokens = torch.randint(first.config.vocab_size, (2, num_tokens), generator=generator)
    with torch.no_grad():
        return float((first(tokens).logits - second(tokens).logits).abs().max())


def write_model(source: Path, out: Path, size: Size, *, is_random: bool) -> str:
    """Widen the checkpoint ``source`` into the folder ``out``; what was made, in words.

    Raises:
        ValueError: it cannot be widened, or the widened model's logits are not the source's.
    """
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if is_random:
        model, said = random_model(widened_config(small.config, size)), "random weights"
    else:
        model = widen(small, size)
        difference = logit_difference(small, model)
        if not difference <= ALLOWED_DIFFERENCE:
            raise ValueError(f"logits differ by {difference:.1e}, more than {ALLOWED_DIFFERENCE}")
        said = f"logits within {difference:.1e}"
    model.save_pretrained(out)
    for path in source.glob("*.json"):
        if not (out / path.name).exists() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    millions = [sum(weight.numel() for weight in one.parameters()) / 1e6 for one in (small, model)]
    return f"{out.name}: {millions[0]:.2f}M -> {millions[1]:.1f}M parameters, {said}"


def main(
    pair: Annotated[str, typer.Argument(help=f"one of {', '.join(PAIRS)}")],
    out: Annotated[Path, typer.Argument(help="folder for target/ and draft/")],
    target: Path = Path("demo/target"),
    draft: Path = Path("demo/draft"),
    is_random: Annotated[
        bool, typer.Option("--random", help="same shapes, random weights")
    ] = False,
) -> None:
    """Write both models of a widened pair as float32 checkpoints, ready for ``outrider export``."""
    if pair not in PAIRS:
        raise typer.BadParameter(f"{pair} is none of {', '.join(PAIRS)}", param_hint="pair")
    sources = {"target": (target, PAIRS[pair].target), "draft": (draft, PAIRS[pair].draft)}
    for name, (source, size) in sources.items():
        try:
            said = write_model(source, out / name, size, is_random=is_random)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=name) from error
        Console().print(said, highlight=False)


if __name__ == "__main__":
    typer.run(main)
