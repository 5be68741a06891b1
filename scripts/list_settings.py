"""Writes the tables of docs/configuration.md: every setting of ``outrider serve``, its default and its meaning.

    python -m scripts.list_settings

The options are asked of the command line, the limits and the drafters' settings of the classes that hold them.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from outrider.runtime.cli.main import app
from outrider.runtime.cli.serve.limits import BREAKER, limit_values
from outrider.runtime.cli.serve.settings import TABLES
from outrider.runtime.core.breaker import BreakerConfig
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig, setting_names

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
    meanings = attributes(ServerConfig) | attributes(RequestLimits)
    meanings |= {f"{BREAKER}{name}": text for name, text in attributes(BreakerConfig).items()}
    limits = limit_values(ServerConfig(), RequestLimits())
    yield from table("`[limits]`, or `--limit NAME=VALUE`", named(limits, meanings))
    drafting = {name: getattr(DraftingConfig(), name) for name in setting_names()}
    meanings = attributes(DraftingConfig)
    yield from table("`[drafting]`, or `--drafting NAME=VALUE`", named(drafting, meanings))


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


def named(values: Mapping[str, object], meanings: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row per value."""
    for name, value in values.items():
        yield f"`{name}`", shown(value), meanings[name]


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
