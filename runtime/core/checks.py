"""Rules that many fields share; each refusal names the field and the rule, never the value."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.runtime.core.errors import RequestError


def check_texts(name: str, texts: Collection[str], most: int, max_bytes: int) -> None:
    """Refuse too many texts, an empty one, or one of more than ``max_bytes`` bytes of UTF-8."""
    check_count(name, texts, most)
    for text in texts:
        if not 1 <= len(text.encode()) <= max_bytes:
            raise RequestError(name, f"each must be 1..{max_bytes} bytes of UTF-8")


def check_count(name: str, values: Collection[object], most: int) -> None:
    """Refuse more than ``most`` entries."""
    if len(values) > most:
        raise RequestError(name, f"must have at most {most} entries")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(name, f"token ids must be in [0, {vocab_size})")


def check_range(
    name: str, value: float, low: float, high: float, rule: str = "must be in {}"
) -> None:
    """Refuse a value outside [low, high]; NaN compares false with everything, so it is refused too."""
    if not low <= value <= high:
        raise RequestError(name, rule.format(f"[{low}, {high}]"))
