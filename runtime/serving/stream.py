"""Streams one completion to the client: batches of events in, responses out."""

from __future__ import annotations

import asyncio

import grpc.aio
from outrider.runtime.core import errors
from outrider.runtime.core.params import Failed, Finished, FinishReason, RequestSpec, StepTrace
from outrider.runtime.serving.metrics import Metrics
from outrider.runtime.serving.outbox import Batch, Outbox
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.wire import add_tokens, finish_of, step_of
from outrider.v1 import inference_pb2 as wire


class CompletionStream:
    """Writes the responses of one admitted request.

    Args:
        request: as it arrived; it says which parts the answer has.
        context: of the call.
    """

    def __init__(
        self,
        serving: Serving,
        metrics: Metrics,
        request: wire.GenerateRequest,
        spec: RequestSpec,
        context: grpc.aio.ServicerContext,
    ) -> None:
        self._serving = serving
        self._metrics = metrics
        self._request = request
        self._spec = spec
        self._context = context
        self._started_s = serving.clock()
        self._last_s: float | None = None

    async def run(self, outbox: Outbox) -> FinishReason:
        """Write responses until the request ends.

        Raises:
            ServingError: the request failed, or the client read too slowly.
        """
        # One timeout for all responses costs a third of one for each.
        try:
            async with asyncio.timeout(None) as stall:
                return await self._run(outbox, stall)
        except TimeoutError as error:
            raise errors.SlowConsumer from error

    async def _run(self, outbox: Outbox, stall: asyncio.Timeout) -> FinishReason:
        loop, stall_s = asyncio.get_running_loop(), self._serving.stall_timeout_s
        while True:
            batch = await outbox.take()
            end = batch.end
            if isinstance(end, Finished) or batch.tokens:
                data = self._response(batch).SerializeToString()
                # Counted while the response is on its way.
                loop.call_soon(self._count, batch)
                stall.reschedule(loop.time() + stall_s)
                await self._context.write(data)
                stall.reschedule(None)
            if isinstance(end, Failed):
                raise end.error
            if isinstance(end, Finished):
                return end.reason

    def _response(self, batch: Batch) -> wire.GenerateResponse:
        response = wire.GenerateResponse(text=batch.text)
        add_tokens(response, batch.tokens, self._request.return_provenance)
        if self._request.return_trace:
            response.steps.extend(self._step(step) for step in batch.steps)
        if isinstance(batch.end, Finished):
            response.text += batch.end.text
            if batch.end.beams:
                best = batch.end.beams[0]
                response.tokens.extend(wire.Token(id=token) for token in best.tokens)
            response.finish.CopyFrom(finish_of(batch.end, self._spec.seed, self._spec.request_id))
        return response

    def _step(self, step: StepTrace) -> wire.Step:
        drafted_text = [self._text(token) for token in step.draft_tokens]
        next_text = "" if step.next_token is None else self._text(step.next_token)
        return step_of(step, drafted_text, next_text)

    def _text(self, token: int) -> str:
        return self._serving.codec.decode((token,), skip_special_tokens=False)

    def _count(self, batch: Batch) -> None:
        now_s = self._serving.clock()
        num_tokens = len(batch.tokens)
        if isinstance(batch.end, Finished) and batch.end.beams:
            num_tokens = batch.end.num_output
            self._metrics.searches.inc()
        if num_tokens:
            self._metrics.output_tokens.inc(num_tokens)
            if self._last_s is None:
                self._metrics.first_token_s.observe(now_s - self._started_s)
            else:
                self._metrics.gap_s.observe(now_s - self._last_s)
            self._last_s = now_s
        if isinstance(batch.end, Finished):
            self._metrics.request_s.observe(now_s - self._started_s)
            self._metrics.count_speculation(batch.end.report)
