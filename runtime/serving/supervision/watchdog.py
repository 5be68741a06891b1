"""Notices a worker whose thread hangs or has ended. Knows neither gRPC nor the event loop: its owner asks now and then.

A step's time is bounded: it has one chunk of prompt at most. So one that takes far longer than its like hangs. Time in
which nobody asked does not count: then the whole process was stopped, or the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from outrider.runtime.loop.totals import Heartbeat

MANY_USUAL = 20.0
"""A step of this many times its usual time is late."""
FIRST_STEP_S = 300.0
"""Allowance for a step while none of its kind has ended: libraries load and compile kernels when they are first used,
and nobody knows yet how long this machine takes for a chunk of prompt."""
LONGEST_TICK_S = 2.0
"""Of a longer pause between two questions no more than this counts."""


class Watchdog:
    """Says when a step is late.

    Args:
        heartbeat: of the watched worker.
        least_s: seconds that every step may take.
        clock: monotonic seconds.
    """

    def __init__(self, heartbeat: Heartbeat, least_s: float, clock: Callable[[], float]) -> None:
        self._pulse = heartbeat
        self._least_s = least_s
        self._clock = clock
        self._asked_s = clock()
        self._step = 0
        self._age_s = 0.0

    def complaint(self) -> str | None:
        """Return what is wrong with the worker, in words; None where nothing is."""
        heartbeat, now_s = self._pulse, self._clock()
        passed_s, self._asked_s = now_s - self._asked_s, now_s
        if heartbeat.has_died:
            return "the worker's thread has ended"
        step = heartbeat.num_steps if heartbeat.is_stepping else 0
        if step != self._step or not step:
            self._step, self._age_s = step, 0.0
            return None
        self._age_s += min(passed_s, LONGEST_TICK_S)
        limit_s = self._limit_s(heartbeat.reads_prompt)
        if self._age_s <= limit_s:
            return None
        return f"step {step} has not ended in {self._age_s:.1f} s, {limit_s:.1f} s are allowed"

    def _limit_s(self, reads_prompt: bool) -> float:
        # A copy, since the worker's thread may append meanwhile. A chunk of prompt may be the only long one; of other
        # steps the slowest may have compiled something.
        took_s = self._pulse.took_s[reads_prompt].copy()
        slowest_s = heapq.nlargest(1 if reads_prompt else 2, took_s)
        allowed_s = MANY_USUAL * slowest_s[-1] if slowest_s else FIRST_STEP_S
        return max(self._least_s, allowed_s)
