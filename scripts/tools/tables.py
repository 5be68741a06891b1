"""Results as tables, on a terminal or in Markdown: the parts of the rows' cases, then their figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from scripts.tools.results import Row, Scalar

WIDTH = 180


def columns_of(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the parts of the cases and of the figures, in order of appearance."""
    case = dict.fromkeys(name for row in rows for name in row.case)
    return list(case), list(dict.fromkeys(name for row in rows for name in row.figures))


def cells_of(row: Row, case: Sequence[str], figures: Sequence[str]) -> list[str]:
    """Return a row's text per column, empty where it has no such figure."""
    values = [*(row.case.get(name) for name in case), *(row.figures.get(name) for name in figures)]
    return [text_of(value) for value in values]


def text_of(value: Scalar) -> str:
    """Return a figure in four digits, or a whole number of more; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def rich_table(rows: Sequence[Row], title: str = "") -> Table:
    """Return a table for a terminal, whose headings may break between words."""
    case, figures = columns_of(rows)
    table = Table(title=title)
    for name in (*case, *figures):
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*cells_of(row, case, figures))
    return table


def show(rows: Sequence[Row], title: str = "") -> None:
    """Print the rows as a table."""
    Console(width=WIDTH).print(rich_table(rows, title))


def markdown(rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    case, figures = columns_of(rows)
    lines = [[*case, *figures]]
    for row in rows:
        cells = cells_of(row, case, figures)
        lines.append([cell.replace("|", "\\|").replace("\n", " ") for cell in cells])
    head, *body = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(case) + "---:|" * len(figures), *body])
