"""First tokens are expected rather too early than too late."""

from __future__ import annotations

import pytest
from outrider.runtime.admission.forecast import ENOUGH, Forecast


def soonest(forecast: Forecast, tokens: int, ahead: float = 0, missing: float = 0) -> float:
    return forecast.first_token_s(num_ahead=ahead, num_tokens=tokens, num_missing=missing)


def test_what_was_never_measured_takes_no_time() -> None:
    forecast = Forecast(chunk=100)
    assert soonest(forecast, 10**6, 10**6, 50) == 0.0
    for _ in range(ENOUGH - 1):
        forecast.fed(100, 1.0)
        forecast.granted(1, 0.0)
    assert soonest(forecast, 10**6, 10**6, 50) == 0.0


def test_steps_are_counted_before_it_is_known_what_whole_chunks_take() -> None:
    forecast = Forecast(chunk=100)
    for took_s in (0.5, 0.2, 0.3, 0.4):
        forecast.fed(10, took_s)
    # A rate of ten tokens in 0.2 s would say 20 s.
    assert soonest(forecast, 1000) == pytest.approx(10 * 0.2)
    assert soonest(forecast, 10, ahead=20) == pytest.approx(0.2), "they may share a step"


def test_the_fastest_chunk_of_late_counts() -> None:
    forecast = Forecast(chunk=100)
    for took_s in (2.0, 1.0, 3.0, 4.0):
        forecast.fed(100, took_s)
    assert soonest(forecast, 250) == pytest.approx(3.0)
    assert soonest(forecast, 100, ahead=400) == pytest.approx(5.0)
    forecast.fed(0, 1.0)
    forecast.fed(100, 0.0)
    assert soonest(forecast, 100) == 1.0, "what fed nothing, or took no time, says nothing"


def test_slots_are_expected_at_the_pace_at_which_waiters_got_theirs() -> None:
    forecast = Forecast(chunk=100)
    for second in range(ENOUGH + 1):
        forecast.granted(1, float(2 * second))
    assert soonest(forecast, 1, missing=1) == pytest.approx(1.0)
    assert soonest(forecast, 1, missing=4) == pytest.approx(7.0)
    assert soonest(forecast, 1, missing=0) == soonest(forecast, 1, missing=-3) == 0.0
    forecast.nobody_waits()
    assert soonest(forecast, 1, missing=4) == 0.0


def test_reading_those_ahead_and_waiting_for_slots_are_the_same_time() -> None:
    forecast = Forecast(chunk=100)
    for second in range(ENOUGH + 1):
        forecast.granted(1, float(second))
        forecast.fed(100, 1.0)
    assert soonest(forecast, 100, ahead=300, missing=2) == pytest.approx(4.0)
    assert soonest(forecast, 100, ahead=300, missing=10) == pytest.approx(10.5)
