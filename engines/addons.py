"""How the core finds add-ons: as entry points of installed distributions, by group and name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from outrider.engines.base import SpeculativeError

_OWN = "outrider"


class NotInstalledError(SpeculativeError):
    """No distribution has an add-on that was asked for.

    Attributes:
        rule: why, without the add-on's name.
    """

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"{name}: {rule}")
        self.rule = rule


def load_addon(group: str, name: str) -> Any:
    """Return what an add-on registers under a name, a module or an object of one.

    Raises:
        NotInstalledError: nobody registers it, several do, or its own module is missing.
        ModuleNotFoundError: a library of it is missing.
    """
    found = entry_points(group=group, name=name)
    if not found:
        raise NotInstalledError(name, f"is not installed: no distribution has it in {group}")
    if len(found) > 1:
        rule = f"must be one distribution's: {len(found)} have it in {group}"
        raise NotInstalledError(name, rule)
    (entry,) = found
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _OWN:
            raise
        raise NotInstalledError(name, f"is not installed: {error}") from error
