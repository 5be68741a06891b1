"""When a request's first token can be expected, from what recent steps and slots took.

No clock: times come in. Every part is rather too early than too late, so that nobody is refused who would have been
answered in time; what was not measured often enough counts nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

NUM_RECENT = 64
"""Measurements that count."""
ENOUGH = 4
"""Measurements without which nothing is expected."""


class Forecast:
    """What feeding prompts and waiting for slots takes.

    Args:
        chunk: prompt tokens that one step feeds at most.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._steps_s: deque[float] = deque(maxlen=NUM_RECENT)
        # Seconds per token, of steps that fed half a chunk and more: in shorter ones other things take the time.
        self._tokens_s: deque[float] = deque(maxlen=NUM_RECENT)
        # When waiters got slots, and how many, while others waited on.
        self._grants: deque[tuple[float, int]] = deque(maxlen=NUM_RECENT)

    def fed(self, num_tokens: int, took_s: float) -> None:
        """Note a step that fed tokens of prompts."""
        if num_tokens > 0 and took_s > 0.0:
            self._steps_s.append(took_s)
            if 2 * num_tokens >= self._chunk:
                self._tokens_s.append(took_s / num_tokens)

    def granted(self, num_slots: int, now: float) -> None:
        """Note that a waiter got slots that others had given back."""
        self._grants.append((now, num_slots))

    def nobody_waits(self) -> None:
        """Note that slots which are given back from now on wait themselves."""
        self._grants.clear()

    def first_token_s(self, *, num_ahead: float, num_tokens: int, num_missing: float) -> float:
        """Return the seconds until the first token of a request, at the soonest.

        Args:
            num_ahead: prompt tokens to be fed before its own.
            num_tokens: of its own prompt.
            num_missing: slots that must be given back before it has its own.
        """
        # Who gets a slot before has its prompt fed before, in the time that the slots take.
        return max(
            self._release_s(num_missing) + self._feed_s(num_tokens),
            self._feed_s(num_ahead + num_tokens),
        )

    def _feed_s(self, num_tokens: float) -> float:
        num_steps = math.ceil(num_tokens / self._chunk)
        return max(num_steps * _least(self._steps_s), num_tokens * _least(self._tokens_s))

    def _release_s(self, num_slots: float) -> float:
        """Seconds until slots are given back at the recent pace, half of one's time having passed already."""
        if len(self._grants) < ENOUGH:
            return 0.0
        num_given = sum(number for _, number in self._grants) - self._grants[0][1]
        slot_s = (self._grants[-1][0] - self._grants[0][0]) / num_given
        return max(0.0, num_slots - 0.5) * slot_s


def _least(times_s: Sequence[float]) -> float:
    return min(times_s) if len(times_s) >= ENOUGH else 0.0
