"""The gate of a gRPC server: outside every method, whoever registers it, and whatever it is called.

A handler learns who calls from ``identity()``. A method without a scope is allowed to nobody. Requests are read into
messages behind the gate only, so that strangers reach no parser.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from outrider.runtime.core import errors
from outrider.runtime.core.tenant import TENANT_KEY, Identity
from outrider.runtime.serving.security.gate import Gate, IncomingCall
from outrider.runtime.serving.status import trailing_status

_HEALTH, _REFLECTION = "/grpc.health.v1.Health", "/grpc.reflection.v1"
SCOPES_OF_GRPC: Mapping[str, str] = {
    f"{_HEALTH}/Check": "info",
    f"{_HEALTH}/Watch": "info",
    f"{_HEALTH}/List": "info",
    f"{_REFLECTION}alpha.ServerReflection/ServerReflectionInfo": "info",
    f"{_REFLECTION}.ServerReflection/ServerReflectionInfo": "info",
}
"""What a caller needs, by method of the services that every server has."""
PROBES = frozenset((f"{_HEALTH}/Check", f"{_HEALTH}/Watch"))
"""What load balancers call, who have no credentials."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_IDENTITY: ContextVar[Identity] = ContextVar("identity")
_SAN_PROPERTY = "x509_subject_alternative_name"


def identity() -> Identity:
    """Return who makes the present call; within a method behind the gate only."""
    return _IDENTITY.get()


class GrpcGate(grpc.aio.ServerInterceptor):
    """Lets calls through whose callers are known and may make them.

    Args:
        gate: to ask.
        scopes: what a caller needs, by method.
        has_open_health: whether ``PROBES`` are answered to anybody.
    """

    def __init__(self, gate: Gate, scopes: Mapping[str, str], *, has_open_health: bool) -> None:
        self._gate = gate
        self._scopes = scopes
        self._open = PROBES if has_open_health else frozenset[str]()
        # By method, of those that exist: callers choose the names of the others.
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
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
        guarded: Handler = self._before(method, handler)
        self._handlers[method] = guarded
        return guarded

    def _before(self, method: str, handler: Any) -> Any:
        """Return a handler that asks first, and parses second."""
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
        behaviour, parse = getattr(handler, kind), None
        if not handler.request_streaming and handler.request_deserializer is not None:
            parse = handler.request_deserializer
            handler = handler._replace(request_deserializer=None)
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                peer = await self._let_in(method, context)
                try:
                    request = request if parse is None else await _parsed(parse, request, context)
                    async with aclosing(behaviour(request, context)) as answers:
                        async for answer in answers:
                            yield answer
                finally:
                    self._gate.left(peer)

            return handler._replace(**{kind: stream})

        async def call(request: Any, context: Context) -> Any:
            peer = await self._let_in(method, context)
            try:
                request = request if parse is None else await _parsed(parse, request, context)
                return await behaviour(request, context)
            finally:
                self._gate.left(peer)

        return handler._replace(**{kind: call})

    def _unknown(self, method: str) -> Callable[..., Awaitable[None]]:
        async def call(requests: object, context: Context) -> None:
            self._gate.left(await self._let_in(method, context, is_known=False))
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")

        return call

    async def _let_in(self, method: str, context: Context, *, is_known: bool = True) -> str:
        """Note who calls and return his address, or end the call.

        Behind a cancelled call nobody may ask the context: gRPC has freed what it reads (1.85.1: the process ends).
        """
        metadata, peer = context.invocation_metadata() or (), context.peer()
        call = IncomingCall(
            name=method,
            scope=self._scopes.get(method),
            peer=peer,
            authorization=[value for key, value in metadata if key == "authorization"],
            tenants=[value for key, value in metadata if key == TENANT_KEY],
            certificate_names=lambda: [
                name.decode("utf-8", "replace")
                for name in context.auth_context().get(_SAN_PROPERTY, ())
            ],
            needs_scope=is_known,
        )
        try:
            _IDENTITY.set(self._gate.admit(call))
        except errors.ServingError as error:
            failure = error
        else:
            return peer
        await _abort(context, failure)
        raise failure  # abort has raised


async def _parsed(parse: Callable[[bytes], Any], data: bytes, context: Context) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await _abort(context, errors.MalformedRequest())


async def _abort(context: Context, error: errors.ServingError) -> None:
    code, message, trailing = trailing_status(error)
    await context.abort(code, message, trailing)
