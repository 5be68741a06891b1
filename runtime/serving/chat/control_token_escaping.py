"""Escaping of control tokens in the texts of a conversation: what people write never becomes a control token.

Where such a text spells a control token, the token gets a mark on each side, and is tokenised as text. Where only a
part of one stands at an end of a text, that end gets a mark: a template may write the rest beside it. A template may
also cut a text between marks, or write it with escapes (``tojson(ensure_ascii=true)``, or Python's notation of a list).
So control tokens of what it renders are text too where a mark is inside, or one of the two is left at a side.

Marks are lone surrogates, which no text of a request has. A single word gets none at its ends: templates compare words
("image"), and make tokens of some ("<|" + role + "|>").
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any, TypeVar

# Low surrogates: no two of them, and none behind a character, are a character.
MARK_START, MARK_EDGE, MARK_END = "\udeb1", "\udeb2", "\udeb3"
_ONE = re.compile(f"([{MARK_START}{MARK_EDGE}{MARK_END}])")
# As they are written with escapes, but not as the second half of a character.
_ESCAPED = re.compile(r"(?<!\\ud[89ab][0-9a-f]{2})\\ude(b[123])")
# What a text has that looks like an escape of a surrogate.
_LIKE_ESCAPED = re.compile(r"\\(?=ud)")
_WORD = re.compile(r"[\w.-]*")

T = TypeVar("T")


class ControlTokenEscaping:
    """Puts marks around some control tokens; callable from any thread."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._control = control_pattern(tokens)
        self._marked = re.compile(f"{MARK_START}({self._control.pattern}){MARK_END}")
        self._prefixes = {one[:i] for one in tokens for i in range(1, len(one))}
        self._suffixes = {one[i:] for one in tokens for i in range(1, len(one))}
        self._sorted_suffixes = sorted(self._suffixes)
        self._longest = max(map(len, tokens), default=0)

    def mark(self, value: T) -> T:
        """Return a JSON value with marks in its texts, those of names too."""
        found: T = _map_texts(value, self._mark)
        return found

    def split(self, rendered: str) -> list[str]:
        """Return the pieces of a rendered text without marks: text, token that is text, text, token, ..., text."""
        pieces = [""]
        for number, part in enumerate(self._marked.split(_unescaped(rendered))):
            if number % 2:
                pieces += [part, ""]
            else:
                first, *others = self._unmarked(part)
                pieces[-1] = first
                pieces += others
        return pieces

    def _mark(self, text: str) -> str:
        # With a text in the function's place every call hashes the whole pattern.
        inner = self._control.sub(_between_marks, _guard(text))
        if _WORD.fullmatch(text):
            return inner
        front, back = self._has_edges(text)
        return f"{MARK_EDGE * front}{inner}{MARK_EDGE * back}"

    def _has_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether a token may go on in front of a text, and behind it.

        White space at an end gets no mark: templates trim it.
        """
        lengths = range(1, min(len(text) + 1, self._longest))
        at = bisect_left(self._sorted_suffixes, text)
        is_part = any(one.startswith(text) for one in self._sorted_suffixes[at : at + 1])
        front = is_part or any(text[:length] in self._suffixes for length in lengths)
        back = any(text[-length:] in self._prefixes for length in lengths)
        return front and not text[0].isspace(), back and not text[-1].isspace()

    def _unmarked(self, text: str) -> list[str]:
        """Return the pieces of a text without marks on both sides of a token, as ``split`` does."""
        parts = _ONE.split(text)
        if len(parts) == 1:
            return [text]
        whole = "".join(parts[::2])
        places, at = [], 0
        for part in parts[:-1:2]:
            at += len(part)
            places.append(at)
        marks = [*zip(places, parts[1::2], strict=True)]
        starts = {place for place, mark in marks if mark == MARK_START}
        ends = {place for place, mark in marks if mark == MARK_END}
        pieces, done = [], 0
        for token in self._control.finditer(whole):
            start, end = token.span()
            is_parted = bisect_right(places, start) < bisect_left(places, end)
            if is_parted or start in starts or end in ends:
                pieces += [whole[done:start], token[0]]
                done = end
        return [*pieces, whole[done:]]


def guarded(value: T) -> T:
    """Return a JSON value in whose texts nothing looks like the escape of a mark; ``mark`` does that too."""
    found: T = _map_texts(value, _guard)
    return found


def control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return what finds the longest of these tokens at a place.

    Tokens that begin alike share their beginning: one alternative after the other would take seconds for a text of
    near matches, and a pattern holds the interpreter meanwhile.
    """
    words = sorted({one for one in tokens if one})
    return re.compile(_any_of(words) if words else "(?!)")


def _any_of(words: Sequence[str]) -> str:
    """Return a pattern of sorted words, of which an empty one stands first."""
    found = []
    for _, group in groupby(filter(None, words), key=lambda word: word[0]):
        alike = [*group]
        shared = commonprefix(alike)  # noqa: RUF071  (of letters indeed)
        rest = [word[len(shared) :] for word in alike]
        found.append(re.escape(shared) + (_any_of(rest) if len(rest) > 1 else ""))
    end = "?" if words[0] == "" else ""  # greedy: the longer ones first
    return f"(?:{'|'.join(found)}){end}"


def _between_marks(found: re.Match[str]) -> str:
    return f"{MARK_START}{found[0]}{MARK_END}"


def _guard(text: str) -> str:
    return _LIKE_ESCAPED.sub(rf"\\{MARK_EDGE}", text) if "\\ud" in text else text


def _unescaped(rendered: str) -> str:
    if "\\ud" not in rendered:
        return rendered
    return _ESCAPED.sub(lambda found: chr(0xDE00 + int(found[1], 16)), rendered)


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(name, change): _map_texts(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_map_texts(one, change) for one in value]
    return value
