"""Completions, chats and responses: from an HTTP request to its answer.

A request's prompts are requests of their own, answered together: where one fails, all end. A client that goes away
ends them, also while they are queued.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from outrider.runtime.core import errors
from outrider.runtime.core.checks.rules import REQUEST_ID, REQUEST_ID_RULE
from outrider.runtime.serving.http.body import parse_object, read_body
from outrider.runtime.serving.http.callers import caller_of, values_of
from outrider.runtime.serving.http.errors import with_names
from outrider.runtime.serving.http.openai.fields import CompletionRequest, completion_request
from outrider.runtime.serving.http.openai.prompt_request import PromptRequest, ResponseHeader, Sink
from outrider.runtime.serving.http.openai.responses.request import response_request
from outrider.runtime.serving.http.openai.responses.sink import ResponseSink
from outrider.runtime.serving.http.openai.stream import StreamSink
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.http.openai.whole import WholeSink
from outrider.runtime.serving.http.responses import answer_error
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.v1.responses import failure_of
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

PING_S = 15.0
"""Between two comments to a client whose request waits."""
TIMEOUT_HEADER = "x-request-timeout-ms"
_MOST_TIMEOUT_DIGITS = 9
# Prompts that begin in one turn of the event loop: each takes .2 ms before its own turn comes.
_PER_TURN = 16
# Characters of a request's id, as in ``REQUEST_ID``.
_MOST_ID = 128


class Shape(NamedTuple):
    """What is different between the routes.

    Attributes:
        prefix: of ids.
        read: a request from its JSON.
        whole: answers whole.
        stream: answers in events.
    """

    prefix: str
    read: Callable[[Mapping[str, Any], LoadedModel], CompletionRequest]
    whole: Callable[..., Sink] = WholeSink
    stream: Callable[..., Sink] = StreamSink


COMPLETION = Shape("cmpl-", partial(completion_request, is_chat=False))
CHAT = Shape("chatcmpl-", partial(completion_request, is_chat=True))
RESPONSE = Shape("resp_", response_request, ResponseSink, ResponseSink)


class Completions:
    """The ASGI application of one of the routes.

    Args:
        readiness: takes the requests.
        max_bytes: of a body.
        shape: of the route.
    """

    def __init__(self, readiness: ServerState, max_bytes: int, shape: Shape) -> None:
        self._readiness = readiness
        self._max_bytes = max_bytes
        self._shape = shape
        self._token_text: TokenText | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        caller = caller_of(scope)
        try:
            handler = self._readiness.handler
            handler.check_open()
            caller = _with_deadline(request, caller)
            # Of several prompts the first is the one that is counted here.
            accounting = self._readiness.accounting
            accounting.quotas.begin(caller.tenant, caller.rules, accounting.clock())
            asked = await self._asked(request, caller)
            sink = self._sink(asked, send)
        except ClientDisconnect:
            return
        except errors.ServingError as error:
            self._readiness.accounting.refused(caller.method, caller, error)
            await answer_error(error, send)
            return
        await self._answer(asked, caller, sink, request)

    async def _asked(self, request: Request, caller: ClientIdentity) -> CompletionRequest:
        """Return what a request asks for; its body, which may have megabytes, is not kept while it waits."""
        body, serving = await read_body(request, self._max_bytes), self._readiness.serving
        encoder = self._readiness.handler.encoder_of(caller.tenant)
        return await encoder.beside(
            len(body),
            lambda: self._shape.read(parse_object(body), serving),
        )

    def _sink(self, asked: CompletionRequest, send: Send) -> Sink:
        serving = self._readiness.serving
        name = _id_of(asked)
        if self._token_text is None:
            self._token_text = TokenText(serving.codec)
        header = ResponseHeader(
            id=f"{self._shape.prefix}{name}",
            created_s=int(time.time()),
            model=serving.model.name,
            token_text=self._token_text,
        )
        make = self._shape.stream if asked.streams else self._shape.whole
        headers = {b"x-request-id": name.encode()}
        if asked.ignored:
            headers[b"outrider-ignored"] = ", ".join(asked.ignored).encode()
        return make(asked, header, send, headers)

    async def _answer(
        self, asked: CompletionRequest, caller: ClientIdentity, sink: Sink, request: Request
    ) -> None:
        """Have the prompts answered, unless the client goes away, or does not read."""
        work = asyncio.create_task(self._work(asked, caller, sink))
        gone = asyncio.create_task(_gone(request.receive))
        try:
            while not work.done() and not gone.done():
                waited = {work, gone}
                done, _ = await asyncio.wait(
                    waited, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await sink.ping()
        finally:
            for task in (work, gone):
                task.cancel()
            ends = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(ends[0], errors.SlowConsumer):
            # Nothing more reaches him, and what was sent is not to wait for him.
            request.scope["state"]["abort"]()
        elif isinstance(ends[0], Exception):
            raise ends[0]

    async def _work(self, asked: CompletionRequest, caller: ClientIdentity, sink: Sink) -> None:
        """Answer the prompts to their end, or the first error of them.

        Raises:
            SlowConsumer: the client does not read.
        """
        try:
            await self._complete(asked, caller, sink)
            await sink.end()
            return
        except errors.SlowConsumer:
            raise
        except Exception as error:
            failure = failure_of(caller.method, error)
        if isinstance(failure, errors.RequestError):
            with_names(failure, asked.names)
        await sink.fail(failure)

    async def _complete(self, asked: CompletionRequest, caller: ClientIdentity, sink: Sink) -> None:
        handler = self._readiness.handler
        counted = replace(caller, is_counted=True)
        requests = [
            PromptRequest(i, asked, caller if i else counted, sink)
            for i in range(len(asked.requests))
        ]
        if len(requests) == 1:
            await handler.complete(requests[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index, one in enumerate(requests, start=1):
                    group.create_task(handler.complete(one))
                    if index % _PER_TURN == 0:
                        await asyncio.sleep(0)
        except BaseExceptionGroup as found:
            # Those that were ended for the first one's sake are not in it.
            raise found.exceptions[0] from None


def _id_of(asked: CompletionRequest) -> str:
    """Return the id of an answer: the caller's, or a new one.

    Raises:
        RequestError: the caller's is impossible, or too long with the places of several prompts behind it.
    """
    given, last = asked.request_id, asked.requests[-1].request_id
    if not given:
        return uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(given):
        raise errors.RequestError("request_id", REQUEST_ID_RULE)
    if len(last) > _MOST_ID:
        most = _MOST_ID - len(last) + len(given)
        rule = f"must be at most {most} characters: each of several prompts has its place behind it"
        raise errors.RequestError("request_id", rule)
    return given


async def _gone(receive: Receive) -> None:
    """Return once the client has gone away, or has been answered."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_deadline(request: Request, caller: ClientIdentity) -> ClientIdentity:
    """Return who asks, and until when he waits.

    Raises:
        RequestError: the header is not a number.
    """
    values = values_of(request.scope, TIMEOUT_HEADER)
    if not values:
        return caller
    value = values[0]
    is_number = value.isascii() and value.isdecimal() and len(value) <= _MOST_TIMEOUT_DIGITS
    if len(values) > 1 or not is_number:
        rule = f"must be a whole number of at most {_MOST_TIMEOUT_DIGITS} digits, once"
        raise errors.RequestError(TIMEOUT_HEADER, rule)
    return replace(caller, remaining_s=int(value) / 1000.0)
