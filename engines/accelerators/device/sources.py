"""Sources over plans: a plan of ``encode.onnx`` reads them into a cache that the model's other plans attend to.

Says which plan that is, too: its name and shapes.

The cache has room for the longest source in every slot, in the device's memory, and never grows: plans have one
capacity. What a slot's former source left behind a shorter one is cleared (``engines.accelerators.device.kv_cache``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.kv_cache import PlanCache
from outrider.engines.accelerators.device.plan import LoadedPlan
from outrider.engines.accelerators.device.tensors import CACHE_DTYPES
from outrider.engines.accelerators.device.transfers import HostArray, InputPlace, Uploads
from outrider.engines.base import EngineError, EngineLimits, IntArray, Source, Span
from outrider.engines.bundle.encoder_decoder import (
    ENCODE_FILE,
    SOURCE,
    SOURCE_LENGTH,
    SourceEntry,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.plans import (
    DEFAULT_OPT_BATCH,
    Machine,
    PlanEntry,
    Profile,
    Range,
    Shape,
    profile_for,
    source_capacity,
    why_unfit,
)
from outrider.engines.kv_cache import MIN_SPAN
from outrider.engines.spans import check_share, check_sources

READ = "read"
# Where the kernels are tuned: tokens of a source.
DEFAULT_OPT_SOURCE = 64


def read_part(part: str) -> str:
    """Part of the plan that reads sources for a model's part, "target" or "draft"."""
    return f"{part}/{ENCODE_FILE}"


def read_profile(
    source: SourceEntry, *, max_batch: int, opt_batch: int = DEFAULT_OPT_BATCH
) -> Profile:
    """The one profile of a plan that reads sources: its tokens are theirs; no logits are wanted."""
    most = max(MIN_SPAN, source.max_source)
    return Profile(
        name=READ,
        batch=Range(1, min(opt_batch, max_batch), max_batch),
        tokens=Range(MIN_SPAN, min(DEFAULT_OPT_SOURCE, most), most),
        wanted=Range(1, 1, 1),
    )


def choose_read_plan(
    plans: Sequence[PlanEntry], part: str, *, precision: str, machine: Machine
) -> PlanEntry:
    """The plan that reads sources beside a part's plans of one precision.

    Raises:
        EngineError: none fits the machine.
    """
    wanted = read_part(part)
    for plan in plans:
        if plan.part == wanted and plan.precision == precision and not why_unfit(plan, machine):
            return plan
    raise EngineError(f"no TensorRT plan of {wanted} in {precision} fits; run outrider build")


class PlanSources:
    """The plan and memory with which an engine over plans reads sources.

    ``source`` is the encoder of ``model``, ``plan`` is closed with the rest.
    """

    def __init__(
        self,
        plan: LoadedPlan,
        device: PlanDevice,
        model: ModelEntry,
        source: SourceEntry,
        limits: EngineLimits,
    ) -> None:
        self._plan, self._device, self._limits = plan, device, limits
        self._vocab_size = source.vocab_size
        self._cache = PlanCache(
            device,
            cross_past_names(model.num_layers),
            cross_present_names(model.num_layers),
            num_heads=source.num_heads,
            head_size=source.head_size,
            max_batch=limits.max_batch,
            item_bytes=CACHE_DTYPES[plan.entry.precision].itemsize,
            capacity=source_capacity(source.max_source),
        )
        self._uploads = Uploads(device)
        self._inputs = InputPlace(device)

    @property
    def lengths(self) -> list[int]:
        """[max_batch] tokens of each slot's source, 0 where it has none."""
        return self._cache.lengths

    def check(self, sources: Sequence[Source]) -> int:
        """Return the columns of the call that reads these; EngineError for sources that break a limit."""
        return max(MIN_SPAN, check_sources(sources, self._limits, self._vocab_size))

    def read(self, sources: Sequence[Source], num_tokens: int) -> None:
        """Read sources that were checked in a call of ``num_tokens`` columns, and wait for it.

        Waited for, a read has a cost that can be measured, and its failure is its own.

        Raises:
            EngineError: the library failed; the given slots have no source.
        """
        tokens = np.zeros((len(sources), num_tokens), dtype=np.int64)
        for row, source in enumerate(sources):
            tokens[row, : len(source.tokens)] = source.tokens
            self._cache.lengths[source.slot] = 0
        lengths = np.array([len(source.tokens) for source in sources], dtype=np.int64)
        feeds = self._inputs.take(self._uploads.put({SOURCE: tokens, SOURCE_LENGTH: lengths}))
        for source in sources:
            self._cache.begin_write(source.slot, 0, num_tokens)
        addresses = {name: tensor.pointer for name, tensor in feeds.items()}
        addresses |= self._cache.addresses(sources[0].slot)
        shape = Shape(len(sources), num_tokens, 1)
        self._plan.run(profile_for(self._plan.entry.profiles, shape), shape, addresses)
        self._device.wait()
        for source in sources:
            self._cache.lengths[source.slot] = len(source.tokens)

    def feeds(self, spans: Sequence[Span]) -> Mapping[str, HostArray]:
        """Arrays of a call beside those of every graph.

        A row without a source, which has no tokens, attends to a column of zeros: over none, attention may answer NaN.
        """
        lengths: IntArray = np.array([self.lengths[span.slot] for span in spans], dtype=np.int64)
        return {SOURCE_LENGTH: np.maximum(lengths, 1)}

    def addresses(self, slot: int) -> dict[str, int]:
        """Return where each cache of sources begins for rows from a slot on; calls only read them."""
        return self._cache.past_addresses(slot)

    def check_share(self, slot: int, destinations: Sequence[int]) -> None:
        """Refuse to share a source that is not there; see ``engines.spans``."""
        check_share(slot, destinations, self.lengths)

    def move(self, slot: int, destination: int) -> None:
        """Copy a slot's source over another's, or that it has none."""
        self._cache.move(slot, destination, self.lengths[slot])

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget sources of slots without a length, and of slots beyond."""
        held = self.lengths
        self._cache.trim(
            [None if text is None else one for text, one in zip(lengths, held, strict=False)]
        )

    def close(self) -> None:
        """Free plan and memory; nothing may be under way."""
        self._cache.free()
        self._plan.close()
        self._uploads.free()
        self._inputs.free()
