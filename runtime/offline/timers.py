"""Engine and sampler with timers; the rest of a run's time is the runtime's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.base import FloatArray, Source, Span
from outrider.engines.sampling.base import CandidateNode, CandidateSampler, SamplingRow, Verdict
from outrider.engines.spans import WrappedEngine


@dataclass(slots=True)
class TimedEngine(WrappedEngine):
    """An engine that counts the seconds spent in its extends and in moving cache rows.

    Attributes:
        num_calls: extends.
        calls: begin and end of each extend, seconds of ``time.perf_counter``; None keeps none.
    """

    total_s: float = 0.0
    num_calls: int = 0
    calls: list[tuple[float, float]] | None = None

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources with the timed engine, and take the time."""
        began = time.perf_counter()
        self.engine.read(sources)
        self.total_s += time.perf_counter() - began

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Share a source of the timed engine, and take the time."""
        began = time.perf_counter()
        self.engine.share_source(slot, destinations)
        self.total_s += time.perf_counter() - began

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Extend and take the time."""
        began = time.perf_counter()
        logits = self.engine.extend(spans)
        ended = time.perf_counter()
        self.total_s += ended - began
        self.num_calls += 1
        if self.calls is not None:
            self.calls.append((began, ended))
        return logits

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the timed engine's tree, and take the time."""
        began = time.perf_counter()
        self.engine.keep_path(slot, path)
        self.total_s += time.perf_counter() - began

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Move a slot of the timed engine, and take the time."""
        began = time.perf_counter()
        self.engine.move_slot(source, destination, length)
        self.total_s += time.perf_counter() - began

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Read a slot of the timed engine, and take the time."""
        began = time.perf_counter()
        values = self.engine.read_slot(slot, start, end)
        self.total_s += time.perf_counter() - began
        return values

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Write a slot of the timed engine, and take the time."""
        began = time.perf_counter()
        self.engine.write_slot(slot, start, values)
        self.total_s += time.perf_counter() - began


@dataclass(slots=True)
class TimedSampler:
    """A sampler that counts the seconds spent in it."""

    sampler: CandidateSampler
    total_s: float = 0.0

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Propose and take the time."""
        began = time.perf_counter()
        tokens = self.sampler.propose(logits, rows, vocab_size=vocab_size)
        self.total_s += time.perf_counter() - began
        return tokens

    def propose_children(
        self, logits: FloatArray, points: Sequence[CandidateNode], *, vocab_size: int
    ) -> list[tuple[int, ...]]:
        """Propose children and take the time."""
        began = time.perf_counter()
        offered = self.sampler.propose_children(logits, points, vocab_size=vocab_size)
        self.total_s += time.perf_counter() - began
        return offered

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge and take the time."""
        began = time.perf_counter()
        verdicts = self.sampler.judge(logits, rows)
        self.total_s += time.perf_counter() - began
        return verdicts
