"""Draws figures 2 to 5 of Leviathan et al. 2023: curves of its formulas, and the points of one analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from outrider.runtime.offline.results import Analysis, SpeedRow, TraceRow
from outrider.runtime.oracle.analysis import (
    expected_tokens,
    operations_factor,
    optimal_gamma,
    walltime_factor,
)

ALPHAS = np.linspace(0.01, 0.99, 99)
CURVE_COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MAX_CURVE_GAMMA = 40
DPI = 110
SIZE_INCHES = (6.4, 4.2)
WIDE_INCHES = (11.0, 4.2)
TARGET_COLOUR, DRAFT_COLOUR = "#7b4fa3", "#3f7fc4"
MARKERS = "osD^vP*Xh<>"

Draw = Callable[[Analysis, Any], None]


def draw_figures(analysis: Analysis, folder: Path) -> dict[str, Path]:
    """Write the PNGs into a folder and return the file of each figure by name."""
    files = {}
    for name, (draw, size) in FIGURES.items():
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        draw(analysis, figure)
        files[name] = save(figure, folder / f"{name}.png")
    return files


def save(figure: Any, path: Path) -> Path:
    """Write a figure without the date, so that equal figures are equal files."""
    figure.savefig(path, metadata={"Software": None})
    return path


def _draw_tokens(analysis: Analysis, figure: Any) -> None:
    """Figure 2: expected tokens per target pass over alpha."""
    axes = figure.subplots()
    for gamma in _gammas(analysis):
        curve = [expected_tokens(alpha, gamma) for alpha in ALPHAS]
        axes.plot(ALPHAS, curve, label=f"gamma = {gamma}")
    _points(axes, analysis, lambda row: row.tokens_per_step, with_gamma=True)
    _label(axes, "alpha", "tokens per target pass", "Expected tokens (curves) and measured")
    axes.set_ylim(0.9, max(_gammas(analysis)) + 1.5)


def _draw_gamma(analysis: Analysis, figure: Any) -> None:
    """Figure 3: optimal gamma over alpha; points are the best gamma measured."""
    axes = figure.subplots()
    for c in CURVE_COSTS:
        curve = [optimal_gamma(alpha, c, max_gamma=MAX_CURVE_GAMMA)[0] for alpha in ALPHAS]
        axes.plot(ALPHAS, curve, label=f"c = {c:g}")
    _points(axes, analysis, lambda row: row.gamma, rows=best_rows(analysis))
    _label(axes, "alpha", "gamma", "Optimal gamma (curves) and best gamma measured")
    axes.set_ylim(-0.5, 20.0)


def _draw_speedup(analysis: Analysis, figure: Any) -> None:
    """Figure 4: speed-up at c = 0 and operations at c_hat = 0, over alpha."""
    left, right = figure.subplots(1, 2)
    for gamma in _gammas(analysis):
        speeds = [walltime_factor(alpha, gamma, 0.0) for alpha in ALPHAS]
        left.plot(ALPHAS, speeds, label=f"gamma = {gamma}")
        operations = [operations_factor(alpha, gamma, 0.0) for alpha in ALPHAS]
        right.plot(ALPHAS, operations, label=f"gamma = {gamma}")
    _points(left, analysis, lambda row: row.speedup, with_gamma=True)
    _points(right, analysis, lambda row: row.operations, with_gamma=True)
    _label(left, "alpha", "speed-up", "Speed-up: bound at c = 0 (curves) and measured")
    _label(right, "alpha", "operations", "Target operations: formula (curves) and measured")
    left.set_ylim(0.0, max(_gammas(analysis)) + 1.5)
    right.set_ylim(0.9, max([6.0, *(row.operations * 1.1 for row in analysis.speeds)]))


def _draw_trace(analysis: Analysis, figure: Any) -> None:
    """Figure 5: when the target (upper bars) and the draft model (lower bars) ran."""
    axes = figure.subplots()
    for line, trace in enumerate(analysis.traces):
        height = len(analysis.traces) - line
        _bars(axes, trace.target_ms, height, TARGET_COLOUR)
        _bars(axes, trace.draft_ms, height - 0.4, DRAFT_COLOUR)
    labels = [_trace_label(trace) for trace in analysis.traces]
    axes.set_yticks([len(labels) - line for line in range(len(labels))], labels)
    axes.set_ylim(0.3, len(labels) + 0.7)
    axes.set_xlabel("milliseconds; purple: target passes, blue: calls of the draft model")
    axes.set_title("One request, as it ran")


def _trace_label(trace: TraceRow) -> str:
    return f"{trace.label}\n{len(trace.target_ms)} target passes"


def _bars(axes: Any, spans: Sequence[tuple[float, float]], height: float, colour: str) -> None:
    bars = [(began, ended - began) for began, ended in spans]
    axes.broken_barh(bars, (height - 0.15, 0.3), color=colour, edgecolor="white", linewidth=0.3)


def _draw_costs(analysis: Analysis, figure: Any) -> None:
    """Measured cost of verifying k tokens, which the paper takes as 1."""
    axes = figure.subplots()
    for row in analysis.costs:
        tokens = sorted(row.verify_cost)
        values = [row.verify_cost[k] for k in tokens]
        axes.plot(tokens, values, marker="o", label=f"v(k), temperature {row.temperature:g}")
    axes.axhline(1.0, color="grey", linestyle=":", label="the paper's assumption")
    _label(axes, "k, tokens per row", "plain steps", "Cost of a step that verifies k tokens")
    axes.set_ylim(bottom=0.0)


def _draw_predicted(analysis: Analysis, figure: Any) -> None:
    """Predicted against measured speed-up."""
    axes = figure.subplots()
    rows = [row for row in analysis.speeds if row.predicted is not None]
    top = max([1.5, *(max(row.predicted or 0.0, row.speedup) for row in rows)]) * 1.1
    axes.plot([0.0, top], [0.0, top], color="grey", linestyle=":")
    for marker, name in zip(MARKERS * len(rows), _drafters(rows), strict=False):
        mine = [row for row in rows if row.drafter == name]
        predicted = [row.predicted for row in mine]
        axes.scatter(predicted, [row.speedup for row in mine], marker=marker, label=name)
    _label(axes, "predicted speed-up", "measured speed-up", "Formula and measurement")


def best_rows(analysis: Analysis) -> list[SpeedRow]:
    """Return the fastest gamma of every drafter and temperature."""
    best: dict[tuple[str, float], SpeedRow] = {}
    for row in analysis.speeds:
        known = best.setdefault((row.drafter, row.temperature), row)
        if row.tokens_per_s > known.tokens_per_s:
            best[row.drafter, row.temperature] = row
    return list(best.values())


def _points(
    axes: Any,
    analysis: Analysis,
    value: Callable[[SpeedRow], float],
    *,
    rows: Sequence[SpeedRow] | None = None,
    with_gamma: bool = False,
) -> None:
    """One marker per drafter, black where greedy and white where sampled."""
    rows = [row for row in rows or analysis.speeds if row.alpha is not None]
    for marker, name in zip(MARKERS * len(rows), _drafters(rows), strict=False):
        axes.scatter([], [], marker=marker, color="black", label=name)
        for row in (row for row in rows if row.drafter == name):
            fill = "black" if row.temperature == 0.0 else "white"
            axes.scatter(row.alpha, value(row), marker=marker, color=fill, edgecolor="black", s=28)
            if with_gamma:
                place = {"textcoords": "offset points", "xytext": (4, 3), "fontsize": 6}
                axes.annotate(str(row.gamma), (row.alpha, value(row)), **place)


def _gammas(analysis: Analysis) -> list[int]:
    return sorted({row.gamma for row in analysis.speeds})


def _drafters(rows: Sequence[SpeedRow]) -> list[str]:
    return list(dict.fromkeys(row.drafter for row in rows))


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)


FIGURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "figure-2-tokens": (_draw_tokens, SIZE_INCHES),
    "figure-3-gamma": (_draw_gamma, SIZE_INCHES),
    "figure-4-speedup-operations": (_draw_speedup, WIDE_INCHES),
    "figure-5-trace": (_draw_trace, WIDE_INCHES),
    "verify-cost": (_draw_costs, SIZE_INCHES),
    "predicted-measured": (_draw_predicted, SIZE_INCHES),
}
