"""A graph on ONNX Runtime with its caches as arrays: how checks and calibration run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import DEVICE_ENCODE_FILE, ENCODE_FILE, SOURCE_LENGTH
from outrider.engines.onnx.session import WeightOptions, open_session
from outrider.export.certificate.feeds import Feeds, GraphFeeds, Sources
from outrider.export.certificate.half_emulation import HALF_KINDS, twin_of
from outrider.export.model_config import ModelConfig
from outrider.export.weights.block_products import OPERATOR, with_exact_blocks

# Of weights of 16 bits that a session takes twice the memory of, in float32, as serving does. Above, they are widened
# in every call, which is slower and by other kernels: bits differ from those served.
_MOST_WIDENED_BYTES = 256 << 20


class GraphRunner:
    """A graph on ONNX Runtime with caches held as arrays; for checks, not for serving.

    A graph that computes in 16 bits is run by its twin. With ``exact_blocks`` products with blocks of integers are
    float32, else as they are served.

    Of a model with an encoder, a source per row is read before the first extend.

    Attributes:
        caches: [B, H, S, D] float32 by name, and what slots keep of mixers, as after the last run.
        source_caches: [B, H, Sx, D] float32 by name, as after the last read; empty for a decoder-only model.
    """

    def __init__(
        self,
        path: Path,
        model_config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        source_capacity: int = 0,
        maps_weights: bool = True,
        exact_blocks: bool = False,
    ) -> None:
        self._session = open_graph(path, maps_weights=maps_weights, exact_blocks=exact_blocks)
        self._encoder: Any = None
        if model_config.source is not None:
            is_device = path.name in names.DEVICE_FILES
            self._encoder = open_graph(
                path.with_name(DEVICE_ENCODE_FILE if is_device else ENCODE_FILE),
                maps_weights=maps_weights,
                exact_blocks=exact_blocks,
            )
        self._feeds = GraphFeeds(self._session, model_config)
        self._sizes = batch, capacity, source_capacity
        self.forget()

    def forget(self, *, batch: int | None = None, capacity: int | None = None) -> None:
        """Start again with caches as at the beginning, or of another size."""
        most_rows, most_columns, source_capacity = self._sizes
        batch, capacity = batch or most_rows, capacity or most_columns
        self.caches = self._feeds.caches(batch, capacity)
        self._slots = self._feeds.slots(batch)
        self.source_caches = self._feeds.source_caches(batch, source_capacity)
        self._source_lengths: Feeds = {}

    @property
    def attended(self) -> Feeds:
        """Inputs of every extend that say what was read; none for a decoder-only model."""
        return {**self._source_lengths, **self.source_caches}

    def read(self, sources: Sources | None) -> None:
        """Read a source per row; None, of decoder-only models, reads none."""
        if sources is not None:
            written = _run(self._encoder, {**sources.feeds(), **self.source_caches})
            self.source_caches = {name: written[f"new_{name}"] for name in self.source_caches}
            self._source_lengths = {SOURCE_LENGTH: sources.lengths}

    def widen_sources(self, count: int) -> None:
        """Give the caches of sources so many columns more, with garbage in them."""
        batch, _, capacity = self._sizes
        wider = self._feeds.source_caches(batch, capacity + count)
        for name, held in self.source_caches.items():
            wider[name][:, :, : held.shape[2]] = held
        self.source_caches = wider

    def repeat(self, num_columns: int, past: int) -> None:
        """Let the first columns of the caches stand in all of the first ``past``, again and again."""
        for cache in self.caches.values():
            held = cache.shape[-2]
            # Of a ring the last.
            tokens = np.arange(max(0, past - held), past)
            cache[..., tokens % held, :] = cache[..., tokens % num_columns, :]

    @property
    def capacity(self) -> int:
        """S of the caches; of rings fewer."""
        return max(int(cache.shape[-2]) for cache in self.caches.values())

    def extend(
        self, tokens: IntArray, start: IntArray, settled: IntArray | None = None
    ) -> FloatArray:
        """Return logits [B, T, V] of a span [B, T] int64 written from ``start`` [B] int64 on.

        Where there are mixers, the first ``settled`` [B] int64 tokens are not taken back; None for all.
        """
        if self._slots is not None:
            self._slots.restart(start, self.caches)
        feeds = self._feeds.span(
            tokens, start, capacity=self.capacity, slots=self._slots, settled=settled
        )
        return self.run(self._session, feeds).reshape(*tokens.shape, -1)

    def run(self, session: Any, feeds: Feeds) -> FloatArray:
        """Return the logits of a session of ONNX Runtime over the caches, which it replaces."""
        found = _run(session, {**feeds, **self.caches, **self.attended})
        self.caches = {name: found[f"new_{name}"] for name in self.caches}
        return found[names.LOGITS]


def _run(session: Any, feeds: Feeds) -> dict[str, FloatArray]:
    """Return the outputs of a session by name."""
    outputs = [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


def open_graph(path: Path, *, maps_weights: bool = True, exact_blocks: bool = False) -> Any:
    """Return a session over a graph, or over its twin where it computes in 16 bits; caches are float32.

    Weights that are large and of 16 bits may stay in their file.
    """
    data = path.with_name(f"{names.MODEL_FILE}.data")
    is_large = data.exists() and data.stat().st_size > _MOST_WIDENED_BYTES
    if maps_weights:
        graph = ir.load(path).graph
        has_halves = any(value.dtype in HALF_KINDS for value in graph.initializers.values())
        has_blocks = any(node.op_type in ("DequantizeLinear", OPERATOR) for node in graph)
        maps_weights = is_large and has_halves and not has_blocks
    weights = WeightOptions(folder=path.parent, are_mapped=maps_weights, exact_blocks=exact_blocks)
    twin = twin_of(path, float32_caches=True) or path
    if exact_blocks:
        twin = with_exact_blocks(twin)
    return open_session(twin, copies_caches=True, weights=weights)
