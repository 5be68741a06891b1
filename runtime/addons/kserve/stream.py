"""A stream of the Open Inference Protocol: many requests, answered side by side.

Each is a call of its own in a task of its own, and a lock keeps their responses apart. The stream's end, whatever it
is, ends them all. Who opened it makes all its requests.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve.infer_request import IS_FINAL, InferRequest, id_of
from outrider.runtime.core.errors import ServingError, SlowConsumer
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.v1.responses import Context, caller_of, failure_of, written

MOST_REQUESTS = 64
"""Of one stream at once; the next one is read when one has ended."""
STALL_S = 30.0
"""For an error to be read while no model is open, whose configuration would say it."""


class InferStream:
    """One call of ``ModelStreamInfer``, made by ``identity``."""

    def __init__(self, readiness: ServerState, identity: Identity, context: Context) -> None:
        self._readiness = readiness
        self._identity = identity
        self._context = context
        self._writing = asyncio.Lock()
        # What has ended the stream, if anything: no message can follow one that was given up or failed.
        self._end: type[SlowConsumer | asyncio.CancelledError] | None = None
        self._room = asyncio.Semaphore(MOST_REQUESTS)

    async def answer_all(self) -> None:
        """Answer what comes until the caller says that nothing more does; cancelled, end all that runs.

        Raises:
            SlowConsumer: the caller does not read; what was being written is lost, so that nothing can follow it.
        """
        # gRPC sends headers with the first message, and can end no call of which that was given up.
        await written(self._context.send_initial_metadata(()))
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._room.acquire()
                    data = await self._context.read()
                    if data is grpc.aio.EOF:
                        return
                    group.create_task(self._answer(data))
        except* SlowConsumer as failed:
            failure = failed.exceptions[0]
        raise failure

    async def _answer(self, data: bytes) -> None:
        """Answer one request; its failure is a message of the stream, and ends no other.

        Raises:
            SlowConsumer: the caller does not read.
        """
        readiness, context, request_id = self._readiness, self._context, id_of(data)
        try:
            caller = caller_of(
                self._identity, context, protocol="kserve", method="ModelStreamInfer"
            )
            call = InferRequest(readiness.serving, data, caller, self._send, is_stream=True)
            del data  # it may have megabytes, and the request may wait for long
            await readiness.handler.complete(call)
        except SlowConsumer:
            raise
        except Exception as error:
            await self._tell(request_id, failure_of("ModelStreamInfer", error))
        finally:
            self._room.release()

    async def _tell(self, request_id: str, failure: ServingError) -> None:
        """Send an error, in a message that has room for its text alone: id and reason stand in that.

        Raises:
            SlowConsumer: the caller does not read.
        """
        name = f"[request id: {request_id}] " if request_id else ""
        response = oip.ModelInferResponse(id=request_id)
        response.parameters[IS_FINAL].bool_param = True
        answer = oip.ModelStreamInferResponse(
            error_message=f"{name}{failure.reason}: {failure}", infer_response=response
        )
        readiness = self._readiness
        stall_s = readiness.serving.config.stall_timeout_s if readiness.is_open else STALL_S
        try:
            async with asyncio.timeout(stall_s):
                await self._write(answer)
        except TimeoutError as error:
            raise SlowConsumer from error

    async def _send(self, response: oip.ModelInferResponse) -> None:
        await self._write(oip.ModelStreamInferResponse(infer_response=response))

    async def _write(self, answer: oip.ModelStreamInferResponse) -> None:
        """Send a message.

        Raises:
            SlowConsumer: one before it was given up, since the caller did not read.
            CancelledError: the caller went away.
        """
        async with self._writing:
            if self._end is not None:
                raise self._end
            self._end = SlowConsumer
            try:
                await self._context.write(answer.SerializeToString())
            except Exception as error:
                self._end = asyncio.CancelledError
                raise self._end from error
            self._end = None
