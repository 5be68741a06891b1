"""Turns measured times into tables that choices can trust: monotone grids, and a linear model of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma.costs import HostCosts, ModelCosts, RowCosts, RowKind

Seconds = npt.NDArray[np.float64]


def fit_model(
    measured: Seconds, batches: Sequence[int], tokens: Sequence[int], capacity: int
) -> ModelCosts:
    """Return a model's costs, monotone, from [B, T] float64 seconds at one capacity."""
    grid = monotone(proportional(measured, batches, tokens))
    return ModelCosts(
        batches=tuple(batches),
        tokens=tuple(tokens),
        seconds=tuple(tuple(row) for row in grid.tolist()),
        capacity=capacity,
        position_s=0.0,
    )


def monotone(measured: Seconds) -> Seconds:
    """Return a grid near the measured one, [B, T] float64 seconds, that falls along neither axis.

    It is the middle between the least monotone grid above and the greatest one below; a monotone grid stays as it is.
    """
    above, below = measured, measured
    for axis in range(measured.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return (above + below) / 2.0


def proportional(measured: Seconds, batches: Sequence[int], tokens: Sequence[int]) -> Seconds:
    """Return a grid in which nothing costs more per row and token than something smaller does.

    A larger call shares the fixed cost among more tokens, and other work only adds time: any longer time was disturbed.

    Args:
        measured: [B, T] float64 seconds.
        batches: [B] ascending rows.
        tokens: [T] ascending tokens per row.
    """
    sizes = np.outer(batches, tokens).astype(np.float64)
    per_token = np.minimum.accumulate(np.minimum.accumulate(measured / sizes, axis=0), axis=1)
    fitted: Seconds = per_token * sizes
    return fitted


def fit_host(samples: Sequence[tuple[RowKind, int, int, float]]) -> HostCosts:
    """Return the host's costs by least squares of relative errors; a cost that noise made negative is 0.

    Args:
        samples: kind, rows, draft tokens per row and seconds of a step outside the engines.
    """
    kinds = list(RowKind)
    design = np.zeros((len(samples), 2 + 2 * len(kinds)))
    for line, (kind, rows, gamma, seconds) in zip(design, samples, strict=True):
        of_kind = 2 + 2 * kinds.index(kind)
        # A percent of a short step counts as much as a percent of a long one.
        line[[0, 1, of_kind, of_kind + 1]] = np.array([1.0, gamma, rows, rows * gamma]) / seconds
    fitted = np.linalg.lstsq(design, np.ones(len(samples)), rcond=None)[0]
    (step_s, call_s), *of_kinds = np.maximum(fitted, 0.0).reshape(-1, 2).tolist()
    costs = [RowCosts(row_s=row_s, token_s=token_s) for row_s, token_s in of_kinds]
    return HostCosts(step_s=step_s, call_s=call_s, rows=dict(zip(kinds, costs, strict=True)))
