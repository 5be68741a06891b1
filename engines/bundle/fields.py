"""Typed reading of JSON objects, with errors that name the file and the field."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from outrider.engines.base import BundleError

# Errors and log lines repeat texts; a path has no more.
MOST_LETTERS = 4096
# Of JSON values that nobody reads here; certificates have a handful of levels.
MOST_LEVELS = 32


class FieldReader:
    """Reads the fields of one JSON object.

    Args:
        data: what ``json.loads`` gave; anything but an object is refused.
        where: how errors call the object, for example "manifest.json: target".
    """

    def __init__(self, data: object, *, where: str) -> None:
        if not isinstance(data, dict):
            raise BundleError(f"{where}: must be a JSON object")
        self.values: dict[str, object] = data
        self._where = where

    def text(self, name: str) -> str:
        """A string field."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        if len(value) > MOST_LETTERS:
            raise self.wrong(name, f"a string of at most {MOST_LETTERS} letters")
        return value

    def count(
        self,
        name: str,
        *,
        at_least: int = 1,
        at_most: int | None = None,
        default: int | None = None,
    ) -> int:
        """An integer field within bounds, both included; ``default``, if given, where it is absent."""
        if default is not None and name not in self.values:
            return default
        value = self._as_count(name, self._get(name), at_least)
        if at_most is not None and value > at_most:
            raise self.wrong(name, f"an integer in {at_least}..{at_most}")
        return value

    def optional_count(self, name: str) -> int | None:
        """An integer field >= 0, or null."""
        value = self._get(name)
        return None if value is None else self._as_count(name, value, 0)

    def counts(self, name: str, *, at_most: int | None = None) -> tuple[int, ...]:
        """A list of integers >= 0, and ``at_most``."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self.wrong(name, "a list of integers")
        found = tuple(self._as_count(name, item, 0) for item in value)
        if at_most is not None and max(found, default=0) > at_most:
            raise self.wrong(name, f"integers in 0..{at_most}")
        return found

    def plain(self, name: str) -> dict[str, object]:
        """An object field of any values that are JSON again when they are written: finite, and not too deep."""
        values = self.section(name).values
        if not _is_plain(values, MOST_LEVELS):
            raise self.wrong(name, f"of finite numbers, at most {MOST_LEVELS} levels deep")
        return values

    def flag(self, name: str) -> bool:
        """A field that is true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def section(self, name: str) -> FieldReader:
        """An object field."""
        return FieldReader(self._get(name), where=f"{self._where}: {name}")

    def optional_section(self, name: str) -> FieldReader | None:
        """An object field, or null."""
        return None if self._get(name) is None else self.section(name)

    def sections(self) -> Iterator[tuple[str, FieldReader]]:
        """All fields, each of which must be an object."""
        for name in self.values:
            yield name, self.section(name)

    def items(self, name: str) -> list[FieldReader]:
        """A list of objects; empty where the field is absent."""
        values = self.values.get(name, [])
        if not isinstance(values, list):
            raise self.wrong(name, "a list")
        where = f"{self._where}: {name}"
        return [FieldReader(value, where=f"{where}[{i}]") for i, value in enumerate(values)]

    def texts(self) -> dict[str, str]:
        """All fields, each of which must be a string."""
        return {name: self.text(name) for name in self.values}

    def _get(self, name: str) -> object:
        if name not in self.values:
            raise BundleError(f"{self._where}: field {name!r} is missing")
        return self.values[name]

    def _as_count(self, name: str, value: object, at_least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.wrong(name, f"an integer >= {at_least}")
        return value

    def wrong(self, name: str, rule: str) -> BundleError:
        """The error of a field that breaks a rule."""
        return BundleError(f"{self._where}: field {name!r} must be {rule}")


def _is_plain(value: object, levels: int) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_plain(one, levels - 1) for one in inner)
    # Of integers, too: others are no floats.
    return not isinstance(value, (int, float)) or abs(value) <= sys.float_info.max
