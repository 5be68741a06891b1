"""What the canonical graphs take and answer: names in order, axes that vary, and an example to trace with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from outrider.engines.bundle import encoder_decoder, names
from outrider.engines.bundle.states import StatesEntry, kept_names, place_names
from outrider.export.model_config import EncoderConfig, ModelConfig
from torch import Tensor

_BATCH, _TOKENS, _CAPACITY, _WANTED, _LENGTH, _MEMORY = (
    torch.export.Dim(name, min=1, max=1 << 20)
    for name in ("batch", "tokens", "capacity", "wanted", "length", "memory")
)
_SETTLED, _OPEN = (torch.export.Dim(name, min=0, max=1 << 20) for name in ("settled", "open"))
# Rows of a rectangle, batch * tokens, which no name stands for.
_ANY = torch.export.Dim.AUTO
# Sizes of the traced example; distinct and above 1, so that no axis is taken for a constant.
_SIZES = {_BATCH: 2, _TOKENS: 5, _CAPACITY: 11, _WANTED: 3, _LENGTH: 7, _MEMORY: 13}


@dataclass(frozen=True, slots=True)
class Signature:
    """Tensors of a graph.

    Attributes:
        example: arguments of the traced module; lists where it takes one tensor per layer.
        axes: of every argument, those that vary.
        inputs: names, one per tensor of the example.
        outputs: names.
    """

    example: tuple[Any, ...]
    axes: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def decoder_signature(model_config: ModelConfig, states: StatesEntry | None = None) -> Signature:
    """Return the tensors of ``model.onnx``, of a decoder-only model, with mixers or without, or beside an encoder."""
    layers = range(model_config.num_layers)
    heads = model_config.heads
    cache_axes = [{0: _BATCH, 2: _CAPACITY}] * model_config.num_layers
    example: list[Any] = [
        _ones(_BATCH, _TOKENS),
        torch.arange(_SIZES[_BATCH]),
        _ones(_BATCH, _WANTED),
        _caches(heads, _CAPACITY),
        _caches(heads, _CAPACITY),
    ]
    axes: list[Any] = [{0: _BATCH, 1: _TOKENS}, {0: _BATCH}, {0: _BATCH, 1: _WANTED}]
    axes += [cache_axes, cache_axes]
    inputs = [names.TOKENS, names.START, names.LOGIT_POSITIONS]
    inputs += [*map(names.key_name, layers), *map(names.value_name, layers)]
    outputs = [names.LOGITS, *map(names.new_key_name, layers)]
    outputs += map(names.new_value_name, layers)
    if model_config.source is not None:
        example.insert(3, _ones(_BATCH))
        axes.insert(3, {0: _BATCH})
        inputs.insert(3, encoder_decoder.SOURCE_LENGTH)
        memory, memory_axes, cached = _memory(model_config, model_config.source)
        example += memory
        axes += memory_axes
        inputs += cached
    if states is not None:
        kept, kept_axes = _kept(states)
        example += kept
        axes.append(tuple(kept_axes))
        inputs += [*kept_names(states), *place_names(states)]
        outputs += [f"new_{name}" for name in kept_names(states)]
    return Signature(tuple(example), tuple(axes), tuple(inputs), tuple(outputs))


def head_signature(model_config: ModelConfig, size: int) -> Signature:
    """Return the tensors of a head's graph, which reads ``size`` numbers beside each token."""
    one = decoder_signature(model_config)
    features = torch.zeros(_SIZES[_BATCH], _SIZES[_TOKENS], size)
    return Signature(
        (*one.example, features),
        (*one.axes, {0: _BATCH, 1: _TOKENS}),
        (*one.inputs, names.FEATURES),
        (*one.outputs, names.RECYCLED),
    )


def _kept(states: StatesEntry) -> tuple[list[Any], list[Any]]:
    """Return examples and axes of states, pending rows and windows, and of a call's places."""
    batch, num_rows = _SIZES[_BATCH], _SIZES[_BATCH] * _SIZES[_TOKENS]
    scans = states.mixers if states.row else 0
    shapes = [
        (scans, (batch, states.heads, states.key_size, states.value_size)),
        (scans, (batch, states.max_open, states.row)),
        (states.mixers if states.channels else 0, (batch, states.window, states.channels)),
    ]
    example: list[Any] = [[torch.zeros(shape) for _ in range(count)] for count, shape in shapes]
    axes: list[Any] = [[{0: _BATCH}] * count for count, _ in shapes]
    if states.channels:
        example += [_zeros(states.kernel, num_rows), _zeros(batch, states.window)]
        axes += [{1: _ANY}, {0: _BATCH}]
    if states.row:
        example += [_zeros(batch, 6), _zeros(batch, 7), _zeros(num_rows)]
        example += [_zeros(batch, states.max_open)]
        axes += [{0: _BATCH, 1: _SETTLED}, {0: _BATCH, 1: _OPEN}, {0: _ANY}, {0: _BATCH}]
    return example, axes


def encode_signature(model_config: ModelConfig, source: EncoderConfig) -> Signature:
    """Return the tensors of ``encode.onnx``."""
    memory, memory_axes, cached = _memory(model_config, source)
    return Signature(
        (_ones(_BATCH, _LENGTH), _ones(_BATCH), *memory),
        ({0: _BATCH, 1: _LENGTH}, {0: _BATCH}, *memory_axes),
        (encoder_decoder.SOURCE, encoder_decoder.SOURCE_LENGTH, *cached),
        tuple(f"new_{name}" for name in cached),
    )


def _memory(
    model_config: ModelConfig, source: EncoderConfig
) -> tuple[list[Any], list[Any], list[str]]:
    """Return examples, axes and names of the caches of sources: all keys, then all values."""
    layers = range(model_config.num_layers)
    heads = [(source.num_heads, source.head_size)] * model_config.num_layers
    axes = [{0: _BATCH, 2: _MEMORY}] * model_config.num_layers
    cached = [encoder_decoder.cross_key_name(layer) for layer in layers]
    cached += [encoder_decoder.cross_value_name(layer) for layer in layers]
    return [_caches(heads, _MEMORY), _caches(heads, _MEMORY)], [axes, axes], cached


def _caches(heads: Sequence[tuple[int, int]], capacity: Any) -> list[Tensor]:
    """Return an example per layer, of so many heads of this size."""
    return [torch.zeros(_SIZES[_BATCH], count, _SIZES[capacity], size) for count, size in heads]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _ones(*axes: Any) -> Tensor:
    return torch.ones([_SIZES[axis] for axis in axes], dtype=torch.int64)
