"""Attention over latents, as a trace wants it: keys put together from parts, and rotations without complex numbers.

Models with latents (multi-head latent attention) fill a key's columns slice by slice, and some rotate pairs of columns
by complex numbers, which ONNX has not. Here both are an operator of ONNX each.

Source: ONNX operators Concat-13, RotaryEmbedding-23 (interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset24
from torch import Tensor, nn


@torch.library.custom_op("outrider::rotate_pairs", mutates_args=())
def rotate_pairs(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return values [B, h, T, D] whose columns 2 i and 2 i + 1 are turned by the angle i of their token.

    ``cos`` and ``sin`` [B, T, D / 2] are those of the angles.
    """
    cos, sin = cos[:, None], sin[:, None]
    real, imaginary = values[..., 0::2], values[..., 1::2]
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(turned, dim=-1).flatten(3)


@rotate_pairs.register_fake
def _(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(values)


# As Any: the types of these functions know tensors, and what is traced here is none.
_ONNX: Any = opset24


def _onnx_rotate(values: Any, cos: Any, sin: Any) -> Any:
    return _ONNX.RotaryEmbedding(values, cos, sin, interleaved=1)


def _onnx_put_slice(
    base: Any,
    update: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Put a slice into a tensor by Concat: what was only made to be filled falls away."""
    size, begin = None if base.shape is None else base.shape[dim], start or 0
    if step != 1 or not isinstance(size, int) or not isinstance(begin, int):
        return core.aten_slice_scatter(base, update, dim, start, end, step)
    end = size if end is None else min(end, size)
    parts = [_slice(base, dim, 0, begin), update, _slice(base, dim, end, size)]
    return _ONNX.Concat(*(part for part in parts if part is not None), axis=dim)


def _slice(value: Any, axis: int, begin: int, end: int) -> Any:
    """Return columns of a tensor, of one that was put together the part itself; None for no columns."""
    if begin == end:
        return None
    node = value.producer()
    if begin == 0 and node is not None and node.op_type == "Concat":
        first = node.inputs[0]
        is_along = node.attributes.get_int("axis", 0) == axis
        if is_along and first.shape is not None and first.shape[axis] == end:
            return first
    return _ONNX.Slice(value, *(_ONNX.Constant(value_ints=[one]) for one in (begin, end, axis)))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of operators of attention over latents, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.rotate_pairs.default: _onnx_rotate,
        torch.ops.aten.slice_scatter.default: _onnx_put_slice,
    }


class _Angles:
    """What a model has for its complex angles [B, T, D / 2]: nothing but what rotates pairs of columns by them."""

    def __init__(self, angles: Tensor) -> None:
        self._cos, self._sin = torch.view_as_real(angles).unbind(-1)

    def unsqueeze(self, dim: int) -> _Angles:
        """Return the angles for all heads."""
        assert dim == 1
        return self

    def to(self, *_: object) -> _Angles:
        """Return the angles where they are."""
        return self

    def __rmul__(self, pairs: Tensor) -> Tensor:
        """Return complex pairs [B, h, T, D / 2], rotated."""
        turned = rotate_pairs(torch.view_as_real(pairs).flatten(3), self._cos, self._sin)
        return torch.view_as_complex(turned.unflatten(3, (-1, 2)))


@contextmanager
def angles_without_complex(model: nn.Module) -> Iterator[None]:
    """Let modules that answer with complex angles answer with such as rotate without complex numbers."""

    def replace(_module: nn.Module, _given: object, answer: object) -> object:
        is_complex = isinstance(answer, Tensor) and answer.is_complex()
        return _Angles(answer) if is_complex else None

    hooks = [module.register_forward_hook(replace) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
