"""Twelve mistakes of an export, each planted in a model of Transformers.

A graph that was made of the model before differs from the model after as a wrong graph would from a right model. Each
is as small as it comes: in one layer, by one token, in the last digits. ``plant`` undoes what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import ml_dtypes
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Undo = Callable[[], None]
# Of a certificate's texts; the cache is behind it, from the prefill's last tokens on.
_LATE = 8


def _middle(model: PreTrainedModel) -> Any:
    layers = model.model.layers
    return layers[len(layers) // 2]


def _set(owner: Any, name: str, value: Any) -> Undo:
    held = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, held)


def _weight(module: nn.Module, change: Callable[[Tensor], Tensor], name: str = "weight") -> Undo:
    value = getattr(module, name)
    return _set(module, name, nn.Parameter(change(value.data).contiguous(), False))


def _both(*undone: Undo) -> Undo:
    def undo() -> None:
        for one in undone:
            one()

    return undo


def norm_epsilon(model: PreTrainedModel) -> Undo:
    """1e-5 for 1e-6, or the other way, in all norms."""
    kinds = ("variance_epsilon", "eps")
    norms = [(one, kind) for one in model.modules() for kind in kinds if hasattr(one, kind)]
    right = getattr(*norms[0])
    return _both(*(_set(one, kind, 1e-6 if right > 5e-6 else 1e-5) for one, kind in norms))


def rope_off_by_one(model: PreTrainedModel) -> Undo:
    """What comes behind a prompt stands one place too late."""
    rotary = model.model.rotary_emb
    right = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> Any:
        return right(x, position_ids + (position_ids >= _LATE), *more, **named)

    return _set(rotary, "forward", forward)


def rope_base(model: PreTrainedModel) -> Undo:
    """A hundredth larger."""
    rotary = model.model.rotary_emb
    names = [
        name
        for name, _ in rotary.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    ]

    def slower(held: Tensor) -> Tensor:
        exponents = torch.arange(len(held), dtype=held.dtype) / len(held)
        return held * 1.01**-exponents

    return _both(*(_set(rotary, name, slower(getattr(rotary, name))) for name in names))


def attention_scale(model: PreTrainedModel) -> Undo:
    """A hundredth larger, in one layer."""
    attention = _middle(model).self_attn
    return _set(attention, "scaling", attention.scaling * 1.01)


def transposed_projection(model: PreTrainedModel) -> Undo | None:
    """Queries of one layer, or what its heads are joined by, if either is square."""
    attention = _middle(model).self_attn
    for one in (attention.o_proj, attention.q_proj):
        if one.weight.shape[0] == one.weight.shape[1]:
            return _weight(one, lambda weight: weight.T)
    # As a flat file read in the other order.
    return _weight(attention.o_proj, lambda weight: weight.T.reshape(weight.shape))


def missing_bias(model: PreTrainedModel) -> Undo | None:
    """Of the values of one layer."""
    values = _middle(model).self_attn.v_proj
    return None if values.bias is None else _weight(values, torch.zeros_like, "bias")


def swapped_gate(model: PreTrainedModel) -> Undo:
    """In one layer."""
    mlp = _middle(model).mlp
    gate, up = mlp.gate_proj, mlp.up_proj
    return _both(_set(mlp, "gate_proj", up), _set(mlp, "up_proj", gate))


def window_off_by_one(model: PreTrainedModel) -> Undo | None:
    """One token fewer is seen."""
    window = getattr(model.config, "sliding_window", None)
    if not window or "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return None
    windowed = [
        one.self_attn
        for one in model.model.layers
        if getattr(one.self_attn, "sliding_window", None)
    ]
    return _both(
        _set(model.config, "sliding_window", window - 1),
        *(_set(one, "sliding_window", window - 1) for one in windowed),
    )


def key_heads_shared_wrongly(model: PreTrainedModel) -> Undo | None:
    """Query heads of one layer take key heads in turns, not in groups."""
    attention = _middle(model).self_attn
    groups, size = attention.num_key_value_groups, attention.head_dim
    num_keys = model.config.num_key_value_heads
    if groups == 1 or num_keys == 1:
        return None
    # Head h = k * groups + g read as g * num_keys + k, its output put where it belongs.
    order = torch.arange(num_keys * groups).view(groups, num_keys).T.flatten()

    def rows(weight: Tensor) -> Tensor:
        return weight.view(len(order), size, *weight.shape[1:])[order].reshape(weight.shape)

    def columns(weight: Tensor) -> Tensor:
        return rows(weight.T).T

    q_proj = attention.q_proj
    bias = [] if q_proj.bias is None else [_weight(q_proj, rows, "bias")]
    return _both(_weight(q_proj, rows), *bias, _weight(attention.o_proj, columns))


def another_activation(model: PreTrainedModel) -> Undo:
    """GELU with or without its approximation by tanh; GELU for SiLU. In one layer."""
    mlp = _middle(model).mlp
    right = type(mlp.act_fn).__name__.lower()
    wrong = nn.GELU() if "tanh" in right or "silu" in right else nn.GELU(approximate="tanh")
    return _set(mlp, "act_fn", wrong)


def half_norm(model: PreTrainedModel) -> Undo:
    """What one norm answers is rounded to bfloat16."""

    def rounded(_: nn.Module, __: object, found: Tensor) -> Tensor:
        values = found.numpy()  # where nobody widens what is narrow
        return torch.from_numpy(values.astype(ml_dtypes.bfloat16).astype(values.dtype))

    return cast("Undo", _middle(model).input_layernorm.register_forward_hook(rounded).remove)


def norm_without_one(model: PreTrainedModel) -> Undo | None:
    """One norm of Gemma's multiplies by ``w``, not by ``1 + w``."""
    norm = _middle(model).input_layernorm
    return _weight(norm, lambda weight: weight - 1) if "Gemma" in type(norm).__name__ else None


MISTAKES: Mapping[str, Callable[[PreTrainedModel], Undo | None]] = {
    one.__name__: one
    for one in (
        norm_epsilon,
        rope_off_by_one,
        rope_base,
        attention_scale,
        transposed_projection,
        missing_bias,
        swapped_gate,
        window_off_by_one,
        key_heads_shared_wrongly,
        another_activation,
        half_norm,
        norm_without_one,
    )
}


@contextmanager
def planted(model: PreTrainedModel, mistake: str) -> Iterator[bool]:
    """Whether the model has what the mistake is about; inside it has the mistake, if so."""
    undo = MISTAKES[mistake](model)
    try:
        yield undo is not None
    finally:
        if undo is not None:
            undo()
