"""A drafter that keeps failing is left alone for longer and longer, and forgiven at once."""

from __future__ import annotations

import pytest
from outrider.runtime.core.config import BreakerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.loop.drafter_policy import Breaker

CONFIG = BreakerConfig(max_failures=2, first_pause_s=1.0, longest_pause_s=3.0)


def test_failures_below_the_limit_pause_nothing() -> None:
    breaker = Breaker(CONFIG)
    breaker.fail(10.0)
    assert not breaker.is_paused(10.0)


def test_pauses_double_up_to_the_longest() -> None:
    breaker = Breaker(CONFIG)
    breaker.fail(0.0)
    now, lengths = 0.0, []
    for _ in range(4):
        breaker.fail(now)
        length = next(s for s in range(1, 9) if not breaker.is_paused(now + s))
        assert breaker.is_paused(now + length - 0.001)
        lengths.append(length)
        now += length
    assert lengths == [1, 2, 3, 3]


def test_years_of_failures_overflow_nothing() -> None:
    breaker = Breaker(CONFIG)
    for now in range(5000):
        breaker.fail(float(now))
    assert breaker.is_paused(5001.9)
    assert not breaker.is_paused(5002.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_failures", 0), ("first_pause_s", 0.0), ("longest_pause_s", 0.5)],
)
def test_impossible_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        BreakerConfig(**{key: value})
