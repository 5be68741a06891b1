"""Two builds of Outrider in turns, over the same bundles: gamma chosen step by step, speculation off, fixed gammas.

Each build answers in a process of its own, which lives for all cells of a bundle; one process computes at a time. A
round gives every way the same prompts and seeds, in random order; the next round has others. Fixed gammas are the new
build's, in a third process without a cost table: so neither controller learns from steps that the other does not see.
The best fixed gamma is chosen on the even rounds and judged on the odd ones.

``--whole`` compares the tokens per second of the whole runtime instead, before and after.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.runtime.serving.tokenizer import TokenizersCodec

from scripts.lab.bench.tools.builds_report import Judged, judged, markdown, misses
from scripts.tools.common import PAUSE_S, token_prompts
from scripts.tools.results import ROOT, Recorder, Row

WORKER = Path(__file__).with_name("tools") / "builds_worker.py"
LEAST_ROUNDS = 4
MAX_TOKENS = 64
SINGLE_ANSWERS = 2
"""Answers of a round at batch 1, one after another."""
NUM_PROMPTS = 192
"""Of a kind; rounds take them in turn. The standard library has 194 heads of functions that are prompts."""
GAMMAS = (1, 2, 4, 8)
SECONDS = {"10m": 60.0, "125m": 180.0, "1b": 780.0, "unseen": 60.0}
"""Of one cell: 12, 36 and 52 minutes of the grid, and 6 of an unseen pair."""


Prompts = Sequence[Sequence[int]]
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
Way = tuple[str, int | str]
"""Process, and gamma or "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Requests that arrive together, what they ask for, and who drafts."""

    batch: int
    prompts: str = "code"
    temperature: float = 0.0
    drafter: str = "model"

    def __str__(self) -> str:
        return f"{self.batch} {self.prompts} T={self.temperature:g} {self.drafter}"


SMALL_CELLS = (
    Cell(batch=1),
    Cell(batch=1, prompts="random"),
    Cell(batch=1, prompts="prose", temperature=1.0),
    Cell(batch=1, drafter="suffix+model:4"),
    Cell(batch=2, prompts="prose"),
    Cell(batch=2, temperature=1.0, drafter="suffix"),
    Cell(batch=4),
    Cell(batch=4, prompts="random", temperature=1.0),
    Cell(batch=4, temperature=1.0, drafter="suffix+model:4"),
    Cell(batch=8),
    Cell(batch=8, prompts="random"),
    Cell(batch=8, prompts="prose", drafter="suffix"),
)
LARGE_CELLS = tuple(Cell(batch=batch, prompts=kind) for batch in (1, 4) for kind in ("code", "random"))  # fmt: skip
SINGLE_CELLS = tuple(
    Cell(batch=1, prompts=kind, temperature=temperature)
    for kind in ("code", "prose", "random")
    for temperature in (0.0, 1.0)
)
GRID = {"10m": SMALL_CELLS, "125m": SMALL_CELLS, "1b": LARGE_CELLS, "unseen": SINGLE_CELLS}
WHOLE = (Cell(batch=1), Cell(batch=8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one cell: ``LEAST_ROUNDS`` rounds at least, then until the seconds or the rounds are spent."""

    seconds: float
    rounds: int


class BuildProcess:
    """A worker process of one build over one bundle."""

    def __init__(self, root: Path, bundle: Path, options: Sequence[str]) -> None:
        layout, path = _layout_of(root)
        command = [sys.executable, "-P", str(WORKER), layout, str(bundle), *options]
        self._process = subprocess.Popen(
            command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        )  # fmt: skip
        about = self._read()
        self.vocab_size = int(about["vocab_size"])
        if not Path(about["file"]).is_relative_to(root):
            raise RuntimeError(f"{about['file']} is not of the build in {root}")

    def __enter__(self) -> BuildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job and return its answer, once the other processes' threads have gone to sleep."""
        time.sleep(PAUSE_S)
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended: exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _layout_of(root: Path) -> tuple[str, list[Path]]:
    """Name of a checkout's layout, and its PYTHONPATH."""
    if (root / "runtime" / "worker.py").exists():
        return "flat", [root, root / "proto"]
    stage = root / "build" / "stage"
    if not stage.exists():
        subprocess.run(["bash", "scripts/stage"], cwd=root, check=True)
    return "outrider", [stage]


def rates_of(
    cell: Cell, ask: Ask, prompts: Prompts, ways: Mapping[str, Way], limits: Limits
) -> tuple[dict[str, list[float]], int]:
    """Run one cell in rounds; the first round warms up and does not count.

    Args:
        cell: what to run.
        ask: process by name and job to answer.
        prompts: taken in turn.
        ways: in random order in every round.
        limits: when to stop.

    Returns:
        Tokens per second by way and round, and the rounds in which greedy answers differed.
    """
    rates: dict[str, list[float]] = {way: [] for way in ways}
    began, round_s, num_unequal = time.monotonic(), 0.0, 0
    for number in range(limits.rounds + 1):
        round_began = time.monotonic()
        if number > LEAST_ROUNDS and round_began - began + round_s > limits.seconds:
            break
        job = job_of(cell, prompts, number)
        said = set()
        for way in random.Random(number).sample(list(ways), len(ways)):
            process, gamma = ways[way]
            answer = ask(process, {**job, "gamma": gamma, "tenant": f"{cell} {way}"})
            said.add(answer["answers"])
            if number:
                rates[way].append(answer["tokens"] / answer["seconds"])
        num_unequal += cell.temperature == 0.0 and len(said) > 1
        round_s = time.monotonic() - round_began
    return rates, num_unequal


def job_of(cell: Cell, prompts: Prompts, number: int) -> dict[str, Any]:
    """Return the job of one round for all ways, less gamma and tenant."""
    num_groups = SINGLE_ANSWERS if cell.batch == 1 else 1
    first = number * num_groups * cell.batch
    places = range(first, first + num_groups * cell.batch, cell.batch)
    groups = [
        [prompts[(place + row) % len(prompts)] for row in range(cell.batch)] for place in places
    ]
    return {
        "groups": groups, "seed": first, "temperature": cell.temperature, "drafter": cell.drafter,
        "max_tokens": MAX_TOKENS,
    }  # fmt: skip


def ways_of(builds: Iterable[str], gammas: Iterable[int]) -> dict[str, Way]:
    """Return the ways of a round by name."""
    chosen: dict[str, Way] = {
        f"{build} {name}": (build, gamma)
        for build in builds
        for name, gamma in (("auto", "auto"), ("off", 0))
    }
    return {**chosen, **{f"gamma {gamma}": ("fixed", gamma) for gamma in gammas}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One bundle's cells, and how they are run."""

    size: str
    bundle: Path
    cells: Sequence[Cell]
    gammas: Sequence[int]
    limits: Limits
    builds: dict[str, Path]
    costs: Path
    threads: int

    def measure(self, report: Callable[[Judged], None]) -> None:
        """Run every cell and report each as it ends."""
        max_batch = max(cell.batch for cell in self.cells)
        shared = ["--max-batch", str(max_batch), "--threads", str(self.threads)]
        codec = TokenizersCodec(self.bundle / TOKENIZER_FILE)
        ways = ways_of(self.builds, self.gammas)
        with ExitStack() as stack:
            processes = {}
            for name, root in self.builds.items():
                costs = ["--costs", str(self.costs / name)]
                processes[name] = BuildProcess(root, self.bundle, [*shared, *costs])
                stack.enter_context(processes[name])
            if self.gammas:
                processes["fixed"] = BuildProcess(self.builds["new"], self.bundle, shared)
                stack.enter_context(processes["fixed"])
            for cell in self.cells:
                prompts = token_prompts(
                    cell.prompts, codec, processes["new"].vocab_size, NUM_PROMPTS
                )
                rates, num_unequal = rates_of(
                    cell, lambda name, job: processes[name].ask(job), prompts, ways, self.limits
                )
                name = f"{self.bundle.name} {cell}"
                report(judged(self.size, name, rates, num_unequal))


def row_of_cell(one: Judged) -> Row:
    """A cell on one line."""
    return Row(
        case={"size": one.size, "cell": one.case},
        figures={
            "rounds": one.num_rounds, "best_fixed": one.best_fixed, "num_unequal": one.num_unequal,
            "new_tokens_per_s": one.new_tokens_per_s, "off_tokens_per_s": one.off_tokens_per_s,
            **{
                f"{name}_{key}": value
                for name, ratio in one.ratios.items()
                for key, value in asdict(ratio).items()
            },
        },
    )  # fmt: skip


def main(
    old: Annotated[Path | None, typer.Option(help="checkout of the old build")] = None,
    new: Annotated[Path, typer.Option(help="checkout of the new build")] = ROOT,
    demo: Annotated[Path | None, typer.Option(help="bundle of 10M parameters")] = None,
    m125: Annotated[Path | None, typer.Option(help="bundle of 125M parameters")] = None,
    b1: Annotated[Path | None, typer.Option(help="bundle of 1B parameters")] = None,
    unseen: Annotated[
        list[Path] | None, typer.Option(help="bundle of a pair that no constant was chosen on")
    ] = None,
    only: Annotated[str, typer.Option(help="sizes, of 10m, 125m, 1b, unseen")] = "",
    cells: Annotated[str, typer.Option(help="numbers of cells, from 0")] = "",
    whole: Annotated[bool, typer.Option("--whole", help="tokens/s of the whole runtime")] = False,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, help="of a cell, at most")] = 40,
    seconds: Annotated[float, typer.Option(help="of a cell; 0: by its size")] = 0.0,
    costs: Annotated[Path, typer.Option(help="folder for measured step costs")] = Path("costs"),
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Run the grid and print its tables as markdown; exit code 1 when a bound is missed."""
    given = [("10m", demo), ("125m", m125), ("1b", b1), *(("unseen", one) for one in unseen or ())]
    builds = {"new": new.resolve()} | ({"old": old.resolve()} if old else {})
    recorder = Recorder("builds", "the new build in turns with the old one", threads)
    settings = {name: str(root) for name, root in builds.items()}
    found: list[Judged] = []

    def report(one: Judged) -> None:
        found.append(one)
        ratios = ", ".join(f"{name} {ratio.ratio:.3f}" for name, ratio in one.ratios.items())
        print(f"{one.size} {one.case}: {one.num_rounds} rounds, {ratios}", file=sys.stderr)
        recorder.write(json_out, [row_of_cell(cell) for cell in found], settings)

    for size, bundle in given:
        if bundle is None or (only and size not in only.split(",")):
            continue
        grid = WHOLE if whole else GRID[size]
        chosen = [grid[int(one)] for one in cells.split(",")] if cells else grid
        limits = Limits(seconds=seconds or SECONDS[size], rounds=rounds)
        Run(
            size=size, bundle=bundle.resolve(), cells=chosen, gammas=() if whole else GAMMAS, limits=limits,
            builds=builds, costs=costs.resolve(), threads=threads,
        ).measure(report)  # fmt: skip
    print(markdown(found, is_whole=whole))
    raise typer.Exit(int(bool(misses(found, is_whole=whole))))


if __name__ == "__main__":
    typer.run(main)
