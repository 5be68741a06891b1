"""Settings of the drafters as a command line gives them: ``name=value``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ConfigError

Setting = bool | int | float | tuple[int, ...]

BOOLEANS = {"true": True, "false": False}


def setting_names() -> tuple[str, ...]:
    """Numbers and switches of ``DraftingConfig``; its texts have options of their own."""
    return tuple(one.name for one in fields(DraftingConfig) if not isinstance(one.default, str))


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Values by name; ranges are for ``DraftingConfig`` to check.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is of the wrong kind.
    """
    defaults = {one.name: one.default for one in fields(DraftingConfig)}
    found: dict[str, Setting] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in setting_names():
            raise ConfigError("drafting", f"names must be of {', '.join(setting_names())}")
        if name in found:
            raise ConfigError(name, "must be given once")
        found[name] = _value(name, value, defaults[name])
    return found


def _value(name: str, text: str, default: object) -> Setting:
    if isinstance(default, bool):
        if text not in BOOLEANS:
            raise ConfigError(name, "must be true or false")
        return BOOLEANS[text]
    if isinstance(default, tuple):
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError as error:
            raise ConfigError(name, "must be whole numbers with commas between them") from error
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(
            name, "must be a whole number" if kind is int else "must be a number"
        ) from error
