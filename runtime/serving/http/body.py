"""From the bytes of a request's body to JSON values: bounded before anything parses them, and strict."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from outrider.runtime.core.errors import MalformedRequest, RequestError
from outrider.runtime.serving.http.errors import BodyTooLarge, SlowBody
from starlette.requests import Request

PATIENCE_S = 30.0
"""For a body to arrive."""


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
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if "\\ud" in text.lower():
            # Half a character may be written by its number.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise MalformedRequest(f"the body is not well-formed JSON: {_rule(error)}") from error
    if not isinstance(found, dict):
        raise MalformedRequest("the body must be a JSON object")
    return found


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
