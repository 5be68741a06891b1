"""One Markdown report of all results in a folder: where they were taken, and every table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from scripts.bench.tools.results import Result, Row, read_result
from scripts.bench.tools.tables import markdown, text_of

REPORT, JOBS = "report.md", "jobs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """One benchmark's exit code, and the end of its output where it failed."""

    name: str
    command: str
    code: int
    seconds: float
    said: str


def write_report(folder: Path) -> Path:
    """Render the results in ``folder`` into its report.

    Args:
        folder: holds result files, and ``jobs.json`` where ``bench_all`` made them.

    Raises:
        ValueError: a file is no result, or the folder holds none.
    """
    paths = sorted(path for path in folder.glob("*.json") if path.name != JOBS)
    results = {path.stem: read_result(path) for path in paths}
    outcomes = _outcomes(folder / JOBS)
    if not results and not outcomes:
        raise ValueError(f"{folder}: holds no results")
    where = [_environments(results)] if results else []
    parts = ["# Benchmarks", *where, *_failures(outcomes, set(results))]
    for stem, result in results.items():
        parts += _section(stem, result)
    report = folder / REPORT
    report.write_text("\n\n".join(parts) + "\n")
    return report


def _outcomes(path: Path) -> list[JobOutcome]:
    if not path.exists():
        return []
    return [JobOutcome(**values) for values in json.loads(path.read_text())]


def _environments(results: Mapping[str, Result]) -> str:
    """Return a table of where each benchmark ran."""
    rows = []
    for stem, result in results.items():
        place = asdict(result.environment)
        versions = ", ".join(f"{name} {version}" for name, version in place.pop("versions").items())
        rows.append(Row(case={"benchmark": stem}, figures={**place, "versions": versions}))
    return markdown(rows)


def _failures(outcomes: Sequence[JobOutcome], found: set[str]) -> list[str]:
    """Lines on benchmarks without a result, or with a code other than 0."""
    lines = [
        f"- **{one.name}** ended with code {one.code}{'' if one.name in found else ', without a result'}: "
        f"`{one.command}`{_quoted(one.said)}"
        for one in outcomes
        if one.code or one.name not in found
    ]
    return ["## Not in order", "\n".join(lines)] if lines else []


def _quoted(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n\n" + "\n".join(f"      {line}" for line in lines) if lines else ""


def _section(stem: str, result: Result) -> list[str]:
    settings = ", ".join(f"{name} {text_of(value)}" for name, value in result.settings.items())
    facts = (
        f"{result.seconds:.0f} s; other processes used {result.foreign_cpu_share:.0%} of the processor. {settings}"
    )  # fmt: skip
    return [
        f"## {stem}",
        f"{result.title[:1].upper()}{result.title[1:]}.",
        f"```\n{result.command}\n```",
        facts.strip(),
        markdown(result.rows),
    ]


def main(folder: Annotated[Path, typer.Argument(help="folder of result files")]) -> None:
    """Render the report of a folder of results anew."""
    typer.echo(write_report(folder))


if __name__ == "__main__":
    typer.run(main)
