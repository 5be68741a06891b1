"""Bounds of a field's values: ranges, texts, token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.rules import (
    check_count,
    check_ids,
    check_range,
    check_text,
    check_texts,
)
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat.formats import NO_FORMAT, AnswerFormat


class RequestRules(NamedTuple):
    """What the requests of one server are checked against; ``answers`` is the format of a chat's answers."""

    limits: RequestLimits
    model: ServedModel
    answers: AnswerFormat = NO_FORMAT


Limit: TypeAlias = float | Callable[[RequestRules], float]
"""A number, or what makes it of a server's limits and model."""


class Bound(Protocol):
    """The values that a field may have."""

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse a value out of bounds.

        Raises:
            RequestError: names ``path``.
        """
        ...


def _limit(limit: Limit, rules: RequestRules) -> float:
    return limit(rules) if callable(limit) else limit


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers in [low, high]; NaN is in no range.

    Attributes:
        allows_zero: whether 0 is allowed too.
        is_open: whether ``low`` itself is refused.
        rule: what a refusal says, with places for ``low`` and ``high``; None for the range.
    """

    low: Limit
    high: Limit
    allows_zero: bool = False
    is_open: bool = False
    rule: str | None = None

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse a number out of range."""
        low, high = _limit(self.low, rules), _limit(self.high, rules)
        is_within = low <= value <= high and not (self.is_open and value == low)
        if not is_within and not (self.allows_zero and value == 0):
            zero, bracket = "0 or " if self.allows_zero else "", "(" if self.is_open else "["
            rule = self.rule or f"must be {zero}in {bracket}{{low}}, {{high}}]"
            raise RequestError(path, rule.format(low=low, high=high))


@dataclass(frozen=True, slots=True)
class Pattern:
    """Texts that an expression matches as a whole.

    Attributes:
        expression: of the text.
        rule: text of a refusal.
    """

    expression: re.Pattern[str]
    rule: str

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse a text that the expression does not match."""
        if not self.expression.fullmatch(value):
            raise RequestError(path, self.rule)


@dataclass(frozen=True, slots=True)
class Text:
    """A text of at most so many bytes of UTF-8."""

    max_bytes: Callable[[RequestRules], int]

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse a text that is too long."""
        check_text(path, value, self.max_bytes(rules))


@dataclass(frozen=True, slots=True)
class Entries:
    """So many entries at most, whatever they are."""

    most: Callable[[RequestRules], int]

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse too many entries."""
        check_count(path, value, self.most(rules))


@dataclass(frozen=True, slots=True)
class Texts(Entries):
    """Texts, none of them empty, each of at most so many bytes of UTF-8."""

    max_bytes: Callable[[RequestRules], int]

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse too many texts, an empty one, or one that is too long."""
        check_texts(path, value, self.most(rules), self.max_bytes(rules))


@dataclass(frozen=True, slots=True)
class Ids(Entries):
    """Token ids of the target."""

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse too many ids, and those outside of the vocabulary."""
        check_count(path, value, self.most(rules))
        check_ids(path, value, rules.model.vocab_size)


@dataclass(frozen=True, slots=True)
class Biases(Entries):
    """Numbers in [-most_bias, most_bias] by token id."""

    most_bias: float

    def check(self, path: str, value: Any, rules: RequestRules) -> None:
        """Refuse too many ids, those outside of the vocabulary, and numbers out of range."""
        check_count(path, value, self.most(rules))
        check_ids(path, [*value], rules.model.vocab_size)
        for bias in value.values():
            check_range(path, bias, -self.most_bias, self.most_bias)
