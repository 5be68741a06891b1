"""Intervals of paired rounds are Student's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.lab.bench.tools.paired import interval


def test_intervals_hold_the_true_ratio_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        noise = np.exp(rng.normal(scale=0.1, size=(2, 6)))
        found = interval((1.1 * noise[0]).tolist(), noise[1].tolist())
        held += found.low <= 1.1 <= found.high
    # 95 % of 400, within four standard deviations.
    assert abs(held - 380) <= 4 * math.sqrt(400 * 0.05 * 0.95)


def test_one_round_says_nothing() -> None:
    found = interval([2.0], [1.0])
    assert found.ratio == pytest.approx(2.0)
    assert found.low == 0.0
    assert found.high > 1e100
