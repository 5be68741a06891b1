"""How a soak ends: a table of figures, what is wrong, and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil
import typer
from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return float(psutil.Process(pid).memory_info().rss) / MIB


def finish(title: str, figures: Mapping[str, object], problems: Sequence[str]) -> None:
    """Print figures and problems, and exit: 1 where there is any problem.

    Raises:
        typer.Exit: always.
    """
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False)
    raise typer.Exit(1 if problems else 0)
