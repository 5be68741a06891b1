"""From the bytes of a request's body to JSON values: bounded before anything parses them, and strict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, NoReturn

from outrider.runtime.core.errors import MalformedRequest, RequestError
from outrider.runtime.serving.http.errors import BodyTooLarge, SlowBody
from starlette.requests import Request

PATIENCE_S = 30.0
"""For a body to arrive."""
INLINE_BODY = 4096
"""Bytes up to which the library's C code parses a body. It keeps the interpreter, for 700 ms of 4 MiB of lists."""
MOST_CONTAINERS = 1 << 16
"""Arrays and objects of a body: garbage collection looks at all of them, and keeps the interpreter meanwhile."""


async def read_body(request: Request, most: int) -> bytes:
    """Return a request's body of at most ``most`` bytes, chunked or not.

    Raises:
        BodyTooLarge: it is longer; what its headers say is believed first.
        SlowBody: it takes too long.
        RequestError: it is compressed.
        ClientDisconnect: the client went away.
    """
    if any(one != "identity" for one in request.headers.getlist("content-encoding")):
        raise RequestError("content-encoding", "must be left out: bodies are read as they are")
    length = request.headers.get("content-length", "0")
    if len(length) > len(str(most)) or int(length) > most:
        raise BodyTooLarge(most)
    pieces, num_bytes = [], 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > most:
                    raise BodyTooLarge(most)
                pieces.append(piece)
    except TimeoutError as error:
        raise SlowBody(PATIENCE_S) from error
    return b"".join(pieces)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        MalformedRequest: it is no JSON, or no object; names are twice in an object, or a text is no Unicode.
    """
    try:
        text = body.decode("utf-8")
        found = _loads(text) if len(body) <= INLINE_BODY else _BoundedDecoder().decode(text)
        if "\\ud" in text or "\\uD" in text:
            _check_characters(found)
    except (ValueError, RecursionError) as error:
        raise MalformedRequest(f"the body is not well-formed JSON: {_rule(error)}") from error
    if not isinstance(found, dict):
        raise MalformedRequest("the body must be a JSON object")
    return found


class _BoundedDecoder(json.JSONDecoder):
    """The library's decoder in Python: other threads run meanwhile. Counts arrays and objects."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object, parse_constant=_no_number)
        self._num_containers = 0
        self.parse_object = self._counted(decoder.JSONObject)  # type: ignore[attr-defined]
        self.parse_array = self._counted(decoder.JSONArray)  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._num_containers += 1
            if self._num_containers > MOST_CONTAINERS:
                raise _BrokenRuleError(f"it must hold at most {MOST_CONTAINERS} arrays and objects")
            return parse(*arguments)

        return counted


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)


def _check_characters(value: Any) -> None:
    """Refuse half characters, which may be written by their numbers.

    Raises:
        UnicodeEncodeError: a text has one.
    """
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, (list, dict)):
        for one in value:
            _check_characters(one)
            if isinstance(value, dict):
                _check_characters(value[one])


class _BrokenRuleError(ValueError):
    """JSON that Python would take, with a rule of ours."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _BrokenRuleError("an object must have each name once")
    return found


def _no_number(name: str) -> NoReturn:
    raise _BrokenRuleError("numbers must be finite")


def _rule(error: Exception) -> str:
    """Return what is wrong, without a word of the body."""
    if isinstance(error, _BrokenRuleError):
        return str(error)
    if isinstance(error, UnicodeError):
        return "it must be UTF-8, of whole characters"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}"
    return "it must be less deep, and its numbers shorter"
