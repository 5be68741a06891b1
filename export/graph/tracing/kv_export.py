"""The cache and the attention function that make an unmodified Transformers model canonical.

The ``Cache`` writes each row's new keys and values at that row's position (ONNX TensorScatter). The attention
function reads keys up to each row's length (``tracing.attention``), causally where the module says so, within a layer's
window where it has one (``tracing.windows``), and beside its sinks. What it computes with are custom operators that
run in PyTorch too. No architecture is known by name.

Lengths are passed as a 4-dimensional ``attention_mask`` [B, 1, 1, 1] int64, which Transformers hands to the attention
function unchanged, for every architecture.

Source: ONNX operator TensorScatter-24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from onnxscript.onnx_opset import opset24
from outrider.export.graph.tracing import attention
from outrider.export.graph.tracing.attention import attend, attend_scored, beside_sinks
from outrider.export.graph.tracing.mixers import Mixers
from outrider.export.graph.tracing.windows import Windows
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

ATTENTION_NAME = "outrider_kv"
# The value of the graph that holds every token's position: the exporter names it by its operator.
POSITIONS_VALUE = "span_positions"

# Arguments of an attention function that change its result and that the graph cannot express yet.
_REFUSED_ARGUMENTS = ("sinks", "head_mask", "alibi", "cu_seq_lens_q")


class UnsupportedAttentionError(Exception):
    """The model's attention takes an argument that the canonical graph cannot express."""


@torch.library.custom_op("outrider::scatter_kv", mutates_args=())
def scatter_kv(past: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """Return the cache [B, H, S, D] with row b's update [B, H, T, D] written from position start[b] on."""
    columns = start[:, None] + torch.arange(update.shape[2], device=update.device)
    index = columns[:, None, :, None].expand(update.shape)
    return past.scatter(2, index, update)


@scatter_kv.register_fake
def _(past: Tensor, update: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(past)


@torch.library.custom_op("outrider::span_positions", mutates_args=())
def span_positions(start: Tensor, tokens: Tensor, last: int) -> Tensor:
    """Return positions [B, T] int64 of spans of the width of tokens [., T], from start [B] on, none above ``last``.

    An operator of its own, so that the graph has one value that a tree's positions can replace.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return (start[:, None] + columns).clamp(max=last)


@span_positions.register_fake
def _(start: Tensor, tokens: Tensor, last: int) -> Tensor:
    # One start for all rows is no axis that varies.
    return torch.empty_like(tokens[:1] if isinstance(start.shape[0], int) else tokens)


# As Any: the types of these functions know tensors, and what is traced here is none.
_ONNX: Any = opset24


def _onnx_positions(start: Any, tokens: Any, last: int) -> Any:
    axis = _ONNX.Constant(value_ints=[1])
    zero, one = _ONNX.Constant(value_int=0), _ONNX.Constant(value_int=1)
    num_tokens = _ONNX.Squeeze(_ONNX.Shape(tokens, start=1, end=2))
    columns = _ONNX.Range(zero, num_tokens, one)
    positions = _ONNX.Add(_ONNX.Unsqueeze(start, axis), columns)
    return _ONNX.Min(positions, _ONNX.Constant(value_int=last))


def _onnx_scatter(past: Any, update: Any, start: Any) -> Any:
    return _ONNX.TensorScatter(past, update, start, axis=2, mode="linear")


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of each custom operator, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.span_positions.default: _onnx_positions,
        torch.ops.outrider.scatter_kv.default: _onnx_scatter,
    } | attention.translation_table()


class ScatterCache(Cache):
    """Caches of all layers as plain tensors; ``update`` replaces a layer's tensors.

    Where it ``is_late``, layers would cache latents and expand those of the whole text in every call: ``update`` passes
    latents on as they are, and the attention function, which is given them expanded, calls ``write``. What mixers keep
    is theirs: it says that there is nothing before the span.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        start: Tensor,
        *,
        is_late: bool = False,
        mixers: Mixers | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._is_late = is_late
        self._mixers = mixers
        self.keys = list(keys)
        self.values = list(values)
        self.start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's caches [B, H, S, D] with the new states [B, H, T, D] written in, or those states."""
        if self._is_late:
            return key_states, value_states
        return self.write(key_states, value_states, layer_idx)

    def write(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Write new states, of D columns or fewer, and return the layer's caches [B, H, S, D]."""
        if self._mixers is not None:
            layer_idx = self._mixers.attention.index(layer_idx)
        key_states, value_states = (
            widened(states, self.keys[layer_idx].shape[3]) for states in (key_states, value_states)
        )
        self.keys[layer_idx] = self.scattered(self.keys[layer_idx], key_states)
        self.values[layer_idx] = self.scattered(self.values[layer_idx], value_states)
        return self.keys[layer_idx], self.values[layer_idx]

    def scattered(self, past: Tensor, states: Tensor) -> Tensor:
        """Return a cache [B, H, S, D] with new states [B, H, T, D] written in."""
        return scatter_kv(past, states, self.start)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return zero: positions are given explicitly."""
        return 0

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Return no window, so that a module takes no branch of its own for spans of one token."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """Return no state, likewise."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Return a convolution's inputs as they are, and note whose they are."""
        assert self._mixers is not None
        self._mixers.begin_convolution(layer_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, **kwargs: Any) -> Any:
        """Note whose scan it was."""
        assert self._mixers is not None
        self._mixers.end_scan(layer_idx)
        return recurrent_states


def widened(states: Tensor, size: int) -> Tensor:
    """Return states [B, H, T, D] with zeros behind their columns, ``size`` of all."""
    missing = size - states.shape[3]
    return functional.pad(states, (0, missing)) if missing else states


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    *,
    windows: Windows | None = None,
    late_cache: ScatterCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _check_arguments(attention_mask, kwargs)
    if sliding_window is not None:
        if windows is None:
            raise UnsupportedAttentionError("the model's attention has a window beside a source")
        position_bias = _sum(position_bias, windows.bias(sliding_window))
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    softcap = float(kwargs.get("softcap") or 0.0)
    lengths = attention_mask.reshape(-1)
    # Values may be narrower than keys, and the cache's are widened.
    size = getattr(module, "v_head_dim", value.shape[3])
    if late_cache is not None:
        layer: Any = module.layer_idx
        key, value = late_cache.write(key, value, layer)
        query = widened(query, key.shape[3])
    # As PyTorch's own: a module that does not say so is causal.
    is_causal = bool(getattr(module, "is_causal", True))
    given = query, key, value, position_bias, lengths, scale, softcap, is_causal
    if s_aux is None:
        output = attend(*given)
    else:
        answers, scores = attend_scored(*given)
        output = beside_sinks(answers, scores, s_aux)
    output = output.transpose(1, 2)
    return (output if size == value.shape[3] else output[..., :size]).contiguous(), None


def _check_arguments(attention_mask: Tensor | None, arguments: Mapping[str, Any]) -> None:
    if attention_mask is None or attention_mask.shape[1:] != (1, 1, 1):
        raise UnsupportedAttentionError("the model builds its own attention mask")
    for name in _REFUSED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedAttentionError(f"the model's attention uses {name}")


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


class GatheringHead(nn.Module):
    """Vocabulary projection of the wanted columns only."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.columns: Tensor | None = None

    @property
    def bias(self) -> Any:
        """The projection's own, which models of BERT's family tie to another name."""
        return getattr(self.head, "bias", None)

    @property
    def weight(self) -> Any:
        """The projection's own, of which Mamba-2 asks the type."""
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [B, R, V] of columns [B, R] of hidden states [B, T, width]."""
        assert self.columns is not None
        index = self.columns[:, :, None].expand(-1, -1, hidden.shape[2])
        return self.head(hidden.gather(1, index))


@contextmanager
def taken_over(model: PreTrainedModel, windows: Windows | None = None) -> Iterator[GatheringHead]:
    """Give a model the canonical attention function and a head of wanted columns, and its own back at the end.

    Without ``windows`` no layer may have one.
    """
    old_attention, old_head = model.config._attn_implementation, model.get_output_embeddings()
    head = GatheringHead(old_head)
    model.set_output_embeddings(head)
    AttentionInterface.register(ATTENTION_NAME, partial(_attention, windows=windows))
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield head
    finally:
        model.set_output_embeddings(old_head)
        model.set_attn_implementation(old_attention)


class CanonicalDecoder(nn.Module):
    """A decoder that was ``taken_over``, with the tensor interface of the canonical graph."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: GatheringHead,
        windows: Windows,
        *,
        max_position: int,
        mixers: Mixers | None = None,
        write_features: Callable[[ScatterCache], None] | None = None,
    ) -> None:
        super().__init__()
        self._gathering = head
        self._windows = windows
        self._mixers = mixers
        self._write_features = write_features
        self._is_late = any(hasattr(module, "expand_kv") for module in model.modules())
        self.model = model
        self.max_position = max_position

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        logit_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        *kept: Any,
    ) -> tuple[Any, ...]:
        """Return logits [B, R, V] of the wanted columns, the caches with the span written in, and what mixers keep.

        Args:
            tokens: [B, T] int64.
            start: [B] int64, cached tokens of each row.
            logit_positions: [B, R] int64, columns of the span.
            keys: one [B, H, S, D] float32 per layer, start + T <= S.
            values: one [B, H, S, D] float32 per layer.
            kept: of models with mixers alone; see ``Mixers.begin``.
        """
        num_tokens = tokens.shape[1]
        self._gathering.columns = logit_positions
        cache = ScatterCache(keys, values, start, is_late=self._is_late, mixers=self._mixers)
        known = {"late_cache": cache} if self._is_late else {}
        if not keys:  # a model without attention has another name for its cache
            known["cache_params"] = cache
        # Padded columns may lie beyond the model's position table.
        positions = span_positions(start, tokens, self.max_position - 1)
        if keys:
            self._windows.begin(positions, keys[0])
        if self._mixers is not None:
            self._mixers.begin(*kept)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=(start + num_tokens)[:, None, None, None],
            past_key_values=cache,
            use_cache=True,
            **known,
        )
        if self._write_features is not None:
            self._write_features(cache)
        mixed = self._mixers.kept() if self._mixers is not None and kept else ()
        return output.logits, cache.keys, cache.values, *mixed


class FeaturedDecoder(nn.Module):
    """A head that was ``taken_over``: it reads features too, and answers what stands for those of the token behind."""

    def __init__(self, decoder: CanonicalDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        logit_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        features: Tensor,
    ) -> tuple[Any, ...]:
        """Return what ``CanonicalDecoder`` does, and recycled features; both are [B, T, F] float32."""
        head: Any = self.decoder.model
        head.features = features
        answers = self.decoder(tokens, start, logit_positions, keys, values)
        return (*answers, head.recycled)
