"""Every benchmark in turn, and one report of all: ``python -m scripts.bench.all --out DIR [--quick]``.

Each runs in a process of its own, one after the other, and leaves its result and its output in the folder. One that
fails does not stop the others; the report lists it with what it said.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from scripts.bench.tools.common import names_of
from scripts.bench.tools.report import JOBS, JobOutcome, write_report
from scripts.bench.tools.results import ROOT
from scripts.run_demo import ensure_bundle

SAID_LINES = 12
DEMO_WEIGHTS = ("float32", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One benchmark: arguments by ``{bundle}``, its ``{name}``, ``{work}`` and ``{threads}``.

    Attributes:
        quick: further arguments that make it short.
        is_per_bundle: runs once for each bundle, else once for all.
    """

    name: str
    arguments: str
    quick: str = ""
    is_per_bundle: bool = True


BENCHMARKS = (
    Job(
        name="speculation",
        arguments="{bundle} --threads {threads}",
        quick="--gammas 2,4 --batches 1 --num-prompts 2 --max-tokens 24 --rounds 1",
    ),
    Job(
        name="grpc",
        arguments="{bundle} --threads {threads}",
        quick="--batches 1,4 --num-prompts 4 --max-tokens 24 --rounds 1",
    ),
    Job(
        name="drafters",
        arguments="{bundle} --scratch {work}/drafters-{name} --threads {threads}",
        quick="--figures 3,4 --tasks code --num-prompts 4 --max-tokens 40 --rounds 1",
    ),
    Job(
        name="beams",
        arguments="{bundle} --threads {threads}",
        quick="--num-beams 2 --gammas 2 --num-prompts 1 --max-tokens 12 --rounds 1",
    ),
    Job(
        name="builds",
        arguments="--unseen {bundle} --costs {work}/costs --threads {threads}",
        quick="--cells 0 --rounds 4 --seconds 1",
    ),
    Job(
        name="serving",
        arguments="{bundle} --costs {work}/costs --threads {threads}",
        quick="--shares 0.5,1.2 --requests 12 --max-tokens 24",
    ),
    Job(
        name="peers",
        arguments="{work}/peers --threads {threads}",
        # Setting other peers up takes minutes and a network.
        quick="--peers outrider --weights int8 --gammas 4 --batches 1 --num-prompts 2 --max-tokens 16 --rounds 1",
        is_per_bundle=False,
    ),
)


def run_job(name: str, module: str, arguments: Sequence[str], out: Path) -> JobOutcome:
    """Run one benchmark to its end; its result goes to ``out/name.json`` and its output to ``out/name.log``."""
    result = out / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, *arguments, "--json-out", str(result)]
    log = out / f"{name}.log"
    began = time.perf_counter()
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT).returncode
    said = log.read_text().splitlines()[-SAID_LINES:] if code else []
    return JobOutcome(
        name=name,
        command=shlex.join(["python", *command[1:]]),
        code=code,
        seconds=time.perf_counter() - began,
        said="\n".join(said),
    )


def planned(
    benchmarks: Sequence[Job], bundles: Sequence[Path], work: Path, threads: int, *, is_quick: bool
) -> list[tuple[str, str, list[str]]]:
    """Name, module and arguments of every run, in order."""
    runs = []
    for job in benchmarks:
        for bundle in bundles if job.is_per_bundle else bundles[:1]:
            places = {
                "bundle": str(bundle), "name": bundle.name, "work": str(work),
                "threads": str(threads),
            }  # fmt: skip
            name = f"{job.name}-{bundle.name}" if job.is_per_bundle else job.name
            words = shlex.split(f"{job.arguments} {job.quick if is_quick else ''}")
            arguments = [word.format(**places) for word in words]
            runs.append((name, f"scripts.bench.{job.name}", arguments))
    return runs


def demo_bundles() -> list[Path]:
    """Return the demo pair's bundles, exported where they are missing."""
    for weights in DEMO_WEIGHTS:
        ensure_bundle(ROOT / "bundles" / f"demo-{weights}", ROOT / "demo", weights)
    return [ROOT / "bundles" / f"demo-{weights}" for weights in DEMO_WEIGHTS]


def chosen(only: str) -> list[Job]:
    """Return the benchmarks of a comma-separated list, in our order; all if it is empty.

    Raises:
        typer.BadParameter: a name is none of a benchmark.
    """
    names = names_of(only, [job.name for job in BENCHMARKS])
    return [job for job in BENCHMARKS if job.name in names or not names]


def main(
    out: Annotated[Path, typer.Option(help="folder for results and report.md")],
    bundle: Annotated[
        list[Path] | None,
        typer.Option(help="bundle to measure, any number of them; default the demo pair's"),
    ] = None,
    only: Annotated[str, typer.Option(help="comma-separated benchmarks; default all")] = "",
    threads: int = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="short runs that show that all works, no figures to quote")
    ] = False,
) -> None:  # fmt: skip
    """Run the benchmarks in turn and render their report; exit code 1 when one left no result."""
    out = out.resolve()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    jobs = chosen(only)
    bundles = [one.resolve() for one in bundle] if bundle else demo_bundles()
    outcomes = []
    for run in track(
        planned(jobs, bundles, work, threads, is_quick=quick), description="benchmarks"
    ):
        outcomes.append(run_job(*run, out))
        listed = json.dumps([asdict(one) for one in outcomes], indent=2)
        (out / JOBS).write_text(listed + "\n")
    Console().print(f"report: {write_report(out)}", highlight=False)
    raise typer.Exit(int(not all((out / f"{one.name}.json").exists() for one in outcomes)))


if __name__ == "__main__":
    typer.run(main)
