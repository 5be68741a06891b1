"""Results on a terminal: one table per benchmark, whose columns are parts of the rows' cases and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from scripts.bench.tools.results import Row

WIDTH = 180

Columns = Mapping[str, tuple[str, str]]
"""Heading and format by the name of a part of the case or a figure."""


def rich_table(rows: Sequence[Row], columns: Columns, title: str = "") -> Table:
    """Return a table with a line per row; a dash stands for what a row does not have."""
    table = Table(title=title)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        values = {**row.case, **row.figures}
        found = [(values.get(name), form) for name, (_, form) in columns.items()]
        table.add_row(*("-" if value is None else format(value, form) for value, form in found))
    return table


def show(rows: Sequence[Row], columns: Columns, title: str = "") -> None:
    """Print the rows as a table."""
    Console(width=WIDTH).print(rich_table(rows, columns, title))
