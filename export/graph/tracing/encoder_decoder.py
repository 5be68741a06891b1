"""Encoder-decoder models with the tensor interfaces of the two canonical graphs.

The decoder attends to keys and values of its source that it is given. The encoder's graph computes them: it is the
whole model asked for one token, of which only the caches of the source are wanted, and the rest of the decoder drops
out of the graph. No architecture is known by name.

Source: ONNX operators TensorScatter-24 and Attention-24.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from outrider.export.graph.tracing.kv_export import GatheringHead, ScatterCache, span_positions
from outrider.export.graph.tracing.stack_tables import Places, key_positions
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache


class _TextAndSource(EncoderDecoderCache):
    """A cache of the text and one of the source; of a source that was read, nothing is computed again."""

    def __init__(self, text: Cache, source: Cache, *, read_layers: int) -> None:
        # Not EncoderDecoderCache's own, which counts what both hold.
        Cache.__init__(self, layers=[])
        self.self_attention_cache = text
        self.cross_attention_cache = source
        self.is_updated = dict.fromkeys(range(read_layers), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return zero: positions are given by tables."""
        return 0


class _ReadSource(Cache):
    """Keys and values of a source, which was read."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        super().__init__(layers=[])
        self.layers: Any = [
            SimpleNamespace(keys=key, values=value) for key, value in zip(keys, values, strict=True)
        ]


class SourcedDecoder(nn.Module):
    """The decoder of a model that was ``taken_over`` and reads its positions from tables."""

    def __init__(
        self, model: PreTrainedModel, head: GatheringHead, places: Places, *, max_position: int
    ) -> None:
        super().__init__()
        self._gathering = head
        self.model = model
        self.max_position = max_position
        self._places = places

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        logit_positions: Tensor,
        source_length: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        cross_keys: list[Tensor],
        cross_values: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return logits [B, R, V] of the wanted columns and the text's caches with the span written in.

        Args:
            tokens: [B, T] int64.
            start: [B] int64, cached tokens of each row's text.
            logit_positions: [B, R] int64, columns of the span.
            source_length: [B] int64, tokens of each row's source.
            keys: one [B, H, S, D] float32 per layer, start + T <= S.
            values: one [B, H, S, D] float32 per layer.
            cross_keys: one [B, H, Sx, D] float32 per layer, source_length <= Sx.
            cross_values: one [B, H, Sx, D] float32 per layer.
        """
        self._gathering.columns = logit_positions
        self._places.queries = span_positions(start, tokens, self.max_position - 1)
        self._places.keys = key_positions(keys[0])
        text = ScatterCache(keys, values, start)
        source = _ReadSource(cross_keys, cross_values)
        output = self.model(
            # What was read stands in the cache: the encoder's answer is not looked at.
            encoder_outputs=(torch.zeros(tokens.shape[0], 1, 1),),
            attention_mask=source_length[:, None, None, None],
            decoder_input_ids=tokens,
            decoder_attention_mask=(start + tokens.shape[1])[:, None, None, None],
            past_key_values=_TextAndSource(text, source, read_layers=len(keys)),
            use_cache=True,
        )
        return output.logits, text.keys, text.values


class SourceReader(nn.Module):
    """The encoder of a model that was ``taken_over``, with the decoder's projections of what it answers."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: GatheringHead,
        encoder: Places,
        decoder: Places,
        *,
        max_source: int,
    ) -> None:
        super().__init__()
        self._gathering = head
        self.model = model
        self.max_source = max_source
        self._encoder = encoder
        self._decoder = decoder

    def forward(
        self,
        source: Tensor,
        source_length: Tensor,
        cross_keys: list[Tensor],
        cross_values: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the caches of sources with every row's source written in from column 0 on.

        Args:
            source: [B, L] int64.
            source_length: [B] int64, tokens of each row's source, the rest is padding.
            cross_keys: one [B, H, Sx, D] float32 per layer, L <= Sx.
            cross_values: one [B, H, Sx, D] float32 per layer.
        """
        first = torch.zeros(1, dtype=torch.int64)
        self._encoder.queries = span_positions(first, source, self.max_source - 1)
        self._encoder.keys = key_positions(source[:, None, :, None])
        token = torch.zeros_like(source[:, :1])
        self._gathering.columns = self._decoder.queries = token
        self._decoder.keys = key_positions(token[:, None, :, None])
        caches = ScatterCache(cross_keys, cross_values, torch.zeros_like(source_length))
        self.model(
            input_ids=source,
            attention_mask=source_length[:, None, None, None],
            decoder_input_ids=token,
            decoder_attention_mask=torch.ones_like(source_length)[:, None, None, None],
            past_key_values=_TextAndSource(DynamicCache(), caches, read_layers=0),
            use_cache=True,
        )
        return caches.keys, caches.values
