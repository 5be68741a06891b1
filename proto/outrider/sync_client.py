"""The client for programs without asyncio: the same calls, which block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from outrider.access import AccessOptions, open_access
from outrider.channel import (
    HEALTH_CHECK,
    HEALTH_SERVING,
    HEALTH_WATCH,
    SERVICE,
    Metadata,
    check_open,
    decoded_errors,
    end_call,
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


class SyncClient:
    """A connection to one server, or to all replicas behind one name; for any number of threads.

    ``with SyncClient("host:port") as client: print(client.complete("def main").text)``

    Args:
        address: as of ``Client``, and so are the others.
        options: channel options, added to (and winning over) ``CHANNEL_OPTIONS``.
        tenant: whose requests these are; None for the tenant of all who name none.
        interceptors: objects for ``grpc.intercept_channel``, around every call.
        access_options: how the client proves who it is: ``credentials``, ``api_key``, ``tls_ca``, ``tls_certificate``,
            ``tls_key``, ``allow_insecure`` (``AccessOptions``).
    """

    def __init__(
        self,
        address: str,
        *,
        options: Sequence[tuple[str, str | int]] = (),
        tenant: str | None = None,
        interceptors: Sequence[Any] = (),
        **access_options: Unpack[AccessOptions],
    ) -> None:
        access = open_access(address, **access_options)
        self._metadata = own_metadata(tenant, access)
        self._is_closed = False
        merged = merged_options((*access.options, *options))
        if access.credentials is None:
            self._opened = grpc.insecure_channel(address, options=merged)
        else:
            self._opened = grpc.secure_channel(address, access.credentials, options=merged)
        self._channel = grpc.intercept_channel(self._opened, *interceptors)
        self._open_stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end cancelled, further ones raise RuntimeError."""
        self._is_closed = True
        self._opened.close()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[wire.GenerateResponse]:
        """Stream a completion as ``Client.generate`` does; leaving the loop cancels the request."""
        request = build_request(prompt, **options)
        call = self._stub.Generate(request, **self._call(timeout_s, metadata))
        try:
            with decoded_errors():
                yield from call
        finally:
            end_call(call)

    def complete(
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
        for response in self.generate(request, timeout_s=timeout_s, metadata=metadata):
            builder.add(response)
        return builder.output()

    def abort(
        self, *request_ids: str, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> list[str]:
        """End live requests by id and return the ids that were live."""
        request = wire.AbortRequest(request_ids=request_ids)
        with decoded_errors():
            return list(self._stub.Abort(request, **self._call(timeout_s, metadata)).aborted)

    def tokenize(
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
        """Return the token ids of a text, or of a conversation; arguments are those of ``Client.tokenize``."""
        request = build_tokenize(text, add_special_tokens, target, source_language, chat)
        with decoded_errors():
            return list(self._stub.Tokenize(request, **self._call(timeout_s, metadata)).ids)

    def info(
        self, *, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> wire.GetServerInfoResponse:
        """Return what is served, within which limits, and the present load."""
        request = wire.GetServerInfoRequest()
        with decoded_errors():
            answer: wire.GetServerInfoResponse = self._stub.GetServerInfo(
                request, **self._call(timeout_s, metadata)
            )
            return answer

    def is_serving(self, service: str = SERVICE, *, timeout_s: float | None = None) -> bool:
        """Return whether the server says of a service, or of "liveness", that it is serving.

        Raises:
            Unavailable: it is not, and the client was opened without ``PROBE_OPTIONS``; or it cannot be reached.
        """
        check_open(self._is_closed)
        check: Any = self._channel.unary_unary(HEALTH_CHECK)
        with decoded_errors():
            status = check(health_request(service), **self._call(timeout_s, None))
            return bool(status == HEALTH_SERVING)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once the server says that it is serving.

        Raises:
            DeadlineExceeded: it did not within ``timeout_s``.
        """
        check_open(self._is_closed)
        watch: Any = self._channel.unary_stream(HEALTH_WATCH)
        call = watch(health_request(SERVICE), wait_for_ready=True, **self._call(timeout_s, None))
        try:
            with decoded_errors():
                for status in call:
                    if status == HEALTH_SERVING:
                        return
        finally:
            end_call(call)

    def _call(self, timeout_s: float | None, metadata: Metadata | None) -> dict[str, Any]:
        return {"timeout": timeout_s, "metadata": metadata_of(self._metadata, metadata)}

    @property
    def _stub(self) -> Any:
        check_open(self._is_closed)
        return self._open_stub
