"""Sliding windows of attention while a model is traced: a token sees so many keys, its own the last of them.

Transformers hands the window of a layer to the attention function (``sliding_window``). In the graph it is a bias of
the scores, 0 where a key is in the window and minus infinity elsewhere, made once per call for all layers that have the
same window. It compares positions, not columns, so a tree's may replace them (``export.graph.trees``).

Source: ONNX operators Greater-13, Where-16; Beltagy et al. 2020 (arXiv:2004.05150), 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.onnx_opset import opset24
from outrider.export.graph.tracing.stack_tables import key_positions
from torch import Tensor

_ONNX: Any = opset24


class Windows:
    """Windows of the layers of one model.

    Args:
        num_positions: of a call; a window as wide hides nothing.

    Attributes:
        found: windows that layers asked for and that hide something, in tokens.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self.found: set[int] = set()
        self._biases: dict[int, Tensor] = {}
        self._span: tuple[Tensor, Tensor] | None = None

    def begin(self, positions: Tensor, cache: Tensor) -> None:
        """Start a call: positions of its tokens [B, T] int64, and keys of any layer [B, H, S, D]."""
        self._span = positions, cache
        self._biases.clear()

    def bias(self, window: int | None) -> Tensor | None:
        """Return the bias [B, 1, T, S] float32 of a layer's window; None where it hides nothing."""
        if window is None or window >= self._num_positions:
            return None
        assert self._span is not None
        if not self._biases:
            positions, cache = self._span
            self._span = positions, key_positions(cache)
        self.found.add(window)
        if window not in self._biases:
            self._biases[window] = window_bias(*self._span, window)
        return self._biases[window]

    def why_not(self, window: int | None) -> str:
        """Return how the windows that layers asked for are not the configuration's, which parity looks beyond.

        Empty where they are.
        """
        wanted = set() if window is None or window >= self._num_positions else {window}
        if self.found == wanted:
            return ""
        return (
            f"layers attend within windows of {sorted(self.found)} tokens, "
            f"sliding_window of the configuration says {sorted(wanted)}"
        )


@torch.library.custom_op("outrider::window_bias", mutates_args=())
def window_bias(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return 0 where a key is less than ``window`` positions before its query, else minus infinity, [B, 1, T, S].

    Keys behind their query are not looked at: attention is causal.

    Args:
        queries: [B, T] int64, positions.
        keys: [B or 1, 1, S] int64, positions.
        window: in tokens, the query's own included.
    """
    is_seen = in_window(queries, keys, window)
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))


def in_window(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return whether keys are in the windows of queries, [B, 1, T, S] bool; arguments as of ``window_bias``."""
    return keys[:, None] > queries[:, None, :, None] - window


@window_bias.register_fake
def _(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    return torch.empty(queries.shape[0], 1, queries.shape[1], keys.shape[2])


def _onnx_window_bias(queries: Any, keys: Any, window: int) -> Any:
    axis = _ONNX.Constant(value_ints=[1])
    last_hidden = _ONNX.Sub(queries, _ONNX.Constant(value_int=window))
    last_hidden = _ONNX.Unsqueeze(last_hidden, _ONNX.Constant(value_ints=[1, 3]))
    is_seen = _ONNX.Greater(_ONNX.Unsqueeze(keys, axis), last_hidden)
    seen = _ONNX.Constant(value_float=0.0)
    return _ONNX.Where(is_seen, seen, _ONNX.Constant(value_float=float("-inf")))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of the custom operator, for ``torch.onnx.export``."""
    return {torch.ops.outrider.window_bias.default: _onnx_window_bias}
