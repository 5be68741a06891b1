"""Writes the tables of docs/configuration.md: every setting of ``outrider serve``, its default and its meaning.

    python -m scripts.list_settings

The options are asked of the command line, the names of tables of the classes that hold them.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from outrider.runtime.cli.main import app
from outrider.runtime.cli.serve.settings import TABLES
from outrider.runtime.core.settings import named_of
from outrider.runtime.serving.settings import ServeOptions

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: python -m scripts.list_settings -->", "<!-- end -->"

Row = tuple[str, str, str]


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def renewed(page: str) -> str:
    """Return the page with tables of the settings that there are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join((before + BEGIN, *tables(), "", END + after))


def tables() -> Iterator[str]:
    """Yield the lines of all tables, a heading before each."""
    panels: defaultdict[str, list[Row]] = defaultdict(list)
    for panel, row in options():
        panels[panel].append(row)
    for panel, rows in panels.items():
        yield from table(panel, rows)
    for name in ("limits", "drafting"):
        yield from table(f"`[{name}]`, or `--{TABLES[name]} NAME=VALUE`", named(name))


def table(heading: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table below its heading."""
    yield from ("", f"### {heading}", "", "| Name | Default | Meaning |", "|---|---|---|")
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def options() -> Iterator[tuple[str, Row]]:
    """Yield the heading and the row of each option of serve that is a setting of its own."""
    command: Any = typer.main.get_command(app)
    for one in command.commands["serve"].params:
        if one.name not in ("config", "help", *TABLES.values()):
            panel = getattr(one, "rich_help_panel", None) or "The bundle"
            yield panel, (f"`{one.name}`", shown(one.default), one.help or "")


def named(table: str) -> Iterator[Row]:
    """Yield a row per name of a table."""
    for one in named_of(ServeOptions(), table):
        meaning = one.help or attributes(one.kind)[one.field]
        yield f"`{one.name}`", shown(one.value), meaning[:1].upper() + meaning[1:]


def shown(value: object) -> str:
    """Return a default as the file has it; nothing where there is none."""
    if value is None:
        return ""
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def attributes(kind: type) -> dict[str, str]:
    """Return the meanings of a class's fields by name, as its docstring has them."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in found}


if __name__ == "__main__":
    main()
