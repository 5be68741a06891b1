"""One Markdown report of all results in a folder: where they were taken, and every table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from scripts.bench.tools.results import Environment, Result, Row, Scalar, read_result

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
    parts = ["# Benchmarks", *_header(list(results.values())), *_failures(outcomes, set(results))]
    for stem, result in results.items():
        parts += _section(stem, result)
    report = folder / REPORT
    report.write_text("\n\n".join(parts) + "\n")
    return report


def _outcomes(path: Path) -> list[JobOutcome]:
    if not path.exists():
        return []
    return [JobOutcome(**values) for values in json.loads(path.read_text())]


def _header(results: Sequence[Result]) -> list[str]:
    """The environments, each with the benchmarks that ran in it, dates aside."""
    places: dict[str, list[Result]] = {}
    for result in results:
        known = {**asdict(result.environment), "date": ""}
        places.setdefault(json.dumps(known, sort_keys=True), []).append(result)
    parts = []
    for members in places.values():
        if len(places) > 1:
            parts.append(f"**{', '.join(sorted({one.benchmark for one in members}))}**")
        dates = sorted(one.environment.date for one in members)
        parts.append(_environment(members[0].environment, dates))
    return parts


def _environment(place: Environment, dates: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = {
        "date": period,
        "processor": f"{place.cpu}, {place.num_cores} cores, {place.memory_bytes / 2**30:.0f} GiB",
        "threads": str(place.threads),
        "system": f"{place.os}, Python {place.python}",
        "versions": versions,
        "commit": place.commit or "outside of a checkout",
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in lines.items())]
    )


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
    settings = ", ".join(f"{name} {_cell(value)}" for name, value in result.settings.items())
    facts = (
        f"{result.seconds:.0f} s; other processes used {result.foreign_cpu_share:.0%} of the processor. {settings}"
    )  # fmt: skip
    return [
        f"## {stem}",
        f"{result.title[:1].upper()}{result.title[1:]}.",
        f"```\n{result.command}\n```",
        facts.strip(),
        table_of(result.rows),
    ]


def table_of(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table: the parts of the case, then the figures, in order of appearance."""
    case = list(dict.fromkeys(name for row in rows for name in row.case))
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [
        "| " + " | ".join([*case, *figures]) + " |",
        "|" + "---|" * len(case) + "---:|" * len(figures),
    ]
    for row in rows:
        cells = [*_cells(row.case, case), *_cells(row.figures, figures)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(values: Mapping[str, Scalar], names: Sequence[str]) -> list[str]:
    return [_cell(values.get(name)) for name in names]


def _cell(value: Scalar) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def main(folder: Annotated[Path, typer.Argument(help="folder of result files")]) -> None:
    """Render the report of a folder of results anew."""
    typer.echo(write_report(folder))


if __name__ == "__main__":
    typer.run(main)
