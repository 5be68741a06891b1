"""Routes of OpenAI's protocol, and what each answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from outrider.runtime.core.errors import ModelNotFound
from outrider.runtime.serving.encoding import RequestEncoder
from outrider.runtime.serving.http.body import parse_object, read_body
from outrider.runtime.serving.http.callers import caller_of
from outrider.runtime.serving.http.openai.completions import CHAT, COMPLETION, RESPONSE, Completions
from outrider.runtime.serving.http.openai.tokens import detokenize, tokenize, tokenizer_info
from outrider.runtime.serving.http.operations import operations_routes
from outrider.runtime.serving.http.pages import Page
from outrider.runtime.serving.http.responses import answer, answer_json
from outrider.runtime.serving.http.routes import Application, HttpRoute
from outrider.runtime.serving.readiness import ServerState
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

_MODEL = "/v1/models/"


def api_routes(
    readiness: ServerState, *, max_bytes: int, started_s: float, pages: Mapping[str, Page]
) -> list[HttpRoute]:
    """Return the routes of OpenAI's protocol, of the tokenizer, and of the page that shows speculation.

    Args:
        readiness: takes requests.
        max_bytes: of a body.
        started_s: when the server was started, seconds since 1970.
        pages: files by path; they hold no data.
    """

    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_json(_models(readiness, int(started_s)), send)

    async def model(scope: Scope, receive: Receive, send: Send) -> None:
        found = _models(readiness, int(started_s))["data"][0]
        if scope["path"].removeprefix(_MODEL) != found["id"]:
            raise ModelNotFound
        await answer_json(found, send)

    async def info(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_json(tokenizer_info(readiness), send)

    posts: dict[str, Application] = {
        "/v1/completions": Completions(readiness, max_bytes, COMPLETION),
        "/v1/chat/completions": Completions(readiness, max_bytes, CHAT),
        "/v1/responses": Completions(readiness, max_bytes, RESPONSE),
        "/tokenize": _Asked(readiness, max_bytes, tokenize),
        "/detokenize": _Asked(readiness, max_bytes, detokenize),
    }
    return [
        *operations_routes(readiness, readiness.accounting.metrics.registry),
        HttpRoute(path="/v1/models", scope="info", app=models),
        HttpRoute(path=_MODEL, scope="info", app=model, has_name=True),
        HttpRoute(path="/tokenizer_info", scope="info", app=info),
        *(
            HttpRoute(method="POST", path=path, scope="generate", app=app)
            for path, app in posts.items()
        ),
        *(
            HttpRoute(path=path, scope="info", app=page.send, is_probe=True)
            for path, page in pages.items()
        ),
    ]


class _Asked:
    """A route that answers a JSON object with another."""

    def __init__(
        self,
        readiness: ServerState,
        max_bytes: int,
        ask: Callable[[Mapping[str, Any], ServerState, RequestEncoder], Awaitable[bytes]],
    ) -> None:
        self._readiness = readiness
        self._max_bytes = max_bytes
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler, caller = self._readiness.handler, caller_of(scope)
        encoder = handler.encoder_for(caller.method, caller)
        body = await read_body(Request(scope, receive), self._max_bytes)
        values = await encoder.beside(len(body), lambda: parse_object(body))
        await answer(await self._ask(values, self._readiness, encoder), send)


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
