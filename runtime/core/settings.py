"""Settings: fields of frozen dataclasses that hold what is known of a setting beside its name and type.

A setting is written once, as a field. Options, environment variables, names in the TOML file, ``outrider config`` and
docs/configuration.md are made from the fields of ``runtime.serving.settings.ServeOptions`` and of the dataclasses in
it. There are four kinds:

* ``setting`` has an option of the command line for the same value.
* ``converted`` is computed from options of another shape.
* ``limit`` is a name of the table ``limits``; all names of a table share an option, which takes NAME=VALUE.
* ``part`` is a dataclass of settings. Its fields without metadata are names of the part's table.

This module knows neither the command line's library nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from outrider.runtime.core.errors import ConfigError

T = TypeVar("T")
Given = Mapping[str, Any]
"""Values of all options by name."""
Tables = Mapping[str, Mapping[str, Any]]
"""Values by table and name; a name that is left out has its default."""
LIMITS = "limits"
"""The table of limits."""
_KEY = "setting"
_LIST = tuple[str, ...]


class Panel(StrEnum):
    """Headings of options, in the order of the help and of the page of settings."""

    BUNDLE = "The bundle"
    ADDRESSES = "Addresses"
    PROTOCOLS = "Protocols beside outrider.v1"
    SECURITY = "Who is let in"
    LIMITS = "Limits and waits"
    ENGINES = "Engines"
    DRAFTING = "Drafting and caches"
    OBSERVABILITY = "Logs, metrics and traces"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``outrider serve``.

    Attributes:
        panel: its heading.
        help: what it does, in a sentence.
        kind: type of its value; None for the field's.
        default: where it is given nowhere.
        flags: how it is spelled; empty for the usual spelling of its name.
        bounds: least and largest number that the command line takes.
        table: that holds its NAME=VALUE in a file; empty for an option of another kind.
    """

    panel: Panel
    help: str
    kind: Any = None
    default: Any = None
    flags: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    table: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a field of a class of settings knows; a field that is no setting knows nothing.

    Attributes:
        options: its options by name; the empty name stands for the field's.
        make: computes its value from all options; None takes that of its only option.
        bounds: least and largest value of a number.
        part: the class of settings that the field holds, if it does.
        table: that the field is a name of; of a part, that those of its fields are which know nothing.
        prefix: of a part, before the names in the table.
        help: of a name of a table.
    """

    options: Mapping[str, Option] = field(default_factory=dict)
    make: Callable[[Given], Any] | None = None
    bounds: tuple[float, float] | None = None
    part: type | None = None
    table: str = ""
    prefix: str = ""
    help: str = ""


_NOTHING = Setting()


@dataclass(frozen=True, slots=True)
class Named:
    """A name of a table: its value, and the class and the field that hold it."""

    name: str
    value: Any
    kind: type
    field: str
    help: str


def setting(
    default: T,
    panel: Panel,
    help: str,
    *,
    option: str = "",
    offered: Any = ...,
    flags: tuple[str, ...] = (),
    bounds: tuple[float, float] | None = None,
) -> T:
    """Return a field with an option for the same value.

    Members of an enumeration are given by their value, tuples of texts with commas between them.

    Args:
        default: of the field.
        panel: heading of the option.
        help: what it does, in a sentence.
        option: its name, where that is not the field's.
        offered: its default, where that is not the field's; an option of None leaves the field's.
        flags: how it is spelled, if unusually.
        bounds: least and largest value of a number.
    """
    text = ",".join(default) if isinstance(default, tuple) else default
    shown = str(text) if isinstance(text, StrEnum) else text
    known = Option(panel, help, default=shown if offered is ... else offered, flags=flags)
    return _field(default, Setting(options={option: known}, bounds=bounds))


def converted(
    default: T,
    make: Callable[[Given], T],
    bounds: tuple[float, float] | None = None,
    **options: Option,
) -> T:
    """Return a field whose value ``make`` computes from options: those named here, and those of other fields.

    A value of None leaves the field's default.
    """
    return _field(default, Setting(options=options, make=make, bounds=bounds))


def limit(default: T, help: str, bounds: tuple[float, float]) -> T:
    """Return a field that is a name of the table of limits."""
    return _field(default, Setting(bounds=bounds, table=LIMITS, help=help))


def part(kind: type[T], table: str = "", prefix: str = "", **options: Option) -> T:
    """Return a field that holds a class of settings; ``options`` has the table's, if this part is to bring it."""
    known = Setting(options=options, part=kind, table=table, prefix=prefix)
    return field(default_factory=kind, metadata={_KEY: known})


def _field(default: T, known: Setting) -> T:
    return field(default=default, metadata={_KEY: known})


def known_of(kind: Any, within: Setting = _NOTHING) -> Iterator[tuple[str, Setting]]:
    """Yield the fields of a class of settings, and what each knows; ``within`` is the part that it is."""
    for one in fields(kind):
        yield one.name, one.metadata.get(_KEY) or Setting(table=within.table)


def options_of(kind: type) -> Iterator[tuple[str, Option]]:
    """Yield names and options of a class of settings and of its parts, with the types of their values."""
    hints = get_type_hints(kind)
    for name, known in known_of(kind):
        hint = str if _is_text(hints[name]) else hints[name]
        for option, one in known.options.items():
            yield option or name, replace(one, kind=one.kind or hint)
        if known.part is not None:
            yield from options_of(known.part)


def named_of(settings: Any, table: str, within: Setting = _NOTHING) -> Iterator[Named]:
    """Yield the names of a table with their values in ``settings``, the instance of a class of settings."""
    for name, known in known_of(settings, within):
        value = getattr(settings, name)
        if known.part is not None:
            yield from named_of(value, table, known)
        elif known.table == table:
            yield Named(within.prefix + name, value, type(settings), name, known.help)


def build(kind: type[T], given: Given, tables: Tables, within: Setting = _NOTHING) -> T:
    """Return an instance of a class of settings from what options and tables were given.

    Raises:
        ConfigError: a value is out of range; names the setting.
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, known in known_of(kind, within):
        if known.part is not None:
            values[name] = build(known.part, given, tables, known)
        elif known.table:
            values[name] = tables.get(known.table, {}).get(within.prefix + name)
        elif known != _NOTHING:
            values[name] = _value(known, name, hints[name], given)
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ConfigError as error:
        raise ConfigError(within.prefix + error.key, error.rule) from error


def _value(known: Setting, name: str, hint: Any, given: Given) -> Any:
    """Return the value of a field that its options give; None for its default."""
    if known.make is not None:
        return known.make(given)
    (option,) = (one or name for one in known.options)
    text = given[option]
    if text is None or not _is_text(hint):
        return text
    if hint == _LIST:
        return tuple(text.split(","))
    if text not in set(hint):
        raise ConfigError(option, f"must be one of {', '.join(hint)}")
    return hint(text)


def _is_text(hint: Any) -> bool:
    """Whether options of a type take texts for its values."""
    return hint == _LIST or (isinstance(hint, type) and issubclass(hint, StrEnum))


def check_bounds(settings: Any) -> None:
    """Refuse numbers outside their settings' bounds; None is within all.

    Raises:
        ConfigError: names the setting and the bound.
    """
    for name, known in known_of(settings):
        value = getattr(settings, name)
        if known.bounds is None or value is None:
            continue
        least, most = known.bounds
        # No number is not at least anything.
        if not value >= least:
            unit = " seconds" if name.endswith("_s") else ""
            raise ConfigError(name, f"must be at least {least:.0f}{unit}")
        if value > most:
            raise ConfigError(name, f"must be at most {most:.0f}")
