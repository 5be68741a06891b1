"""Measures what the host does of a step beside the engines, sampling included.

The time is that of real steps of a worker whose engines answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.kv_cache import MIN_SPAN
from outrider.engines.sampling.base import ExactnessMode, Sampler, SamplingParams
from outrider.runtime.calibration.fitting import fit_host
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import Event, RequestSpec, SpeculationParams
from outrider.runtime.core.text import Decoder
from outrider.runtime.gamma.costs import HostCosts, RowKind
from outrider.runtime.loop.worker import Worker

HOST_ROWS = (1, 16)
HOST_GAMMA = 4
HOST_STEPS = 5
KINDS = {
    RowKind.GREEDY: (0.0, ExactnessMode.MAX_ACCEPT),
    RowKind.SAMPLED: (1.0, ExactnessMode.MAX_ACCEPT),
    RowKind.STABLE: (1.0, ExactnessMode.SEED_STABLE),
}


class NullEngine:
    """An engine that computes nothing: every wanted row of logits is the same.

    Args:
        limits: capacities.
        row: [V] float32.
    """

    def __init__(self, limits: EngineLimits, row: FloatArray, *, max_wanted: int) -> None:
        self._limits = limits
        self._logits = np.tile(row, (limits.max_batch, max_wanted, 1))

    @property
    def limits(self) -> EngineLimits:
        """Capacities."""
        return self._limits

    @property
    def is_row_invariant(self) -> bool:
        """Trivially."""
        return True

    @property
    def packs_rows(self) -> bool:
        """False: it multiplies nothing."""
        return False

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32, the same row everywhere."""
        wanted = max(span.num_logits for span in spans)
        return self._logits[: len(spans), :wanted]

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Nothing lies anywhere."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Nothing lies anywhere."""

    def trim(self, lengths: Sequence[int]) -> None:
        """Holds nothing."""

    def close(self) -> None:
        """Nothing to free."""


def measure_host(
    limits: EngineLimits,
    sampler: Sampler,
    decoder: Decoder,
    max_gamma: int,
    clock: Callable[[], float],
) -> HostCosts:
    """Seconds of steps whose engines take none; the draft is always right, so all is judged.

    Args:
        limits: of the target.
        sampler: the one that will serve.
        decoder: the one that will serve.
        max_gamma: draft tokens of one row at most.
        clock: seconds.
    """
    row = np.random.default_rng(0).normal(scale=3.0, size=limits.vocab_size).astype(np.float32)
    gammas = (0, min(HOST_GAMMA, max_gamma))
    still = NullEngine(limits, row, max_wanted=max(MIN_SPAN, gammas[-1] + 1))
    samples = []
    for rows in sorted({min(one, limits.max_batch) for one in HOST_ROWS}):
        for kind in RowKind:
            for gamma in dict.fromkeys(gammas):
                seconds = _host_step_s(still, sampler, decoder, kind, rows, gamma, clock)
                samples.append((kind, rows, gamma, max(seconds, 1e-9)))
    return fit_host(samples)


def _host_step_s(
    still: NullEngine,
    sampler: Sampler,
    decoder: Decoder,
    kind: RowKind,
    rows: int,
    gamma: int,
    clock: Callable[[], float],
) -> float:
    temperature, mode = KINDS[kind]
    worker = Worker(
        target=still,
        draft=still,
        sampler=sampler,
        config=ServerConfig(max_running=rows),
        max_gamma=max(gamma, 1),
        decoder=decoder,
    )
    for index in range(rows):
        spec = RequestSpec(
            internal_id=str(index),
            request_id=str(index),
            prompt_tokens=(0,),
            params=SamplingParams(temperature=temperature),
            seed=index,
            max_tokens=(HOST_STEPS + 2) * (gamma + 1),
            speculation=SpeculationParams(drafter="model", gamma=gamma, mode=mode),
        )
        worker.submit(spec, _ignore)
    worker.run_step()
    times = []
    for _ in range(HOST_STEPS):
        began = clock()
        worker.run_step()
        times.append(clock() - began)
    return float(np.quantile(times, 0.25))


def _ignore(event: Event) -> None:
    """Nobody reads what a calibration says."""
