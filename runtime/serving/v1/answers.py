"""What all services of gRPC do with a call: who makes it, and how it ends where something is raised."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import NoReturn, Protocol, TypeAlias, TypeVar

import grpc.aio
from outrider.runtime.core import errors
from outrider.runtime.core.tenant import Identity, is_local
from outrider.runtime.serving.ledger import Caller
from outrider.runtime.serving.status import trailing_status
from outrider.runtime.serving.watch.tracing import trace_headers

Context: TypeAlias = grpc.aio.ServicerContext

log = logging.getLogger(__name__)

T = TypeVar("T")

# Bytes; a stream's window has 65,535 to begin with.
_SURE_TO_FIT = 1 << 15


class Carrier(Protocol):
    """What carries a call; gRPC's own context is one."""

    def peer(self) -> str:
        """Return the caller's address, as gRPC spells it."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller stops waiting; None where he does not say."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the call's headers."""
        ...


def caller_of(
    identity: Identity,
    context: Carrier,
    *,
    dialect: str = "outrider.v1",
    method: str = "Generate",
) -> Caller:
    """Return who makes a call. Who has proven nothing is known only where he is on this machine."""
    return Caller(
        tenant=identity.tenant,
        is_known=bool(identity.key) or is_local(context.peer()),
        remaining_s=context.time_remaining(),
        rules=identity.rules,
        key=identity.key,
        peer=context.peer(),
        dialect=dialect,
        method=method,
        trace=trace_headers(context.invocation_metadata() or ()),
    )


def sender_of(context: Context) -> Callable[[bytes], Awaitable[None]]:
    """Return what writes a stream's messages.

    gRPC sends headers with the first message, and can end no call of which that was given up: before a large one,
    which may not fit what a client takes unread, they go alone. Else they wait, since clients try no call again of
    which they have headers.
    """
    is_first = True

    async def send(data: bytes) -> None:
        nonlocal is_first
        if is_first and len(data) > _SURE_TO_FIT:
            await context.send_initial_metadata(())
        is_first = False
        await context.write(data)

    return send


def failure_of(method: str, error: Exception) -> errors.ServingError:
    """Return what a caller is told of an exception; one that is our own bug is logged, and told by its id alone."""
    if isinstance(error, errors.ServingError):
        return error
    failure = errors.InternalError(uuid.uuid4().hex)
    log.error("%s: internal error %s", method, failure.error_id, exc_info=error)
    return failure


async def answered(method: str, context: Context, call: Awaitable[T]) -> T:
    """Return what a handler returns, and answer any exception with a status of the table, never UNKNOWN."""
    try:
        return await call
    except Exception as error:
        if context.done() and not isinstance(error, errors.ServingError):
            raise asyncio.CancelledError from error  # the client went away during a write
        failure = failure_of(method, error)
    await refuse(context, failure)


async def refuse(context: Context, error: errors.ServingError) -> NoReturn:
    """End a call with an error's status."""
    code, message, trailing = trailing_status(error)
    await context.abort(code, message, trailing)
    raise AssertionError("abort raises")
