"""Inputs of a graph's calls, for whatever runs a graph outside of an engine: checks and calibration.

A graph's inputs are those that its session names, so one maker serves the canonical graph, ``encode.onnx``,
``grouped.onnx``, those of trees and those of accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import SOURCE, SOURCE_LENGTH, is_source_cache
from outrider.engines.onnx.packed_inputs import PackedGraph, packed_feeds
from outrider.export.certificate.slot_places import SlotPlaces, has_mixers, is_kept, is_state
from outrider.export.graph.rings import RING_AXIS
from outrider.export.model_config import ModelConfig

# Of caches beyond what was written.
_UNREAD = 7.0
Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What an encoder reads, a row per row of a call.

    Attributes:
        tokens: [B, L] int64; what lies beyond a row's length is padding.
        lengths: [B] int64, at least 1.
    """

    tokens: IntArray
    lengths: IntArray

    def feeds(self) -> Feeds:
        """Return the inputs of ``encode.onnx`` but its caches."""
        return {SOURCE: self.tokens, SOURCE_LENGTH: self.lengths}


class GraphFeeds:
    """Makes inputs by name for a session of ONNX Runtime over one graph of a model.

    Args:
        session: over the graph.
        model_config: of its model.
    """

    def __init__(self, session: Any, model_config: ModelConfig) -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
        self._ring_columns = model_config.ring_columns or model_config.max_position
        self._packed = PackedGraph.of(
            self._shapes, num_kv_heads=model_config.num_kv_heads, last=model_config.max_position - 1
        )

    def caches(self, batch: int, capacity: int) -> dict[str, FloatArray]:
        """Return caches [B, H, S, D] or [B, S, H * D] float32 by name, in the order of the graph's inputs and outputs.

        They hold no zeros: a graph must not see what lies beyond a row's length. What slots keep of mixers is among
        them; states are zeros.
        """
        caches = self._unread(names.is_cache, batch, capacity)
        for name, shape in self._shapes.items():
            if is_kept(name):
                number = 0.0 if is_state(name) else _UNREAD
                caches[name] = np.full((batch, *shape[1:]), number, np.float32)
        return caches

    def slots(self, batch: int) -> SlotPlaces | None:
        """Return the slots of so many rows; None of a graph without mixers."""
        return SlotPlaces(self._shapes, batch) if has_mixers(self._shapes) else None

    def source_caches(self, batch: int, capacity: int) -> dict[str, FloatArray]:
        """Return caches of sources [B, H, Sx, D] float32 likewise; none for a decoder-only model."""
        return self._unread(is_source_cache, batch, capacity)

    def span(
        self,
        tokens: IntArray,
        start: IntArray,
        *,
        capacity: int,
        slots: SlotPlaces | None = None,
        settled: IntArray | None = None,
    ) -> Feeds:
        """Return all inputs for a span whose logits are all wanted, but caches and what belongs to sources.

        Args:
            tokens: [B, T] int64; a graph of packed rows gets them as [1, B * T].
            start: [B] int64, tokens of each row that are cached.
            capacity: S of the caches.
            slots: of the rows, where the graph has mixers; None for empty ones.
            settled: [B] int64, tokens of each span that are not taken back, where it has; None for all.
        """
        if self._packed is not None:
            return packed_feeds(self._packed, tokens, start, capacity=capacity)
        columns = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.int64)
        feeds = {names.TOKENS: tokens, names.START: start, names.LOGIT_POSITIONS: columns}
        if names.LENGTHS in self._shapes:
            feeds[names.LENGTHS] = start + tokens.shape[1]
        if slots is None:
            slots = self.slots(len(tokens))
        if slots is not None:
            most = np.full(len(tokens), tokens.shape[1], np.int64)
            feeds |= slots.feeds(start, tokens.shape[1], most if settled is None else settled)
        return feeds

    def _unread(
        self, is_wanted: Callable[[str], bool], batch: int, capacity: int
    ) -> dict[str, FloatArray]:
        # The axis before the last is that of tokens.
        columns = {RING_AXIS: min(capacity, self._ring_columns)}
        return {
            name: np.full(
                (batch, *shape[1:-2], columns.get(shape[-2], capacity), shape[-1]),
                _UNREAD,
                np.float32,
            )
            for name, shape in self._shapes.items()
            if is_wanted(name)
        }
