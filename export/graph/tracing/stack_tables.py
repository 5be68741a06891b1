"""What encoders and decoders compute from positions, as tables that are read by position while a model is traced.

A stack (encoder or decoder) counts its positions by itself, for one row that begins at zero. Two of its parts do so,
known by their attributes: ``embed_positions``, which adds an embedding of each place, and ``compute_bias`` of attention
modules, which biases scores by the distance of a key from its query. Both are asked once for all positions; while the
model is traced they read their answers at the positions of ``Places``, of every row its own.

Source: ONNX operators Range-11, Gather-13; relative position buckets of Raffel et al. 2020 (arXiv:1910.10683), 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from onnxscript.onnx_opset import opset24
from outrider.engines.base import BundleError
from outrider.export.weights.mapped import widened
from torch import Tensor, nn

KEY_POSITIONS_VALUE = "key_positions"
"""The value of the graph that holds the positions of keys: the exporter names it by its operator."""
_ONNX: Any = opset24


class Places:
    """Positions of the call being traced, in one stack.

    Attributes:
        queries: [B or 1, T] int64.
        keys: [1, 1, S] int64.
    """

    def __init__(self) -> None:
        self.queries: Tensor | None = None
        self.keys: Tensor | None = None


@torch.library.custom_op("outrider::key_positions", mutates_args=())
def key_positions(keys: Tensor) -> Tensor:
    """Return positions [1, 1, S] int64 of keys [B, H, S, D]: their columns.

    An operator of its own, so that the graph has one value that a tree's positions can replace.
    """
    return torch.arange(keys.shape[2], device=keys.device)[None, None]


@key_positions.register_fake
def _(keys: Tensor) -> Tensor:
    return keys.new_empty((1, 1, keys.shape[2]), dtype=torch.int64)


@torch.library.custom_op("outrider::distance_bias", mutates_args=())
def distance_bias(table: Tensor, index: Tensor) -> Tensor:
    """Return biases [B, H, T, S] of a table [H, n] by index [B, T, S] int64."""
    return table[:, index].transpose(0, 1).contiguous()


@distance_bias.register_fake
def _(table: Tensor, index: Tensor) -> Tensor:
    num_rows, num_queries, num_keys = index.shape
    return table.new_empty((num_rows, table.shape[0], num_queries, num_keys))


def _onnx_key_positions(keys: Any) -> Any:
    zero, one = _ONNX.Constant(value_int=0), _ONNX.Constant(value_int=1)
    size = _ONNX.Squeeze(_ONNX.Shape(keys, start=2, end=3))
    return _ONNX.Unsqueeze(_ONNX.Range(zero, size, one), _ONNX.Constant(value_ints=[0, 1]))


def _onnx_distance_bias(table: Any, index: Any) -> Any:
    return _ONNX.Transpose(_ONNX.Gather(table, index, axis=1), perm=[1, 0, 2, 3])


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of each custom operator, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.key_positions.default: _onnx_key_positions,
        torch.ops.outrider.distance_bias.default: _onnx_distance_bias,
    }


@contextmanager
def by_tables(stack: nn.Module, num_positions: int) -> Iterator[Places]:
    """Let a stack read what it computes from positions, and give it back as it was.

    Args:
        stack: an encoder or a decoder, whose weights may be mapped.
        num_positions: of its table of embeddings.

    Raises:
        BundleError: the stack's biases are no function of the distance up to their greatest.
    """
    places = Places()
    with ExitStack() as kept:
        if (embedding := getattr(stack, "embed_positions", None)) is not None:
            table = _PositionTable(_embeddings(stack, embedding, num_positions), places)
            stack.embed_positions = table
            kept.callback(setattr, stack, "embed_positions", embedding)
        for module in list(stack.modules()):
            if getattr(module, "has_relative_attention_bias", False):
                kept.enter_context(_biased_by_table(module, places))
        yield places


class _PositionTable(nn.Module):
    """An embedding of places [n, d], read at the positions of ``places``."""

    def __init__(self, table: Tensor, places: Places) -> None:
        super().__init__()
        # The graph's table is called so (``engines.bundle.limits.TABLE_SUFFIX``).
        self.by_position = nn.Parameter(table, requires_grad=False)
        self._places = places

    def forward(self, *_: object, **__: object) -> Tensor:
        assert self._places.queries is not None
        return nn.functional.embedding(self._places.queries, self.by_position)


class _AnsweredError(Exception):
    """Ends a stack's pass once its embedding of places has answered."""


def _embeddings(stack: Any, embedding: nn.Module, num_positions: int) -> Tensor:
    """Return the embeddings [num_positions, d] of a stack's places, asked as the stack asks for them."""
    answers: list[Tensor] = []

    def record(_: nn.Module, __: object, answer: Tensor) -> None:
        answers.append(answer)
        raise _AnsweredError

    # Where padding has a place of its own, only ordinary tokens are counted.
    token = 1 if stack.config.pad_token_id == 0 else 0
    hook = embedding.register_forward_hook(record)
    try:
        with torch.no_grad(), widened(stack):
            stack(input_ids=torch.full((1, num_positions), token))
    except _AnsweredError:
        pass
    finally:
        hook.remove()
    (answer,) = answers
    return answer.detach().reshape(num_positions, -1).float().clone()


@contextmanager
def _biased_by_table(module: Any, places: Places) -> Iterator[None]:
    """Replace a module's ``compute_bias`` by reads of a table over clipped distances key - query."""
    farthest = int(module.relative_attention_max_distance)
    table, lowest = _bias_table(module, farthest)

    def compute_bias(*_: object, **__: object) -> Tensor:
        assert places.queries is not None and places.keys is not None
        distance = places.keys - places.queries[:, :, None]
        index = distance.clamp(lowest, lowest + table.shape[1] - 1) - lowest
        return distance_bias(module.by_distance, index)

    module.by_distance = nn.Parameter(table, requires_grad=False)
    module.compute_bias = compute_bias
    try:
        yield
    finally:
        del module.compute_bias, module.by_distance


def _bias_table(module: Any, farthest: int) -> tuple[Tensor, int]:
    """Return biases [H, n] by distance key - query, from the lowest distance on, which is returned too.

    Causal modules have distances -farthest to 0, others also 1 to farthest; beyond, biases stay as they are.
    """
    num_asked = 2 * farthest + 1
    with torch.no_grad(), widened(module):
        answer = module.compute_bias(num_asked, num_asked)[0].float()
    before, after = answer[:, -1, :], answer[:, 0, :]
    by_distance = before if module.is_causal else torch.cat([before, after[:, 1:]], dim=1)
    first, last = num_asked - 1 - farthest, min(num_asked + farthest, by_distance.shape[1])
    table = by_distance[:, first:last].contiguous()
    is_flat = (by_distance[:, :first] == table[:, :1]).all()
    if not (is_flat and (by_distance[:, last:] == table[:, -1:]).all()):
        raise BundleError("relative_attention_max_distance: biases change beyond it")
    return table, -farthest
