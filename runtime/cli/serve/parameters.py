"""Parameters of the commands that take the settings of ``outrider serve``, and the settings that these were given.

Nothing here knows a setting: all are fields of ``ServeOptions`` and of the classes in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer
from outrider.runtime.cli.serve.settings import CONFIG_FILE, PREFIX, merge_pairs
from outrider.runtime.core.drafting import parse_pairs, parse_settings, split_preset
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import LIMITS, Option, Panel, build, named_of, options_of
from outrider.runtime.serving.settings import ServeOptions


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of serve behind its own; it gets their values as keyword arguments."""
    own = inspect.signature(command, eval_str=True)
    fixed = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*fixed, *_parameters()])  # type: ignore[attr-defined]
    return command


def serve_options(given: Mapping[str, Any]) -> tuple[Path, ServeOptions]:
    """Return the bundle and how to serve it, as the options of the command line say.

    Raises:
        ConfigError: an option is out of range.
        BundleError: a file of signers' keys cannot be used.
    """
    if (bundle := given["bundle"]) is None:
        raise ConfigError("bundle", f"must be given, or {PREFIX}_BUNDLE, or bundle in --config")
    defaults = {one.name: one.value for one in named_of(ServeOptions(), LIMITS)}
    tables = {
        LIMITS: parse_pairs("limit", given["limit"] or (), defaults),
        "drafting": parse_settings(given["drafting"] or ()),
    }
    return bundle, build(ServeOptions, _with_preset(given), tables)


def _with_preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with those of the drafters' preset where none were given."""
    preset, _ = split_preset(given["drafting"] or ())
    left = {name: one for name, one in preset.options.items() if given[name] is None}
    return {**given, **left}


@cache
def _parameters() -> tuple[inspect.Parameter, ...]:
    """Return a parameter per option, in the order of their panels; several commands have them."""
    variable, panels = f"{PREFIX}_BUNDLE", [*Panel]
    bundle = typer.Argument(None, help="Bundle to serve.", envvar=variable, show_envvar=False)
    options = sorted(options_of(ServeOptions), key=lambda one: panels.index(one[1].panel))
    kinds = {name: list[str] | None if one.table else one.kind for name, one in options}
    return (
        _parameter("bundle", Path | None, bundle),
        _parameter("config", Path | None, CONFIG_FILE),
        *(_parameter(name, kinds[name], _typer_option(one)) for name, one in options),
    )


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, place, default=default, annotation=kind)


def _typer_option(option: Option) -> Any:
    least, most = option.bounds or (None, None)
    return typer.Option(
        option.default,
        *option.flags,
        help=option.help,
        min=least,
        max=most,
        callback=merge_pairs if option.table else None,
        rich_help_panel=option.panel,
        # In short in the page instead.
        show_envvar=False,
    )
