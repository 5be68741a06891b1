"""The one gate of a gRPC server: outside every method, whoever registers it, and whatever it is called.

A handler learns who calls from ``identity()``. A method that ``SCOPE_OF`` does not know is allowed to nobody. Requests
are read into messages behind the gate only, so that strangers reach no parser.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from outrider.runtime.core import errors
from outrider.runtime.core.tenant import Identity, is_local, tenant_of
from outrider.runtime.serving.observability.logs import bounded
from outrider.runtime.serving.security.authenticator import (
    Authenticator,
    PresentedCredentials,
    check_scope,
    sole_header,
)
from outrider.runtime.serving.status import trailing_status

SCOPE_OF: Mapping[str, str] = {
    "/outrider.v1.Inference/Generate": "generate",
    "/outrider.v1.Inference/Abort": "generate",
    "/outrider.v1.Inference/Tokenize": "generate",
    "/outrider.v1.Inference/GetServerInfo": "info",
    "/inference.GRPCInferenceService/ModelInfer": "generate",
    "/inference.GRPCInferenceService/ModelStreamInfer": "generate",
    "/inference.GRPCInferenceService/ServerLive": "info",
    "/inference.GRPCInferenceService/ServerReady": "info",
    "/inference.GRPCInferenceService/ModelReady": "info",
    "/inference.GRPCInferenceService/ServerMetadata": "info",
    "/inference.GRPCInferenceService/ModelMetadata": "info",
    "/vllm.grpc.engine.VllmEngine/Generate": "generate",
    "/vllm.grpc.engine.VllmEngine/Abort": "generate",
    "/vllm.grpc.engine.VllmEngine/HealthCheck": "info",
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": "info",
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": "info",
    "/vllm.grpc.engine.VllmEngine/GetLoads": "info",
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": "info",
    "/grpc.health.v1.Health/Check": "info",
    "/grpc.health.v1.Health/Watch": "info",
    "/grpc.health.v1.Health/List": "info",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "info",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": "info",
}
"""What a caller needs, by method."""
PROBES = frozenset(("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"))
"""What load balancers call, who have no credentials."""

Context: TypeAlias = grpc.aio.ServicerContext
Refused: TypeAlias = Callable[[str, str, errors.ServingError, Identity | None], None]
"""Told of each refused call: method, peer, error, and who it was, if that is known."""

_IDENTITY: ContextVar[Identity] = ContextVar("identity")
_SAN_PROPERTY = "x509_subject_alternative_name"

log = logging.getLogger(__name__)


def identity() -> Identity:
    """Return who makes the present call; within a method behind the gate only."""
    return _IDENTITY.get()


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls through whose callers are known and may make them.

    Args:
        authenticator: to ask.
        has_open_health: whether ``PROBES`` are answered to anybody.
        refused: called for each call that is refused.
    """

    def __init__(
        self, authenticator: Authenticator, *, has_open_health: bool, refused: Refused
    ) -> None:
        self._authenticator = authenticator
        self._open = PROBES if has_open_health else frozenset[str]()
        self._refused = refused
        # By method, of those that exist: callers choose the names of the others.
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Return a method's handler with the gate before it."""
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if method in self._open:
            return handler
        if handler is None:
            # Who is not let in is not to learn which methods there are.
            return grpc.stream_stream_rpc_method_handler(self._unknown(method))
        self._handlers[method] = guarded = self._before(method, handler)
        return guarded

    def _before(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return a handler that asks first, and parses second."""
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
        behaviour, parse = getattr(handler, kind), None
        if not handler.request_streaming and handler.request_deserializer is not None:
            parse = handler.request_deserializer
            handler = handler._replace(request_deserializer=None)
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._let_in(method, context)
                request = request if parse is None else await _parsed(parse, request, context)
                async with aclosing(behaviour(request, context)) as answers:
                    async for answer in answers:
                        yield answer

            return handler._replace(**{kind: stream})

        async def call(request: Any, context: Context) -> Any:
            await self._let_in(method, context)
            request = request if parse is None else await _parsed(parse, request, context)
            return await behaviour(request, context)

        return handler._replace(**{kind: call})

    def _unknown(self, method: str) -> Callable[..., Awaitable[None]]:
        async def call(requests: object, context: Context) -> None:
            await self._let_in(method, context, is_known=False)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")

        return call

    async def _let_in(self, method: str, context: Context, *, is_known: bool = True) -> None:
        """Note who calls, or end the call."""
        found: Identity | None = None
        try:
            found = self._identify(context)
            if is_known:
                check_scope(found, SCOPE_OF.get(method))
            _IDENTITY.set(found)
            return
        except errors.ServingError as error:
            failure = error
        except Exception as error:
            # gRPC would send its text to the caller, and a log would keep it: it may have a secret in it.
            failure = errors.InternalError(uuid.uuid4().hex)
            log.error(
                "%s: %s at the gate, error id %s",
                bounded(method),
                type(error).__name__,
                failure.error_id,
            )
        self._refused(method, context.peer(), failure, found)
        await _abort(context, failure)

    def _identify(self, context: Context) -> Identity:
        authenticator, metadata = self._authenticator, context.invocation_metadata() or ()
        presented = PresentedCredentials()
        if authenticator.asks:
            names = context.auth_context().get(_SAN_PROPERTY, ())
            presented = PresentedCredentials(
                authorization=sole_header([v for key, v in metadata if key == "authorization"]),
                certificate_names=tuple(name.decode("utf-8", "replace") for name in names),
            )
        found = authenticator.identify(presented)
        tenant = tenant_of((key, value) for key, value in metadata)
        if not tenant:
            return found
        return authenticator.named(found, tenant, is_local=is_local(context.peer()))


async def _parsed(parse: Callable[[bytes], Any], data: bytes, context: Context) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await _abort(context, errors.MalformedRequest())


async def _abort(context: Context, error: errors.ServingError) -> None:
    code, message, trailing = trailing_status(error)
    await context.abort(code, message, trailing)
