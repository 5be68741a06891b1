"""A head's answers by plain products, written from its description: what its graph is compared with.

Slow and clear; it has no cache, and shares no code with what is traced but the speeds of rotary embeddings that are
stretched (``rope_type``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from outrider.export.heads.checkpoint import HeadCheckpoint
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def head_answers(
    head: HeadCheckpoint, embedding: Tensor, features: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logits [n, V_draft] behind each token of a text, and recycled features [n, F], float32.

    Args:
        head: its tensors.
        embedding: [V, h] float32, the head's or the target's.
        features: [n, F] float32, of the token before each.
        tokens: [n] int64.
    """
    held, eps = head.tensors, head.config.rms_norm_eps

    def norm(name: str, values: Tensor) -> Tensor:
        return held[name] * values * (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

    normed = norm("layer.hidden_norm.weight", features)
    residual = normed if head.norm_before_residual else features
    pairs = torch.cat([norm("layer.input_layernorm.weight", embedding[tokens]), normed], dim=-1)
    hidden = residual + _attention(head, pairs)
    inner = norm("layer.post_attention_layernorm.weight", hidden)
    gate = functional.silu(inner @ held["layer.mlp.gate_proj.weight"].T)
    up = inner @ held["layer.mlp.up_proj.weight"].T
    hidden = hidden + (gate * up) @ held["layer.mlp.down_proj.weight"].T
    output = norm("norm.weight", hidden)
    return output @ held["lm_head.weight"].T, output if head.norm_output else hidden


def features_of(head: HeadCheckpoint, streams: list[Tensor]) -> Tensor:
    """Return features [..., F] float32 of the streams [..., hidden] that enter a target's tapped layers."""
    held, eps = head.tensors, head.config.rms_norm_eps

    def norm(name: str, values: Tensor) -> Tensor:
        return held[name] * values * (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

    if head.fc_norm:
        streams = [norm(f"fc_norm.{index}.weight", one) for index, one in enumerate(streams)]
    joined = torch.cat(streams, dim=-1)
    if head.norm_before_fc:
        joined = norm("input_norm.weight", joined)
    return joined @ held["fc.weight"].T


def _attention(head: HeadCheckpoint, pairs: Tensor) -> Tensor:
    """Return what attention adds behind pairs [n, 2 h], each seeing those up to itself."""
    held, config = head.tensors, head.config
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    places = torch.arange(len(pairs))
    cos, sin = _turns(config, size, places)

    def heads(name: str) -> Tensor:
        values = pairs @ held[f"layer.self_attn.{name}_proj.weight"].T
        values = values + _bias(held, f"layer.self_attn.{name}_proj.bias")
        values = values.view(len(pairs), -1, size).transpose(0, 1)
        weight = held.get(f"layer.self_attn.{name}_norm.weight")
        if weight is not None:
            mean = values.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps
            values = weight * values * mean.rsqrt()
        return values

    def turned(values: Tensor) -> Tensor:
        first, second = values.chunk(2, dim=-1)
        return values * cos + torch.cat([-second, first], dim=-1) * sin

    queries, keys, values = turned(heads("q")), turned(heads("k")), heads("v")
    groups = queries.shape[0] // keys.shape[0]
    keys, values = (one.repeat_interleave(groups, dim=0) for one in (keys, values))
    scores = queries @ keys.transpose(1, 2) / size**0.5
    scores = scores.masked_fill(places[None, :] > places[:, None], -torch.inf)
    answers = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(pairs), -1)
    added: Tensor = answers @ held["layer.self_attn.o_proj.weight"].T
    return added + _bias(held, "layer.self_attn.o_proj.bias")


def _turns(config: PretrainedConfig, size: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [n, size] of the angles by which places [n] turn each half of a query or key."""
    rope = config.rope_parameters
    speeds, scale = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size), 1.0
    if rope["rope_type"] != "default":
        speeds, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = (places[:, None] * speeds).repeat(1, 2)
    return scale * angles.cos(), scale * angles.sin()


def _bias(held: Mapping[str, Tensor], name: str) -> Tensor | float:
    return held.get(name, 0.0)
