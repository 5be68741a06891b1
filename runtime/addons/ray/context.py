"""What carries a call through Ray's proxy: messages out one by one, and statuses that arrive whole.

With every message that it passes on, Ray's proxy sets code, details and trailing metadata of its own call to those of
the replica's. Of an exception it keeps code and details at most. So

* what a call is refused with is told beside an empty message, and nothing is raised;
* while an answer runs, the status is that of a replica that is lost, from an empty message at its beginning on. The
  last message sets it right. If the replica dies, the proxy ends the call with it, and not with INTERNAL and the name
  of a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
from outrider.runtime.core import errors
from outrider.runtime.serving.status import trailing_status
from outrider.runtime.serving.v1.responses import failure_of
from outrider.v1 import inference_pb2 as wire

LOST = "REPLICA_LOST: the replica that served the request is gone; try again"
_ENDED = "ended"


class ProxyContext(Protocol):
    """The part of ``ray.serve.grpc_util.RayServegRPCContext`` that is used here."""

    def peer(self) -> str:
        """Return the address of the proxy's caller."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return what the caller sent."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code that the call ends with."""
        ...

    def set_details(self, details: str) -> None:
        """Set its text."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        """Set its metadata."""
        ...


class Encoded(NamedTuple):
    """A message in bytes, as Ray takes messages."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802  (protobuf's name)
        """Return the bytes."""
        return self.data


NOTHING = Encoded(b"")
"""Every message of ``outrider.v1``, with nothing set."""


class CallContext:
    """One call, as ``runtime.serving.v1`` answers it."""

    def __init__(self, proxy: ProxyContext) -> None:
        self._proxy = proxy
        # Of one message, so that a caller who does not read stops the writer. None is the end.
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    def peer(self) -> str:
        """Return whence the call came. It is never this machine: anybody may stand before the proxy."""
        return f"ray:{self._proxy.peer()}"

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return what the caller sent."""
        return self._proxy.invocation_metadata()

    def time_remaining(self) -> float | None:
        """Return None: the proxy keeps the caller's deadline to itself, and ends the call when it has passed."""
        return None

    async def write(self, data: bytes) -> None:
        """Send a message; returns once the one before it was taken."""
        await self._messages.put(data)

    async def stream(
        self, answering: Awaitable[None], num_completions: int
    ) -> AsyncGenerator[Encoded]:
        """Yield the messages that ``answering`` writes for so many completions, and what it ends with."""
        self._set(grpc.StatusCode.UNAVAILABLE, LOST)
        task = asyncio.ensure_future(self._run(answering))
        try:
            yield NOTHING
            while (data := await self._messages.get()) is not None:
                num_completions -= wire.GenerateResponse.FromString(data).HasField("finish")
                if num_completions <= 0:
                    self._set(grpc.StatusCode.OK, _ENDED)
                yield Encoded(data)
            if (failure := await task) is not None:
                yield self._tell(failure)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def answer(self, answering: Awaitable[bytes]) -> Encoded:
        """Return the one message of a call, or an empty one beside what it was refused with."""
        try:
            return Encoded(await answering)
        except Exception as error:
            return self._tell(failure_of("the call", error))

    async def _run(self, answering: Awaitable[None]) -> errors.ServingError | None:
        failure: errors.ServingError | None = None
        try:
            await answering
        except Exception as error:
            failure = failure_of("Generate", error)
        # Not where it is cancelled: nobody takes messages then.
        await self._messages.put(None)
        return failure

    def _tell(self, error: errors.ServingError) -> Encoded:
        """Return the message beside which a call's end is told."""
        self._set(*trailing_status(error))
        return NOTHING

    def _set(
        self, code: grpc.StatusCode, text: str, trailing: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self._proxy.set_code(code)
        self._proxy.set_details(text)
        self._proxy.set_trailing_metadata([*trailing])
