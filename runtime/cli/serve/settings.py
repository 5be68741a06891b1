"""Settings of ``outrider serve`` from a TOML file and from the environment.

The command line wins, then ``OUTRIDER_SERVE_`` variables, then the file, then defaults. The file's values are texts to
Typer, as those of the environment are, so an option is checked alike wherever it is set. A table holds what an option
takes as NAME=VALUE; of such an option each name is a setting of its own.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from outrider.runtime.cli.refusals import refusals
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import options_of
from outrider.runtime.serving.settings import ServeOptions

PREFIX = "OUTRIDER_SERVE"
CONTEXT = {"auto_envvar_prefix": PREFIX}
"""Of every command that takes the options of serve."""
FILE_VARIABLE = "OUTRIDER_CONFIG"
TABLES = {one.table: name for name, one in options_of(ServeOptions) if one.table}
"""Tables of the file, and the options whose NAME=VALUE they hold."""
COMMAND_LINE, ENVIRONMENT, FILE, DEFAULT = "command line", "environment", "file", "default"


def read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's settings the defaults of a command, and refuse variables that are none of its settings."""
    # Of each setting, whether it is a list. The file itself, help, and what shows the settings are none.
    settings = {
        one.name: one.param_type_name == "option" and bool(one.multiple)
        for one in context.command.params
        if getattr(one, "allow_from_autoenv", one.param_type_name == "argument")
    }
    with refusals():
        _check_variables(settings)
        if path is not None:
            context.default_map = _from_file(path, settings)
    return path


CONFIG_FILE = typer.Option(
    None,
    "--config",
    envvar=FILE_VARIABLE,
    show_envvar=False,
    allow_from_autoenv=False,
    is_eager=True,
    callback=read_settings,
    help="TOML file of options, with underscores; flags and OUTRIDER_SERVE_ variables win.",
)


def merge_pairs(
    context: typer.Context, parameter: typer.CallbackParam, given: list[str] | None
) -> list[str] | None:
    """Return what an option of NAME=VALUE was given in all places, each name from the strongest of them."""
    option = parameter.name or ""
    is_on_command_line = source_of(context, option) == COMMAND_LINE
    places = {
        FILE: (context.default_map or {}).get(option, []),
        ENVIRONMENT: os.environ.get(f"{PREFIX}_{option.upper()}", "").split(),
        COMMAND_LINE: (given or []) if is_on_command_line else [],
    }
    texts: dict[str, list[str]] = {}
    sources: dict[str, str] = context.meta.setdefault(_meta(option), {})
    for place, all_texts in places.items():
        # A name that one place has twice stays so, and is refused.
        found = {name: [*group] for name, group in groupby(sorted(all_texts, key=_name), _name)}
        texts |= found
        sources |= dict.fromkeys(found, place)
    return [text for group in texts.values() for text in group] or None


def sources_of_pairs(context: typer.Context, option: str) -> Mapping[str, str]:
    """Return the place that each NAME of an option comes from."""
    sources: dict[str, str] = context.meta.get(_meta(option), {})
    return sources


def source_of(context: typer.Context, name: str) -> str:
    """Return the place that an option's value comes from."""
    source = context.get_parameter_source(name)
    names = {"COMMANDLINE": COMMAND_LINE, "ENVIRONMENT": ENVIRONMENT, "DEFAULT_MAP": FILE}
    return names.get("" if source is None else source.name, DEFAULT)


def _meta(option: str) -> str:
    return f"{__name__}.{option}"


def _name(text: str) -> str:
    return text.partition("=")[0]


def _check_variables(names: Iterable[str]) -> None:
    known = [f"{PREFIX}_{name.upper()}" for name in names]
    if (name := f"{PREFIX}_CONFIG") in os.environ:
        raise ConfigError(
            "environment", f"has the unknown name {name!r}; did you mean {FILE_VARIABLE!r}?"
        )
    for name in sorted(os.environ):
        if name.startswith(f"{PREFIX}_") and name not in known:
            raise ConfigError.unknown("environment", name, known)


def _from_file(path: Path, settings: Mapping[str, bool]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except (ValueError, RecursionError) as error:
        # The place, not the line itself.
        reason = error if isinstance(error, tomllib.TOMLDecodeError) else "it cannot be read"
        raise ConfigError(str(path), f"must be TOML: {reason}") from None
    known = [*(name for name in settings if name not in TABLES.values()), *TABLES]
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise ConfigError.unknown(str(path), name, known)
        if name in TABLES:
            found[TABLES[name]] = _pairs(name, value)
        elif settings[name]:
            if not isinstance(value, list):
                raise ConfigError(name, "must be a list")
            found[name] = [_text(name, one) for one in value]
        else:
            found[name] = _text(name, value)
    return found


def _pairs(table: str, value: object) -> list[str]:
    if not isinstance(value, Mapping):
        raise ConfigError(table, f"must be a table: [{table}]")
    return [f"{name}={_texts(f'{table}.{name}', one)}" for name, one in value.items()]


def _texts(name: str, value: object) -> str:
    if isinstance(value, list):
        return ",".join(_text(name, one) for one in value)
    return _text(name, value)


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(name, "must be a text, a number, true or false")
