"""Answers of HTTP: whole ones, errors, and events of streams."""

from __future__ import annotations

import json
from collections.abc import Sequence

from outrider.runtime.core.errors import ServingError
from outrider.runtime.serving.http.errors import body_of, headers_of, status_of
from starlette.types import Send

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
Headers = Sequence[tuple[bytes, bytes]]


async def answer(body: bytes, send: Send, status: int = 200, headers: Headers = (JSON,)) -> None:
    """Send a whole answer."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def answer_json(value: object, send: Send) -> None:
    """Send a value as JSON."""
    await answer(json_bytes(value), send)


async def answer_error(error: ServingError, send: Send, headers: Headers = ()) -> None:
    """Send an error as the whole answer."""
    await answer(body_of(error), send, status_of(error), [*headers_of(error), *headers])


def json_bytes(value: object) -> bytes:
    """Return a value as JSON in UTF-8, without white space."""
    return json_text(value).encode()


def json_pieces(value: object) -> bytes:
    """Return a value as ``json_bytes`` does, in Python: other threads run meanwhile."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    return "".join(encoder.iterencode(value)).encode()


def json_text(value: object) -> str:
    """Return a value as JSON without white space."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
