"""Judgement of two builds' rates: ratios with intervals, geometric means per size, and their bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.lab.bench.tools.paired import Interval, interval

CELL_BOUND = 0.93
"""Share of speculation off: no cell's interval may lie wholly below."""
MEAN_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "10m": {"to_old": 0.98, "to_off": 0.97, "to_best": 0.90},
    "125m": {"to_old": 0.98, "to_off": 1.0, "to_best": 0.95},
    "1b": {"to_old": 0.98, "to_off": 1.0, "to_best": 0.95},
    "unseen": {"to_off": 0.98, "to_best": 0.95},
}
"""Least geometric means, per size."""
WHOLE_BOUNDS = {"10m": 0.97, "125m": 1.0, "1b": 1.0, "unseen": 0.97}
"""Least tokens per second of the whole runtime, new over old, per size."""
HEADS = {
    "to_old": "new/old", "to_off": "new/off", "to_best": "new/best fixed", "off_to_off": "off: new/old",
}  # fmt: skip

Rates = Mapping[str, Sequence[float]]
"""Tokens per second by way, round by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One cell's outcome.

    Attributes:
        ratios: by name as in ``HEADS``: median of the paired rounds, with the 95 % interval of their mean.
        best_fixed: the way that won the even rounds; None where no fixed gamma ran.
        new_tokens_per_s: with gamma chosen step by step; median.
        off_tokens_per_s: of the new build; median.
        num_unequal: rounds whose greedy answers were not those of the old build without speculation.
    """

    size: str
    case: str
    num_rounds: int
    ratios: Mapping[str, Interval]
    best_fixed: str | None
    new_tokens_per_s: float
    off_tokens_per_s: float
    num_unequal: int

    @property
    def misses(self) -> bool:
        """True where its interval lies wholly below the bound of a cell."""
        return self.ratios["to_off"].high < CELL_BOUND


def judged(size: str, case: str, rates: Rates, num_unequal: int) -> Judged:
    """One cell from the rates of ``new auto`` and ``new off``, and where they ran of the old build and fixed gammas."""
    new, off = rates["new auto"], rates["new off"]
    ratios = {"to_off": median_ratio(new, off)}
    if "old auto" in rates:
        ratios["to_old"] = median_ratio(new, rates["old auto"])
        ratios["off_to_off"] = median_ratio(off, rates["old off"])
    best = None
    if fixed := [way for way in rates if way.startswith("gamma ")]:
        best = best_of_even(rates, fixed)
        ratios["to_best"] = median_ratio(new[1::2], rates[best][1::2])
    return Judged(
        size=size, case=case, num_rounds=len(new), ratios=ratios, best_fixed=best, num_unequal=num_unequal,
        new_tokens_per_s=statistics.median(new), off_tokens_per_s=statistics.median(off),
    )  # fmt: skip


def best_of_even(rates: Rates, contenders: Sequence[str]) -> str:
    """The contender of the highest geometric mean over rounds 0, 2, 4, ...; odd rounds are left to judge it."""
    return max(contenders, key=lambda way: statistics.geometric_mean(rates[way][::2]))


def median_ratio(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Median of the ratios of paired rounds, in Student's interval of their geometric mean."""
    found = interval(one, other)
    middle = statistics.median(a / b for a, b in zip(one, other, strict=True))
    return Interval(ratio=middle, low=found.low, high=found.high)


def geometric_mean(ratios: Sequence[Interval]) -> Interval:
    """Geometric mean of cells' ratios; the cells' errors are independent, so their squares add up."""
    mean = math.exp(statistics.fmean(math.log(one.ratio) for one in ratios))
    halves = [math.log(one.high / one.low) / 2.0 for one in ratios]
    half = math.exp(min(math.hypot(*halves) / len(halves), 700.0))
    return Interval(ratio=mean, low=mean / half, high=mean * half)


def means_of(cells: Sequence[Judged], size: str) -> dict[str, Interval]:
    """Geometric means of one size's cells, by name as in ``HEADS``."""
    ours = [cell.ratios for cell in cells if cell.size == size]
    return {
        name: geometric_mean([one[name] for one in ours])
        for name in HEADS
        if all(name in one for one in ours)
    }


def misses(cells: Sequence[Judged], *, is_whole: bool = False) -> list[str]:
    """Every bound that is missed, in words."""
    found = []
    for size in dict.fromkeys(cell.size for cell in cells):
        bounds = {"to_old": WHOLE_BOUNDS[size]} if is_whole else MEAN_BOUNDS[size]
        means = means_of(cells, size)
        found += [
            f"{size}: {HEADS[name]} {means[name].ratio:.3f}, bound {bound}"
            for name, bound in bounds.items()
            if name in means and means[name].ratio < bound
        ]
    if not is_whole:
        found += [
            f"{cell.size} {cell.case}: wholly below {CELL_BOUND} of off"
            for cell in cells
            if cell.misses
        ]
    return found + [
        f"{cell.size} {cell.case}: other greedy answers" for cell in cells if cell.num_unequal
    ]


def markdown(cells: Sequence[Judged], *, is_whole: bool = False) -> str:
    """All cells and the means of each size, as tables, with what is missed below."""
    names = [name for name in HEADS if any(name in cell.ratios for cell in cells)]
    shown_names = [HEADS[name] for name in names]
    heads = ["size", "cell", "rounds", "off tokens/s", "new tokens/s", *shown_names, "best"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for cell in cells:
        rates = [f"{cell.off_tokens_per_s:.0f}", f"{cell.new_tokens_per_s:.0f}"]
        shown = [_shown(cell.ratios.get(name)) for name in names]
        lines.append(
            _line([cell.size, cell.case, str(cell.num_rounds), *rates, *shown, cell.best_fixed or "-"])
        )  # fmt: skip
    lines += ["", _line(["size", "figure", "geometric mean", "bound"]), _line(["---"] * 4)]
    for size in dict.fromkeys(cell.size for cell in cells):
        bounds = {"to_old": WHOLE_BOUNDS[size]} if is_whole else MEAN_BOUNDS[size]
        lines += [
            _line([size, HEADS[name], _shown(mean), str(bounds.get(name, "-"))])
            for name, mean in means_of(cells, size).items()
        ]
    found = misses(cells, is_whole=is_whole)
    return "\n".join([*lines, "", *(f"missed: {one}" for one in found or ["nothing"])])


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _shown(one: Interval | None) -> str:
    return "-" if one is None else f"{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]"
