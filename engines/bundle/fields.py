"""JSON files of a bundle, read by ``msgspec`` into the dataclasses that declare them."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from outrider.engines.base import BundleError

Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=0)]
# Errors and log lines repeat texts; a path has no more.
Text = Annotated[str, msgspec.Meta(max_length=4096)]
# Of JSON values that nobody reads here; certificates have a handful of levels.
_MOST_LEVELS = 32
T = TypeVar("T")


def read_json(text: str | bytes, kind: type[T], *, where: str) -> T:
    """Return a JSON text as a value of a type, whose annotations are the rules; other fields are left out.

    Args:
        text: of the file.
        kind: of the value.
        where: how errors call the file.

    Raises:
        BundleError: not JSON, or a field is missing or breaks its rule; names both.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        place = place.strip(".`")
        # Behind a quote stands the value that is none of an enumeration's.
        rule = rule.partition(" '")[0]
        raise BundleError(f"{where}: {f'field {place!r}: ' if place else ''}{rule}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BundleError(f"{where}: not JSON: {error}") from error


def check_levels(value: object, name: str, *, where: str, levels: int = _MOST_LEVELS) -> None:
    """Refuse a JSON value that is nested too deep to be written again wherever it is wanted.

    Raises:
        BundleError: naming the file and the field.
    """
    if isinstance(value, (dict, list)):
        if not levels:
            raise BundleError(f"{where}: field {name!r} must have at most {_MOST_LEVELS} levels")
        for one in value.values() if isinstance(value, dict) else value:
            check_levels(one, name, where=where, levels=levels - 1)
