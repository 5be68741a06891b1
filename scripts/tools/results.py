"""The one form in which every benchmark writes what it measured, and under which circumstances.

A result is a table: each row has a case (what was run) and figures (what came out), units in the figures' names. Beside
it stand the command, the machine, the versions, the commit, and how much of the processor others used meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_VERSION = 1
VERSIONED = ("onnxruntime", "numpy", "grpcio", "tokenizers", "torch", "transformers", "onnx")
"""Packages whose version may matter to a figure."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a result: what was run, and what came out; None where there is no such figure."""

    case: Mapping[str, Scalar]
    figures: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Machine, versions and commit of a run.

    Attributes:
        threads: threads that the benchmark gave to each engine.
        commit: of the project; ends in ``-dirty`` where files differed from it, empty outside of a checkout.
    """

    date: str
    cpu: str
    num_cores: int
    memory_bytes: int
    os: str
    threads: int
    python: str
    versions: Mapping[str, str]
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one run of one benchmark.

    Attributes:
        title: what the figures are, in a sentence.
        seconds: of the whole run.
        foreign_cpu_share: share of all cores that processes other than the benchmark's own were using.
        settings: of the run, those that hold for every row.
    """

    benchmark: str
    title: str
    command: str
    environment: Environment
    seconds: float
    foreign_cpu_share: float
    settings: Mapping[str, Scalar]
    rows: Sequence[Row]
    schema_version: int = SCHEMA_VERSION


@dataclass(slots=True)
class Recorder:
    """Takes down the circumstances of a benchmark from its creation on, and writes its result."""

    benchmark: str
    title: str
    threads: int
    _began_s: float = field(default_factory=time.perf_counter)
    _began_cpu: tuple[float, float] = field(default_factory=lambda: _cpu_seconds())

    def result(self, rows: Sequence[Row], settings: Mapping[str, Scalar]) -> Result:
        """The result of the benchmark as of now."""
        seconds = time.perf_counter() - self._began_s
        busy, own = (now - then for now, then in zip(_cpu_seconds(), self._began_cpu, strict=True))
        all_s = seconds * _num_cores()
        return Result(
            benchmark=self.benchmark,
            title=self.title,
            command=f"python -m scripts.lab.bench.{self.benchmark} {shlex.join(sys.argv[1:])}".strip(),
            environment=environment(self.threads),
            seconds=seconds,
            foreign_cpu_share=min(1.0, max(0.0, (busy - own) / all_s)),
            settings=dict(settings),
            rows=list(rows),
        )

    def write(self, path: Path | None, rows: Sequence[Row], settings: Mapping[str, Scalar]) -> None:
        """Write the result as JSON; nothing where no file is wanted."""
        if path is not None:
            write_result(path, self.result(rows, settings))


def write_result(path: Path, result: Result) -> None:
    """Write a result as JSON.

    Raises:
        ValueError: a figure is no number that JSON knows.
    """
    path.write_text(json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")


def read_result(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        ValueError: the file is no result of this version; names file and field.
    """
    try:
        return parse_result(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def parse_result(values: Any) -> Result:
    """Return a result from what JSON gave.

    Raises:
        ValueError: no result of this version.
        TypeError: a field is missing or unknown; names it.
    """
    if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version: must be {SCHEMA_VERSION}")
    result = Result(**values)
    place = Environment(**values["environment"])
    return replace(result, environment=place, rows=[Row(**row) for row in result.rows])


def environment(threads: int) -> Environment:
    """This machine and this checkout, now."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=cpu_name(),
        num_cores=_num_cores(),
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        threads=threads,
        python=platform.python_version(),
        versions=installed_versions(VERSIONED),
        commit=_commit(),
    )


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_seconds() -> tuple[float, float]:
    """Processor seconds since some moment: of the whole machine, and of this process and its ended children."""
    times = psutil.cpu_times()
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (times.user + times.system, sum(one.ru_utime + one.ru_stime for one in own))


def _num_cores() -> int:
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the name of the processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
