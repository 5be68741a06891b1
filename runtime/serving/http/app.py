"""The application behind the gate: its routes, and what each answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from outrider.runtime.core import errors
from outrider.runtime.serving.http.body import parse_object, read_body
from outrider.runtime.serving.http.callers import caller_of
from outrider.runtime.serving.http.openai.completions import Completions
from outrider.runtime.serving.http.openai.tokens import detokenize, tokenize, tokenizer_info
from outrider.runtime.serving.http.pages import Page
from outrider.runtime.serving.http.responses import (
    answer,
    answer_error,
    answer_json,
)
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.v1.responses import failure_of
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

_Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def router(
    readiness: ServerState, *, max_bytes: int, started_s: float, pages: Mapping[str, Page]
) -> Router:
    """Return the routes; the gate before them knows every path and method.

    Args:
        readiness: takes requests.
        max_bytes: of a body.
        started_s: when the server was started, seconds since 1970.
        pages: files by path.
    """

    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_json(_models(readiness, int(started_s)), send)

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        if readiness.is_serving:
            await answer(b"", send, headers=())
            return
        if readiness.is_open:
            readiness.handler.check_open()
            raise errors.Draining if readiness.serving.worker.is_ready else errors.EngineRestart
        raise errors.NotReady(readiness.stage)

    async def live(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(b"", send, headers=())

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        kind = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())
        await answer(generate_latest(readiness.accounting.metrics.registry), send, headers=(kind,))

    async def info(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_json(tokenizer_info(readiness), send)

    gets: dict[str, _Application] = {
        "/v1/models": models,
        "/health": health,
        "/live": live,
        "/metrics": metrics,
        "/tokenizer_info": info,
        **{path: page.send for path, page in pages.items()},
    }
    posts: dict[str, _Application] = {
        "/v1/completions": Completions(readiness, max_bytes, is_chat=False),
        "/v1/chat/completions": Completions(readiness, max_bytes, is_chat=True),
        "/tokenize": _Asked(readiness, max_bytes, tokenize),
        "/detokenize": _Asked(readiness, max_bytes, detokenize),
    }
    routes = [Route(path, _Answered(get), methods=["GET"]) for path, get in gets.items()]
    routes += [Route(path, _Answered(post), methods=["POST"]) for path, post in posts.items()]
    return Router(routes, redirect_slashes=False)


class _Answered:
    """An application whose errors are answered by the table."""

    def __init__(self, app: _Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
            return
        except ClientDisconnect:
            return
        except Exception as error:
            failure = failure_of(scope["path"], error)
        await answer_error(failure, send)


class _Asked:
    """A route that answers a JSON object with another."""

    def __init__(
        self,
        readiness: ServerState,
        max_bytes: int,
        ask: Callable[[Mapping[str, Any], ServerState, ClientIdentity], Awaitable[dict[str, Any]]],
    ) -> None:
        self._readiness = readiness
        self._max_bytes = max_bytes
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readiness.handler  # noqa: B018 - refuses before a body is read
        request = Request(scope, receive)
        body = await read_body(request, self._max_bytes)
        values = parse_object(body)
        await answer_json(await self._ask(values, self._readiness, caller_of(scope)), send)


def _models(readiness: ServerState, created_s: int) -> dict[str, Any]:
    model = readiness.serving.model
    found = {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "outrider",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_context,
        "permission": [],
    }
    return {"object": "list", "data": [found]}
