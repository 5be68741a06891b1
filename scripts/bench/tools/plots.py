"""Pictures of benchmark results: one table says which figures of which benchmark are worth seeing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench.tools.results import Result, Row, Scalar

matplotlib.use("agg")

_PANEL_INCHES = (4.2, 3.2)
_MAX_COLUMNS = 3
_DPI = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One picture: a figure ``y`` over ``x``, a panel and a line for each value of the named parts of the case."""

    x: str
    y: str
    panels: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    even: float | None = None


PLOTS: Mapping[str, Sequence[Plot]] = {
    "beams": [
        Plot(x="gamma", y="steps_per_pass", panels=("num_beams",), lines=("beam_width",)),
        Plot(x="gamma", y="median_ratio_of_speeds", panels=("num_beams",), lines=("beam_width",), even=1.0),
    ],
    "controller": [Plot(x="batch", y="worst_share", lines=("bundle",))],
    "drafters": [Plot(x="drafter", y="tokens_per_s", panels=("task",))],
    "grpc": [Plot(x="batch", y="through_grpc_share", lines=("gamma",), even=1.0)],
    "never_slower": [
        Plot(x="batch", y="to_off_ratio", panels=("bundle", "prompts"), lines=("temperature",), even=1.0),
        Plot(x="batch", y="to_best_ratio", panels=("bundle", "prompts"), lines=("temperature",), even=1.0),
    ],
    "peers": [Plot(x="tokens_per_s", y="who", panels=("weights", "batch"), lines=("way",))],
    "sampling": [Plot(x="share", y="mode", panels=("bundle",), lines=("batch",))],
    "serving": [
        Plot(x="offered_per_s", y="goodput_per_s", lines=("way",)),
        Plot(x="offered_per_s", y="ttft_p99_ms", lines=("way",)),
        Plot(x="offered_per_s", y="itl_p99_ms", lines=("way",)),
    ],
    "speculation": [
        Plot(x="gamma", y="tokens_per_s", panels=("temperature",), lines=("batch",)),
        Plot(x="gamma", y="speedup", panels=("temperature",), lines=("batch",), even=1.0),
    ],
}  # fmt: skip


def draw_all(result: Result, folder: Path, stem: str) -> list[Path]:
    """Draw a result's pictures into PNG files ``folder/stem-Y.png``; those that had something to show."""
    drawn = []
    for plot in PLOTS.get(result.benchmark, ()):
        rows = [row for row in result.rows if _point(row, plot) is not None]
        if rows:
            other = plot.y if plot.y not in rows[0].case else plot.x
            path = folder / f"{stem}-{other}.png"
            draw(plot, rows).savefig(path, dpi=_DPI)
            drawn.append(path)
    return drawn


def draw(plot: Plot, rows: Sequence[Row]) -> Figure:
    """One picture of rows that all have a point in it."""
    panels = _groups(rows, plot.panels)
    columns = min(_MAX_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(
        figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines), layout="constrained"
    )
    for number, (key, members) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        _draw_panel(axes, plot, members)
        axes.set_title(_said(plot.panels, key), fontsize="small")
    return figure


def _draw_panel(axes: Axes, plot: Plot, rows: Sequence[Row]) -> None:
    for key, members in _groups(rows, plot.lines).items():
        points = [point for row in members if (point := _point(row, plot)) is not None]
        has_names = any(isinstance(value, str) for point in points for value in point)
        points = points if has_names else sorted(points)
        horizontal, vertical = zip(*points, strict=True)
        axes.plot(horizontal, vertical, "o" if has_names else "o-", label=_said(plot.lines, key))
    if plot.even is not None:
        axes.axhline(plot.even, color="grey", linewidth=0.8)
    if plot.lines:
        axes.legend(fontsize="x-small")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(alpha=0.3)
    if isinstance(_value(rows[0], plot.x), str):
        axes.tick_params(axis="x", rotation=60, labelsize="x-small")


def _groups(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Scalar, ...], list[Row]]:
    """Rows by their values of the named parts of the case, in order of appearance."""
    groups: dict[tuple[Scalar, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.case.get(name) for name in names), []).append(row)
    return groups


def _point(row: Row, plot: Plot) -> tuple[Scalar, Scalar] | None:
    x, y = _value(row, plot.x), _value(row, plot.y)
    return None if x is None or y is None else (x, y)


def _value(row: Row, name: str) -> Scalar:
    return row.case.get(name, row.figures.get(name))


def _said(names: Sequence[str], values: Sequence[Scalar]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
