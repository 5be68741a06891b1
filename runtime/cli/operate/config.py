"""``outrider config``: what ``outrider serve`` would be started with, and where each setting comes from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider.runtime.cli.refusals import refusals
from outrider.runtime.cli.serve.parameters import serve_options, with_settings
from outrider.runtime.cli.serve.settings import DEFAULT, PREFIX, TABLES, source_of, sources_of_pairs
from outrider.runtime.core.settings import named_of
from outrider.runtime.serving.settings import ServeOptions

HIDDEN = "(hidden)"
SECRET = re.compile("key|token|secret|passw|credential|authorization", re.IGNORECASE)
_USER = re.compile("//[^/]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting in force: ``table`` is empty for an option, and None stands for one that is not set."""

    table: str
    name: str
    value: object
    source: str

    @property
    def shown(self) -> object:
        """Return the value; of a text that may be a secret, by its name or a user in its address, only that it is."""
        texts = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        for text in texts:
            if isinstance(text, str) and (SECRET.search(self.name) or _USER.search(text)):
                return HIDDEN
        return self.value


@with_settings
def config(
    context: typer.Context,
    show: Annotated[
        bool,
        typer.Option(
            "--show", allow_from_autoenv=False, help="Print all settings with their sources."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", allow_from_autoenv=False, help="As JSON.")
    ] = False,
    **given: Any,
) -> None:
    """Check names, types and ranges of the settings of outrider serve without serving, and show them."""
    with refusals():
        _, options = serve_options(given | {"bundle": given["bundle"] or Path()})
    rows = _rows(context, given, options)
    if as_json:
        typer.echo(json.dumps(_tree(rows), indent=2, default=str))
    elif show:
        file = _toml(given["config"] or "no file")
        typer.echo(f"# {file}, {PREFIX}_ variables and the command line")
        for line in _lines(rows):
            typer.echo(line)


def _rows(context: typer.Context, given: Mapping[str, Any], options: ServeOptions) -> Iterator[Row]:
    for name, value in given.items():
        if name != "config" and name not in TABLES.values():
            yield Row(table="", name=name, value=value, source=source_of(context, name))
    for table, option in TABLES.items():
        values = {one.name: one.value for one in named_of(options, table)}
        # Names of this table are its library's.
        values |= options.config.provider_options if table == "provider_options" else ()
        sources = sources_of_pairs(context, option)
        for name, value in values.items():
            yield Row(table=table, name=name, value=value, source=sources.get(name, DEFAULT))


def _tree(rows: Iterable[Row]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for row in rows:
        place = tree.setdefault(row.table, {}) if row.table else tree
        # JSON has no infinity.
        value = str(row.shown) if row.value == math.inf else row.shown
        place[row.name] = {"value": value, "source": row.source}
    return tree


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield TOML that a server can be started with, but for what is hidden."""
    table = ""
    for row in rows:
        if row.table != table:
            table = row.table
            yield f"\n[{table}]"
        if row.value is None or row.shown is HIDDEN:
            yield f"# {row.name} {'is not set' if row.value is None else HIDDEN}  # {row.source}"
        else:
            yield f"{_key(row.name):<32} = {_toml(row.shown)}  # {row.source}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _toml(name)


def _toml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (str, Path)):
        # JSON's texts are TOML's, but for the one letter that JSON leaves as it is.
        text = json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        return text.encode("utf-8", "backslashreplace").decode()
    return str(value).lower()
