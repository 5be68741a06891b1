"""Times of a step's shapes on a device against their floor, and what the runtime adds to them.

The floor of a call is what its machine must spend at least: bytes of weights and cache over the measured
rate of a copy, products over the measured rate of a matrix product, whichever is longer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.tensors import CACHE_DTYPES
from outrider.engines.base import Engine, Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.pair import Pair

from scripts.gpu.machine import Rates, per_call_s
from scripts.gpu.parity import precision_of

ALLOWED_OVER_FLOOR = 1.3
CONTEXT = 200
_ITEM_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0}
_STORED_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "int4": 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One shape of one model.

    Attributes:
        part: which model.
        batch: rows.
        tokens: of a row.
        context: tokens of a row that are cached already.
        call_s: median seconds of a call, host included: inputs up, logits down.
        device_s: seconds of one of many calls enqueued together, where logits stay; ``call_s`` of
            an engine without a device.
        floor_s: least seconds.
    """

    part: str
    batch: int
    tokens: int
    context: int
    call_s: float
    device_s: float
    floor_s: float

    @property
    def over_floor(self) -> float:
        """Times the floor."""
        return self.device_s / self.floor_s

    @property
    def is_fast(self) -> bool | None:
        """True where a target's step of one row is near enough to its floor; None for other shapes."""
        if (self.part, self.batch, self.tokens) != ("target", 1, 1):
            return None
        return self.over_floor <= ALLOWED_OVER_FLOOR


def time_shapes(bundle: Bundle, pair: Pair, rates: Rates, *, repeats: int) -> list[Timing]:
    """Step and verify shapes of both models, at one row and at the most."""
    models = {"target": (pair.target, bundle.manifest.target)}
    if pair.draft is not None:
        assert bundle.manifest.draft is not None
        models["draft"] = (pair.draft, bundle.manifest.draft)
    timings = []
    for part, (engine, entry) in models.items():
        limits = engine.limits
        verify = min(bundle.manifest.max_gamma + 1, limits.max_extend)
        shapes = {(batch, tokens) for batch in (1, limits.max_batch) for tokens in (1, verify)}
        context = min(CONTEXT, limits.max_context - verify)
        fill(engine, limits.max_batch, context)
        for batch, tokens in sorted(shapes):
            call_s, device_s = time_call(engine, batch, tokens, context, repeats)
            floor_s = floor_seconds(
                bundle, entry, batch, tokens, context, precision_of(engine), rates
            )
            timings.append(
                Timing(
                    part=part, batch=batch, tokens=tokens, context=context, call_s=call_s, device_s=device_s,
                    floor_s=floor_s,
                )
            )  # fmt: skip
    return timings


def fill(engine: Engine, num_rows: int, context: int) -> None:
    """Put ``context`` tokens into the slots' caches."""
    chunk = engine.limits.max_extend
    for slot in range(num_rows):
        for start in range(0, context, chunk):
            tokens = (1,) * min(chunk, context - start)
            engine.extend([Span(slot=slot, start=start, tokens=tokens, num_logits=0)])


def time_call(
    engine: Engine, batch: int, tokens: int, context: int, repeats: int
) -> tuple[float, float]:
    """Seconds of a call with the host, and without; see ``Timing``."""
    spans = [
        Span(slot=slot, start=context, tokens=(1,) * tokens, num_logits=tokens)
        for slot in range(batch)
    ]
    engine.extend(spans)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        engine.extend(spans)
        seconds.append(time.perf_counter() - began)
    call_s = statistics.median(seconds)
    if not isinstance(engine, PlanEngine):
        return call_s, call_s
    device_s = per_call_s(lambda: engine.extend_on_device(spans), engine.wait, repeats)
    return call_s, device_s


def floor_seconds(
    bundle: Bundle, entry: ModelEntry, batch: int, tokens: int, context: int, precision: str, rates: Rates
) -> float:  # fmt: skip
    """Least seconds of an extend.

    Every weight is read once and used once per token, and every cached key and value of the rows is
    read once.

    Args:
        bundle: of the model.
        entry: the model.
        batch: rows.
        tokens: of a row.
        context: cached tokens of a row.
        precision: of the device's weights and cache.
        rates: of the machine.
    """
    stored = bundle.manifest.files[f"{entry.path}/model.onnx.data"].size
    num_weights = stored / _STORED_BYTES[entry.weights]
    is_quantised = entry.weights in ("int8", "w8a8", "int4")
    weight_bytes = stored if is_quantised else num_weights * _ITEM_BYTES[precision]
    cached = entry.num_layers * entry.num_kv_heads * entry.head_size * batch * (context + tokens)
    cache_bytes = 2 * cached * CACHE_DTYPES[precision].itemsize
    memory_s = (weight_bytes + cache_bytes) / rates.bytes_per_s
    return max(memory_s, num_weights * batch * tokens / rates.products_per_s)
