"""The async client that other services install: stream completions, tokenise, ask, abort.

Calls that were refused before anything was streamed are retried by gRPC itself, by the service config below; a stream
that has begun is never retried silently.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from outrider.chat import CHAT_OPTIONS, build_chat
from outrider.errors import decode_error
from outrider.v1 import inference_pb2 as wire
from outrider.v1 import inference_pb2_grpc

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name

# grpc.health.v1 by hand, so that the client needs no further package: HealthCheckRequest{service = 1} and
# HealthCheckResponse{status = 1, SERVING = 1} in wire format.
_TENANT_KEY = "outrider-tenant"
_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_HEALTH_REQUEST = bytes((0x0A, len(SERVICE))) + SERVICE.encode()
_HEALTH_SERVING = b"\x08\x01"

SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A reader that stalls makes the server stop within some 100 KiB instead of several MiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
)


class Client:
    """A connection to one server, or to all replicas behind one name.

    ``async with Client("host:port") as client: async for chunk in client.generate("def main"): ...``

    Args:
        address: gRPC target, for example ``localhost:50051`` or ``dns:///service:50051``.
        credentials: TLS of the channel; None is plain text.
        options: channel options, added to (and winning over) ``CHANNEL_OPTIONS``.
        tenant: whose requests these are, 1..128 of [A-Za-z0-9._:-]; a server keeps request ids and what its drafters
            learn apart by tenant. None for the tenant of all who name none.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, str | int]] = (),
        tenant: str | None = None,
    ) -> None:
        self._metadata = () if tenant is None else ((_TENANT_KEY, tenant),)
        merged = tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=merged)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=merged)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

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
        """Close the connection; calls in flight end cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | wire.GenerateRequest | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> AsyncIterator[wire.GenerateResponse]:
        """Stream a completion; leaving the loop or cancelling the task cancels the request.

        Args:
            prompt: text, token ids, or a whole request; None with ``messages``.
            timeout_s: deadline of the call in seconds.
            options: fields of ``GenerateRequest`` and of its ``Sampling``, by name; ``speculation`` takes a mapping,
                ``answer_prefix_tokens`` token ids. ``messages`` are a chat, a mapping each, with the options of
                ``outrider.chat.build_chat``.

        Yields:
            Deltas; the last one has ``finish`` set.

        Raises:
            CallError: the call did not end OK.
            TypeError: no field has the name of an option.
        """
        request = build_request(prompt, **options)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with _decoded_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> list[str]:
        """End live requests by id and return the ids that were live."""
        with _decoded_errors():
            request = wire.AbortRequest(request_ids=request_ids)
            call = self._stub.Abort(request, timeout=timeout_s, metadata=self._metadata)
            return list((await call).aborted)

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        target: bool = False,
        source_language: str = "",
        timeout_s: float | None = None,
    ) -> list[int]:
        """Return the token ids of a text, as ``generate`` would see it.

        Args:
            text: a prompt, or with ``target`` the beginning of an answer.
            add_special_tokens: those of the tokenizer's template; None for the default, which is to add them.
            target: whether the text is one of an answer, for a model with an encoder.
            source_language: of the prompt, for a model with an encoder and languages.
            timeout_s: deadline of the call in seconds.
        """
        with _decoded_errors():
            request = wire.TokenizeRequest(
                text=text,
                add_special_tokens=add_special_tokens,
                target=target,
                source_language=source_language,
            )
            return list((await self._stub.Tokenize(request, timeout=timeout_s)).ids)

    async def info(self, *, timeout_s: float | None = None) -> wire.GetServerInfoResponse:
        """Return what is served, within which limits, and the present load."""
        with _decoded_errors():
            request = wire.GetServerInfoRequest()
            return await self._stub.GetServerInfo(request, timeout=timeout_s)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once the server says that it is serving.

        Raises:
            DeadlineExceeded: it did not within ``timeout_s``.
        """
        watch = self._channel.unary_stream(_HEALTH_WATCH)
        call = watch(_HEALTH_REQUEST, timeout=timeout_s, wait_for_ready=True)
        try:
            with _decoded_errors():
                async for status in call:
                    if status == _HEALTH_SERVING:
                        return
        finally:
            call.cancel()


def build_request(
    prompt: str | Sequence[int] | wire.GenerateRequest | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> wire.GenerateRequest:
    """Return a request made from a prompt and options named as in ``Client.generate``.

    With ``messages`` instead of a prompt, options of ``outrider.chat.build_chat`` are taken too.

    Raises:
        TypeError: no field has the name of an option, or there is not one of prompt and messages.
    """
    request = wire.GenerateRequest()
    if (prompt is None) == (messages is None):
        raise TypeError("one of prompt and messages is required")
    if messages is not None:
        of_chat = {name: options.pop(name) for name in CHAT_OPTIONS if name in options}
        request.chat.CopyFrom(build_chat(messages, **of_chat))
    elif isinstance(prompt, wire.GenerateRequest):
        request.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()
    in_sampling = wire.Sampling.DESCRIPTOR.fields_by_name
    in_request = wire.GenerateRequest.DESCRIPTOR.fields_by_name
    if unknown := set(options) - set(in_sampling) - set(in_request):
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    sampling = {name: value for name, value in options.items() if name in in_sampling}
    request.sampling.MergeFrom(wire.Sampling(**sampling))
    others = {name: value for name, value in options.items() if name not in in_sampling}
    if isinstance(others.get("answer_prefix_tokens"), Sequence):
        others["answer_prefix_tokens"] = wire.TokenIds(ids=others["answer_prefix_tokens"])
    request.MergeFrom(wire.GenerateRequest(**others))
    return request


@contextmanager
def _decoded_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise decode_error(error) from error
