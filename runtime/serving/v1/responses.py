"""What all services of gRPC do with a call: who makes it, and how it ends where something is raised."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Iterable
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc.aio
from outrider.runtime.core import errors
from outrider.runtime.core.tenant import Identity, is_local
from outrider.runtime.serving.observability.tracing import trace_headers
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.status import trailing_status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

log = logging.getLogger(__name__)

T = TypeVar("T")


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
    protocol: str = "outrider.v1",
    method: str = "Generate",
) -> ClientIdentity:
    """Return who makes a call. Who has proven nothing is known only where he is on this machine."""
    return ClientIdentity(
        tenant=identity.tenant,
        is_known=bool(identity.key) or is_local(context.peer()),
        remaining_s=context.time_remaining(),
        rules=identity.rules,
        key=identity.key,
        peer=context.peer(),
        protocol=protocol,
        method=method,
        trace=trace_headers(context.invocation_metadata() or ()),
    )


class Sender:
    """Writes the messages of a stream.

    gRPC sends headers with the first message, and ends no call whose headers are on their way: a first message is
    never given up. Who waits for it may be cancelled, and ``settled`` waits once more.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first: asyncio.Future[None] | None = None

    async def __call__(self, data: bytes) -> None:
        """Write a message.

        Raises:
            CancelledError: the client went away.
        """
        if self._first is None:
            self._first = asyncio.ensure_future(self._context.write(data))
            self._first.add_done_callback(_forgive)
            await written(asyncio.shield(self._first))
        else:
            await written(self._context.write(data))

    async def settled(self) -> None:
        """Wait until the first message, if there is one, has gone or failed."""
        if self._first is not None:
            await written(asyncio.shield(self._first))

    def end(self) -> None:
        """Wait for no first message any more: the call has ended."""
        if self._first is not None:
            self._first.cancel()


def _forgive(write: asyncio.Future[None]) -> None:
    """Take a failure for which nobody waits any more, which asyncio would report."""
    if not write.cancelled():
        write.exception()


async def written(write: Awaitable[None]) -> None:
    """Await a write of gRPC's.

    Raises:
        CancelledError: it failed. The client went away, and gRPC says so with an exception of its own before
            ``context.done()`` does.
    """
    try:
        await write
    except Exception as error:
        raise asyncio.CancelledError from error


def failure_of(method: str, error: Exception) -> errors.ServingError:
    """Return what a caller is told of an exception; one that is our own bug is logged, and told by its id alone."""
    if isinstance(error, errors.ServingError):
        return error
    failure = errors.InternalError(uuid.uuid4().hex)
    log.error("%s: internal error %s", method, failure.error_id, exc_info=error)
    return failure


async def answered(
    method: str, context: Context, call: Awaitable[T], sender: Sender | None = None
) -> T:
    """Return what a handler returns, and answer any exception with a status of the table, never UNKNOWN.

    Args:
        method: its name, for the log.
        context: the call's.
        call: the handler at work.
        sender: writes its messages, where it is a stream.
    """
    try:
        return await _answered(method, context, call, sender)
    finally:
        if sender is not None:
            sender.end()


async def _answered(method: str, context: Context, call: Awaitable[T], sender: Sender | None) -> T:
    try:
        return await call
    except Exception as error:
        if context.done() and not isinstance(error, errors.ServingError):
            raise asyncio.CancelledError from error  # the client went away
        failure = failure_of(method, error)
    await refuse(context, failure, sender)


async def refuse(
    context: Context, error: errors.ServingError, sender: Sender | None = None
) -> NoReturn:
    """End a call with an error's status, once its first message is out."""
    code, message, trailing = trailing_status(error)
    if sender is not None:
        await sender.settled()
    await context.abort(code, message, trailing)
    raise AssertionError("abort raises")
