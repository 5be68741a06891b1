"""The async client that other services install: stream completions, tokenise, ask, abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import grpc
import grpc.aio

from outrider.access import AccessOptions, open_access
from outrider.channel import (
    HEALTH_SERVING,
    HEALTH_WATCH,
    SERVICE,
    Metadata,
    check_open,
    decoded_errors,
    health_request,
    merged_options,
    metadata_of,
    own_metadata,
)
from outrider.options import (
    ChatParams,
    Prompt,
    RequestOptions,
    build_request,
    build_tokenize,
)
from outrider.outputs import OutputBuilder, RequestOutput
from outrider.v1 import inference_pb2 as wire
from outrider.v1 import inference_pb2_grpc


class _Connection(NamedTuple):
    """A channel of one event loop, and the service's methods over it."""

    channel: grpc.aio.Channel
    stub: Any


class Client:
    """A connection to one server, or to all replicas behind one name.

    ``async with Client("host:port") as client: async for chunk in client.generate("def main"): ...``

    It may be made anywhere, also outside a running event loop, and used in several: each loop gets a connection of its
    own with its first call.

    Args:
        address: gRPC target, for example ``localhost:50051``; of replicas ``dns:///service:50051``, or a list as in
            ``ipv4:192.0.2.10:50051,192.0.2.11:50051``.
        options: channel options, added to (and winning over) ``CHANNEL_OPTIONS``.
        tenant: whose requests these are, 1..128 of [A-Za-z0-9._:-]; a server keeps request ids and what its drafters
            learn apart by tenant. None for the tenant of all who name none.
        interceptors: ``grpc.aio.ClientInterceptor`` objects, around every call.
        access_options: how the client proves who it is: ``credentials``, ``api_key``, ``tls_ca``, ``tls_certificate``,
            ``tls_key``, ``allow_insecure`` (``AccessOptions``).

    Raises:
        ValueError: credentials that contradict one another, that do not parse, or a key in plain text.
        OSError: a file of credentials cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        options: Sequence[tuple[str, str | int]] = (),
        tenant: str | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        **access_options: Unpack[AccessOptions],
    ) -> None:
        self._address = address
        access = open_access(address, **access_options)
        self._credentials = access.credentials
        self._options = merged_options((*access.options, *options))
        self._metadata = own_metadata(tenant, access)
        self._interceptors = tuple(interceptors)
        self._is_closed = False
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the running loop's connection; its calls in flight end cancelled.

        Further calls raise RuntimeError, in any loop; what other loops have in flight goes on.
        """
        self._is_closed = True
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.channel.close()

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[wire.GenerateResponse]:
        """Stream a completion; leaving the loop or cancelling the task cancels the request.

        Args:
            prompt: text, token ids, or a whole request; None with ``messages``.
            timeout_s: deadline of the call in seconds.
            metadata: of the call, beside the tenant's.
            options: fields of ``GenerateRequest`` and of its ``Sampling``, by name; ``outrider.options`` has them.

        Yields:
            Deltas; the last one has ``finish`` set, with ``n`` the last one of each completion.

        Raises:
            CallError: the call did not end OK.
            TypeError: no field has the name of an option.
        """
        request = build_request(prompt, **options)
        call = self._stub.Generate(request, **self._call(timeout_s, metadata))
        try:
            with decoded_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return a whole answer with its figures; arguments and errors are those of ``generate``."""
        request = build_request(prompt, **options)
        builder = OutputBuilder(request)
        async for response in self.generate(request, timeout_s=timeout_s, metadata=metadata):
            builder.add(response)
        return builder.output()

    async def abort(
        self, *request_ids: str, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> list[str]:
        """End live requests by id and return the ids that were live."""
        request = wire.AbortRequest(request_ids=request_ids)
        with decoded_errors():
            return list(
                (await self._stub.Abort(request, **self._call(timeout_s, metadata))).aborted
            )

    async def tokenize(
        self,
        text: str = "",
        *,
        add_special_tokens: bool | None = None,
        target: bool = False,
        source_language: str = "",
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
        **chat: Unpack[ChatParams],
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation, as ``generate`` would see it.

        Args:
            text: a prompt, or with ``target`` the beginning of an answer.
            add_special_tokens: those of the tokenizer's template; None for the default, which is to add them.
            target: whether the text is one of an answer, for a model with an encoder.
            source_language: of the prompt, for a model with an encoder and languages.
            timeout_s: deadline of the call in seconds.
            metadata: of the call.
            chat: ``messages`` in place of a text, and how they are rendered.
        """
        request = build_tokenize(text, add_special_tokens, target, source_language, chat)
        with decoded_errors():
            return list((await self._stub.Tokenize(request, **self._call(timeout_s, metadata))).ids)

    async def info(
        self, *, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> wire.GetServerInfoResponse:
        """Return what is served, within which limits, and the present load."""
        request = wire.GetServerInfoRequest()
        with decoded_errors():
            answer: wire.GetServerInfoResponse = await self._stub.GetServerInfo(
                request, **self._call(timeout_s, metadata)
            )
            return answer

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once the server says that it is serving.

        Raises:
            DeadlineExceeded: it did not within ``timeout_s``.
        """
        watch: Any = self._connection().channel.unary_stream(HEALTH_WATCH)
        call = watch(health_request(SERVICE), wait_for_ready=True, **self._call(timeout_s, None))
        try:
            with decoded_errors():
                async for status in call:
                    if status == HEALTH_SERVING:
                        return
        finally:
            call.cancel()

    def _call(self, timeout_s: float | None, metadata: Metadata | None) -> dict[str, Any]:
        return {"timeout": timeout_s, "metadata": metadata_of(self._metadata, metadata)}

    @property
    def _stub(self) -> Any:
        return self._connection().stub

    def _connection(self) -> _Connection:
        """Return the running loop's connection; channels of grpc.aio belong to the loop they are made in."""
        check_open(self._is_closed)
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            # Those of loops that are over, which nobody closed; other threads tidy up, too.
            for other in [one for one in list(self._connections) if one.is_closed()]:
                self._connections.pop(other, None)
            self._connections[loop] = self._connect()
        return self._connections[loop]

    def _connect(self) -> _Connection:
        given: dict[str, Any] = {"options": self._options, "interceptors": self._interceptors}
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._address, **given)
        else:
            channel = grpc.aio.secure_channel(self._address, self._credentials, **given)
        return _Connection(channel, inference_pb2_grpc.InferenceStub(channel))
