"""Gamma chosen step by step against speculation off and against the best fixed gamma, cell by cell.

A cell is a batch size, a kind of prompts, a temperature and a bundle. All ways run the same short answers in turns in
one process (``scripts.bench.tools.paired``); prompts and the noise of sampling are others in every round, and the
same for all ways of one: a cell speaks of a kind of prompts, not of four of them. It
misses a bound when its 95 % interval lies wholly below. The best fixed gamma is the one of the highest mean speed:
in hindsight. Results are written after every cell, so that a sweep that is cut short leaves what it has.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import SpeculationParams
from rich.console import Console
from rich.progress import track

from scripts.bench.tools.common import Rig, open_rig, token_prompts
from scripts.bench.tools.paired import Interval, Turns, best_of, interval, take_turns
from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.tables import show

OFF_BOUND, BEST_BOUND = 0.98, 0.95
LEAST_ROWS = 4
"""Answers of one round at least: small batches run several after one another."""
NUM_PROMPTS = 64
"""Of a kind; rounds take them in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell: tokens per second of every way, and adaptive against off and against the best fixed gamma."""

    bundle: str
    batch: int
    prompts: str
    temperature: float
    tokens_per_s: dict[str, float]
    best_fixed: str
    num_rounds: int
    to_off: Interval
    to_best: Interval
    share_drafted: float
    cost_share: float

    @property
    def misses(self) -> bool:
        """True where an interval lies wholly below its bound."""
        return self.to_off.high < OFF_BOUND or self.to_best.high < BEST_BOUND


def ways(gammas: Sequence[int]) -> dict[str, SpeculationParams]:
    """Every way to run a cell, by name."""
    fixed = {f"gamma {gamma}": SpeculationParams(drafter="model", gamma=gamma) for gamma in gammas}
    return {
        "adaptive": SpeculationParams(drafter="model", is_adaptive=True),
        "off": SpeculationParams(is_enabled=False),
        **fixed,
    }


def measure(
    rig: Rig, kind: str, batch: int, temperature: float, gammas: Sequence[int], turns: Turns, num_tokens: int
) -> Cell:  # fmt: skip
    """Run one cell."""
    num_pieces = math.ceil(LEAST_ROWS / batch)
    prompts = token_prompts(kind, rig.tokenizer, rig.target.limits.vocab_size, NUM_PROMPTS)
    params = SamplingParams(temperature=temperature)
    all_ways = ways(gammas)
    shares: dict[str, list[float]] = defaultdict(list)

    def run(way: str, piece: int, number: int) -> tuple[int, float]:
        first = (number * num_pieces + piece) * batch
        asked = [prompts[place % NUM_PROMPTS] for place in range(first, first + batch)]
        finished, took_s = rig.run(asked, params, all_ways[way], num_tokens, first_seed=first)
        num_passes = sum(one.report.num_steps for one in finished)
        num_drafted = sum(sum(one.report.drafted_by_position[:1]) for one in finished)
        shares[way].append(num_drafted / num_passes)
        return sum(one.num_output for one in finished), took_s

    fixed = [f"gamma {gamma}" for gamma in gammas]
    rates = take_turns(run, list(all_ways), num_pieces=num_pieces, contenders=fixed, turns=turns)
    best = best_of(fixed, rates)
    control = rig.worker.snapshot().control
    assert control is not None
    return Cell(
        bundle=rig.bundle.root.name, batch=batch, prompts=kind, temperature=temperature,
        tokens_per_s=speeds(rates),
        best_fixed=best, num_rounds=len(rates["adaptive"]),
        to_off=interval(rates["adaptive"], rates["off"]),
        to_best=interval(rates["adaptive"], rates[best]),
        share_drafted=statistics.fmean(shares["adaptive"]), cost_share=control.cost_share,
    )  # fmt: skip


def speeds(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Tokens per second of every way, as if those that dropped out had met all prompts: by their ratio to off."""
    off = rates["off"]
    return {
        way: statistics.median(off) * interval(values, off[: len(values)]).ratio
        for way, values in rates.items()
    }


def columns_of(gammas: Sequence[int]) -> dict[str, tuple[str, str]]:
    """Columns of the table, by figure."""
    ways = ["off", *(f"gamma {gamma}" for gamma in gammas), "adaptive"]
    return {
        **{name: (name, "") for name in ("bundle", "batch", "prompts")},
        "temperature": ("T", "g"),
        **{f"{way} tokens_per_s": (way, ".0f") for way in ways},
        "share_drafted": ("drafted", ".2f"),
        **{
            f"{name}_{key}": (heading if key == "ratio" else key, ".3f")
            for name, heading in (("to_off", "to off"), ("to_best", "to best fixed"))
            for key in ("ratio", "low", "high")
        },
        "best_fixed": ("best", ""),
        "misses": ("misses", ""),
    }


def cliffs(cells: Sequence[Cell]) -> list[str]:
    """Steps of the batch size at which the adaptive throughput falls by half or more, in words."""
    series: dict[tuple[str, str, float], list[Cell]] = defaultdict(list)
    for cell in cells:
        series[cell.bundle, cell.prompts, cell.temperature].append(cell)
    found = []
    for (bundle, prompts, temperature), members in series.items():
        ordered = sorted(members, key=lambda cell: cell.batch)
        for one, other in itertools.pairwise(ordered):
            before, after = (cell.tokens_per_s["adaptive"] for cell in (one, other))
            if after <= before / 2.0:
                place = f"{bundle}, {prompts}, temperature {temperature:g}"
                found.append(
                    f"{place}: batch {one.batch} to {other.batch}, {before:.0f} to {after:.0f}"
                )
    return found


def row_of_cell(cell: Cell) -> Row:
    """A cell on one line."""
    case = ("bundle", "batch", "prompts", "temperature")
    ratios = {"to_off": cell.to_off, "to_best": cell.to_best}
    return Row(
        case={name: getattr(cell, name) for name in case},
        figures={
            **{f"{way} tokens_per_s": speed for way, speed in cell.tokens_per_s.items()},
            **{f"{name}_{key}": value for name, one in ratios.items() for key, value in asdict(one).items()},
            "best_fixed": cell.best_fixed, "num_rounds": cell.num_rounds,
            "share_drafted": cell.share_drafted, "cost_share": cell.cost_share,
            "misses": cell.misses,
        },
    )  # fmt: skip


def main(
    bundles: Annotated[list[Path], typer.Argument(help="float32 and int8 bundles of a pair")],
    batches: str = "1,2,4,8,16,32",
    prompts: Annotated[str, typer.Option(help="of code, prose, random")] = "code,prose,random",
    temperatures: str = "0,1",
    gammas: Annotated[str, typer.Option(help="fixed ones to compare with")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option(help="of one cell, about")] = 60.0,
    max_tokens: int = 48,
    costs: Annotated[Path, typer.Option(help="folder for measured step costs")] = Path("costs"),
    quick: Annotated[bool, typer.Option("--quick", help="a part of the sweep, in minutes")] = False,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Run the sweep; exit code 1 when a cell misses, or a larger batch halves the throughput."""
    if quick:
        prompts = "code,random" if prompts == "code,prose,random" else prompts
        gammas, seconds, max_tokens = "1,4", 10.0, 24
        batches = "1,8" if batches == "1,2,4,8,16,32" else batches
    sizes = [int(one) for one in batches.split(",")]
    fixed = [int(one) for one in gammas.split(",")]
    jobs = [
        (root, kind, batch, float(temperature))
        for root in bundles
        for kind in prompts.split(",")
        for batch in sizes
        for temperature in temperatures.split(",")
    ]
    title = "gamma chosen step by step against speculation off and the best fixed gamma"
    recorder = Recorder("never_slower", title, threads)
    settings = {
        "max_tokens": max_tokens, "seconds": seconds,
        "off_bound": OFF_BOUND, "best_fixed_bound": BEST_BOUND,
    }  # fmt: skip
    rigs: dict[Path, Rig] = {}
    cells = []
    began = time.perf_counter()
    for root, kind, batch, temperature in track(jobs, description="cells"):
        if root not in rigs:
            rigs[root] = open_rig(root, max_batch=max(sizes), num_threads=threads, costs=costs)
        turns = Turns(seconds=seconds)
        cells.append(measure(rigs[root], kind, batch, temperature, fixed, turns, max_tokens))
        recorder.write(json_out, [row_of_cell(cell) for cell in cells], settings)
    took_s = time.perf_counter() - began
    title = f"adaptive gamma, {len(cells)} cells in {took_s:.0f} s"
    show([row_of_cell(cell) for cell in cells], columns_of(fixed), title)
    console = Console()
    console.print(f"cells that miss: {sum(cell.misses for cell in cells)} of {len(cells)}")
    for cliff in cliffs(cells):
        console.print(f"throughput halves: {cliff}", highlight=False)
    raise typer.Exit(int(any(cell.misses for cell in cells) or bool(cliffs(cells))))


if __name__ == "__main__":
    typer.run(main)
