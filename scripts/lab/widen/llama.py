"""Wider and deeper Llamas that answer exactly as the small ones do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
