"""Measured times become tables that no noise makes fall, and host costs come back from what they made."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.calibration.fitting import fit_host, monotone, proportional
from outrider.runtime.gamma.costs import RowCosts, RowKind

ROWS = {kind: RowCosts(row_s=0.1 + i, token_s=0.2 * i) for i, kind in enumerate(RowKind)}


def test_more_never_costs_less() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        fitted = monotone(rng.uniform(0.5, 2.0, size=(4, 3)))
        assert (np.diff(fitted, axis=0) >= 0).all()
        assert (np.diff(fitted, axis=1) >= 0).all()


def test_a_monotone_grid_is_left_alone_and_noise_is_averaged() -> None:
    rising = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert (monotone(rising) == rising).all()
    assert monotone(np.array([[1.0, 3.0, 2.0]])).tolist() == [[1.0, 2.5, 2.5]]


def test_what_is_dearer_per_token_than_something_smaller_was_disturbed() -> None:
    measured = np.array([[1.0, 1.2, 9.0], [1.4, 30.0, 4.0]])
    fitted = proportional(measured, (1, 2), (2, 4, 8))
    assert fitted.tolist() == [[1.0, 1.2, 2.4], [1.4, 2.4, 4.0]]
    assert proportional(fitted, (1, 2), (2, 4, 8)).tolist() == fitted.tolist()


def test_host_costs_come_back_from_what_they_made() -> None:
    samples = [
        (kind, rows, gamma, 0.5 + 0.25 * gamma + rows * (ROWS[kind].row_s + gamma * ROWS[kind].token_s))
        for kind in RowKind for rows in (1, 8) for gamma in (0, 4)
    ]  # fmt: skip
    fitted = fit_host(samples)
    assert fitted.step_s == pytest.approx(0.5)
    assert fitted.call_s == pytest.approx(0.25)
    for kind in RowKind:
        assert fitted.rows[kind].row_s == pytest.approx(ROWS[kind].row_s)
        assert fitted.rows[kind].token_s == pytest.approx(ROWS[kind].token_s, abs=1e-9)


def test_noise_never_makes_a_cost_negative() -> None:
    samples = [
        (kind, rows, gamma, 1.0 - 0.01 * rows - 0.02 * gamma)
        for kind in RowKind
        for rows in (1, 8)
        for gamma in (0, 4)
    ]
    fitted = fit_host(samples)
    assert fitted.step_s > 0.8
    assert min(fitted.call_s, *(row.row_s for row in fitted.rows.values())) >= 0.0
