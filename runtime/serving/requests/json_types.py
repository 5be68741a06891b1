"""Types of JSON values: each function takes a field's name and a value, and returns the value as the wire takes it.

Bounds are checked later (``checks``); here a wrong type is refused, by the field and the rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.errors import RequestError
from outrider.v1 import inference_pb2 as wire

Kind = Callable[[str, Any], Any]


def read(values: Mapping[str, Any], kinds: Mapping[str, Kind], path: str = "") -> dict[str, Any]:
    """Return the fields of ``kinds`` that are given, null being as good as none.

    Raises:
        RequestError: one has another type.
    """
    return {
        name: kind(f"{path}{name}", values[name])
        for name, kind in kinds.items()
        if values.get(name) is not None
    }


def text(name: str, value: Any) -> str:
    """Take a string."""
    if not isinstance(value, str):
        raise RequestError(name, "must be a string")
    return value


def flag(name: str, value: Any) -> bool:
    """Take true or false."""
    if not isinstance(value, bool):
        raise RequestError(name, "must be true or false")
    return value


def count(name: str, value: Any) -> int:
    """Take a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, "must be a whole number")
    return value


def size(name: str, value: Any) -> int:
    """Take a whole number from 0 on; what is beyond 32 bits is the greatest of these, and beyond any bound."""
    if count(name, value) < 0:
        raise RequestError(name, "must be at least 0")
    return min(int(value), (1 << 32) - 1)


def number(name: str, value: Any) -> float:
    """Take a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(name, "must be a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise RequestError(name, "must be a finite number")
    return found


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Take an array of strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(name, "must be an array of strings")
    return tuple(value)


def text_or_texts(name: str, value: Any) -> tuple[str, ...]:
    """Take a string, or an array of strings."""
    return (value,) if isinstance(value, str) else texts(name, value)


def ids(name: str, value: Any) -> tuple[int, ...]:
    """Take an array of token ids."""
    if not is_ids(value):
        raise RequestError(name, "must be an array of token ids")
    return tuple(value)


def is_ids(value: Any) -> bool:
    """Return whether a value is an array of whole numbers."""
    return isinstance(value, list) and all(type(one) is int for one in value)


def biases(name: str, value: Any) -> dict[int, float]:
    """Take an object of token ids, as strings, and numbers."""
    rule = "must be an object of token ids and numbers"
    if not isinstance(value, dict) or not all(_is_id(one) for one in value):
        raise RequestError(name, rule)
    found = {int(one): number(name, bias) for one, bias in value.items()}
    if len(found) != len(value):
        raise RequestError(name, "must have each token id once")
    return found


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def mode(name: str, value: Any) -> int:
    """Take the name of an exactness mode, in either case."""
    lowered = text(name, value).lower()
    if lowered not in set(ExactnessMode):
        raise RequestError(name, f"must be one of {', '.join(ExactnessMode)}")
    return int(wire.ExactnessMode.Value(f"EXACTNESS_MODE_{lowered.upper()}"))


def text_or_object(name: str, value: Any) -> str:
    """Take a string, or an object as its JSON."""
    return json_text(name, value) if isinstance(value, dict) else text(name, value)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Take an object."""
    if not isinstance(value, dict):
        raise RequestError(name, "must be an object")
    return value


def json_text(name: str, value: object) -> str:
    """Return a value as JSON without white space.

    Raises:
        RequestError: it is too deep.
    """
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError(name, "must be less deep") from error
