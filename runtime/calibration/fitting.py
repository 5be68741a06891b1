"""Turns measured times into tables that choices can trust: monotone grids, and a linear model of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma.costs import HostCosts, RowCosts, RowKind

Seconds = npt.NDArray[np.float64]


def monotone(measured: Seconds) -> Seconds:
    """A grid near the measured one that falls along neither axis.

    The middle between the least monotone grid above and the greatest one below; a grid that is
    monotone already is left as it is.

    Args:
        measured: [B, T] or [T] float64 seconds.
    """
    above, below = measured, measured
    for axis in range(measured.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return (above + below) / 2.0


def proportional(measured: Seconds, batches: Sequence[int], tokens: Sequence[int]) -> Seconds:
    """A grid in which nothing costs more per row and token than something smaller does.

    Larger calls only ever share what calls cost anyway, and whatever disturbs a measurement adds to
    it, so that a time above that was disturbed.

    Args:
        measured: [B, T] float64 seconds.
        batches: ascending rows.
        tokens: ascending tokens per row.
    """
    sizes = np.outer(np.asarray(batches, dtype=np.float64), np.asarray(tokens, dtype=np.float64))
    per_token = measured / sizes
    for axis in range(2):
        per_token = np.minimum.accumulate(per_token, axis=axis)
    fitted: Seconds = per_token * sizes
    return fitted


def fit_host(samples: Sequence[tuple[RowKind, int, int, float]]) -> HostCosts:
    """Least squares with coefficients that are not negative, relative to what was measured.

    Args:
        samples: kind, rows, draft tokens per row and seconds of a step outside the engines; every
            kind with at least two numbers of rows and two of draft tokens.
    """
    kinds = list(RowKind)
    design = np.zeros((len(samples), 2 + 2 * len(kinds)))
    measured = np.array([seconds for *_, seconds in samples])
    for index, (kind, rows, gamma, _) in enumerate(samples):
        place = 2 + 2 * kinds.index(kind)
        design[index, [0, 1, place, place + 1]] = 1.0, gamma, rows, rows * gamma
    # A percent of a short step counts as much as a percent of a long one.
    scaled = design / measured[:, None]
    fitted = np.zeros(design.shape[1])
    kept = np.arange(design.shape[1])
    while len(kept):
        solution = np.linalg.lstsq(scaled[:, kept], np.ones(len(samples)), rcond=None)[0]
        if (solution >= 0.0).all():
            fitted[kept] = solution
            break
        kept = kept[solution >= 0.0]
    rows_of = {
        kind: RowCosts(row_s=float(fitted[2 + 2 * i]), token_s=float(fitted[3 + 2 * i]))
        for i, kind in enumerate(kinds)
    }
    return HostCosts(step_s=float(fitted[0]), call_s=float(fitted[1]), rows=rows_of)
