"""Running totals of a worker, and a picture of it at one moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.runtime.core.stats import ControlReport
from outrider.runtime.prefix_cache.reuse import PrefixCounts

NUM_USUAL = 64
"""Steps of a kind that say how long such a step usually takes."""

READ_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds in seconds that the target's reads of sources are counted by."""

STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds in seconds that steps are counted by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """Where a worker stands.

    Attributes:
        num_running: requests holding slots.
        num_queued: requests waiting for one.
        num_queued_tokens: prompt tokens of those waiting.
        step_count: steps run.
        last_step_at: end of the last step on the worker's clock, seconds; None before the first.
        num_finished: requests that ended well.
        num_failed: requests that ended with an error, cancellation included.
        num_emitted: output tokens.
        num_target_passes: verifications of one row.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens accepted and emitted.
        accepted_by_position: entry i counts accepted draft tokens i.
        control: what choosing gamma brought; None where every gamma is fixed.
        host_fallback_reasons: steps that decoded, by why the host took part between draft and judgement; ""
            counts those of which nothing but the answer reached it.
        num_reading: of the requests that hold slots, those whose source the target has yet to read.
        num_source_tokens: tokens of sources that the target has read.
        read_s: seconds of its reads together.
        reads_by_s: its reads by duration: entry i counts those of at most ``READ_BUCKETS_S[i]`` seconds that entry
            i - 1 does not; one more entry counts longer ones.
        prefixes: of the cache of prefixes; zeros where there is none.
        num_kv_tokens: tokens whose keys and values the target's slots hold for live requests.
        step_s: seconds of all steps together.
        steps_by_s: steps by duration, as ``reads_by_s``, within ``STEP_BUCKETS_S``.
    """

    num_running: int
    num_queued: int
    num_queued_tokens: int
    num_free_slots: int
    num_slots: int
    is_draining: bool
    step_count: int
    last_step_at: float | None
    num_finished: int
    num_failed: int
    num_emitted: int
    num_target_passes: int
    num_drafted: int
    num_accepted: int
    accepted_by_position: tuple[int, ...]
    control: ControlReport | None = None
    host_fallback_reasons: Mapping[str, int] = field(default_factory=dict)
    num_reading: int = 0
    num_source_tokens: int = 0
    read_s: float = 0.0
    reads_by_s: tuple[int, ...] = ()
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)
    num_kv_tokens: int = 0
    step_s: float = 0.0
    steps_by_s: tuple[int, ...] = ()


@dataclass(slots=True)
class Heartbeat:
    """Signs of life of a worker's thread, which alone writes them; whoever watches it reads them without a lock.

    Attributes:
        num_steps: steps begun.
        is_stepping: whether one is under way.
        reads_prompt: whether it feeds a prompt or reads a source.
        took_s: seconds that recent steps took: of those that fed a prompt, and of the others. Recoveries are left out.
        is_recovering: whether the step under way feeds texts again.
        has_died: whether the thread ended though nobody asked for it.
    """

    num_steps: int = 0
    is_stepping: bool = False
    reads_prompt: bool = False
    is_recovering: bool = False
    took_s: dict[bool, deque[float]] = field(
        default_factory=lambda: {one: deque(maxlen=NUM_USUAL) for one in (False, True)}
    )
    has_died: bool = False

    def begin(self) -> None:
        """Note that a step begins. Called again within a step: that it feeds a text again, as it would a prompt."""
        if self.is_stepping:
            self.is_recovering = self.reads_prompt = True
        self.num_steps += 1
        self.is_stepping = True

    def end(self, took_s: float | None) -> None:
        """Note that a step ended after so many seconds; None where there was nothing to do in it."""
        if took_s is not None and not self.is_recovering:
            self.took_s[self.reads_prompt].append(took_s)
        self.is_stepping = self.is_recovering = False


@dataclass(slots=True)
class Totals:
    """Counts since the start; ``runtime.loop.finish`` writes them, and the worker what steps took."""

    step_count: int = 0
    last_step_at: float | None = None
    num_finished: int = 0
    num_failed: int = 0
    num_emitted: int = 0
    num_target_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    host_fallback_reasons: Counter[str] = field(default_factory=Counter)
    num_source_tokens: int = 0
    read_s: float = 0.0
    reads_by_s: list[int] = field(default_factory=lambda: [0] * (len(READ_BUCKETS_S) + 1))
    step_s: float = 0.0
    steps_by_s: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))

    def count_read(self, num_tokens: int, took_s: float) -> None:
        """Count a read of sources by the target."""
        self.num_source_tokens += num_tokens
        self.read_s += took_s
        self.reads_by_s[bisect_left(READ_BUCKETS_S, took_s)] += 1

    def count_step(self, took_s: float) -> None:
        """Count what a step took."""
        self.step_s += took_s
        self.steps_by_s[bisect_left(STEP_BUCKETS_S, took_s)] += 1

    def snapshot(self, **state: Any) -> WorkerSnapshot:
        """Return the totals together with the state of slots and queue, by names of ``WorkerSnapshot``."""
        copied = ("accepted_by_position", "host_fallback_reasons", "reads_by_s", "steps_by_s")
        counts = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in copied
        }
        return WorkerSnapshot(
            **counts,
            accepted_by_position=tuple(self.accepted_by_position),
            host_fallback_reasons=dict(self.host_fallback_reasons),
            reads_by_s=tuple(self.reads_by_s),
            steps_by_s=tuple(self.steps_by_s),
            **state,
        )
