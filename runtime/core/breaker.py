"""Leaves alone for a while what keeps failing. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.runtime.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """How patient to be with drafters that fail.

    Attributes:
        max_failures: failures in a row after which a drafter is paused.
        first_pause_s: length of the first pause; each further failure doubles it.
        longest_pause_s: length of a pause at most.
    """

    max_failures: int = 3
    first_pause_s: float = 1.0
    longest_pause_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting out of range, with its key and its rule."""
        if self.max_failures < 1:
            raise ConfigError("max_failures", "must be at least 1")
        if not self.first_pause_s > 0.0:
            raise ConfigError("first_pause_s", "must be more than 0 seconds")
        if not self.longest_pause_s >= self.first_pause_s:
            raise ConfigError("longest_pause_s", "must be at least first_pause_s")


class Breaker:
    """Counts failures in a row of one drafter; a success is the end of it.

    After a pause the next attempt is a trial: should it fail, a pause twice as long begins.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._num_failures = 0
        self._paused_until: float | None = None

    def is_paused(self, now: float) -> bool:
        """Whether the drafter is to be left alone now, ``now`` in seconds."""
        return self._paused_until is not None and now < self._paused_until

    def fail(self, now: float) -> None:
        """Count a failure at ``now``, and begin a pause where it is one too many."""
        self._num_failures += 1
        num_doublings = self._num_failures - self._config.max_failures
        if num_doublings < 0:
            return
        # The exponent is bounded so that years of failures overflow nothing.
        pause_s = self._config.first_pause_s * 2.0 ** min(num_doublings, 64)
        self._paused_until = now + min(pause_s, self._config.longest_pause_s)
