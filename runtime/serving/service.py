"""The gRPC service: validate, submit, stream, and answer every error by one table.

Handlers take bytes and parse them here: grpc.aio answers a failed deserializer with UNKNOWN. Clean-up is in ``finally``
only, since a disconnect may raise any exception of the transport.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import uuid
from collections.abc import Awaitable
from typing import NamedTuple, TypeAlias, TypeVar

import grpc
import grpc.aio
from outrider.runtime.core import errors
from outrider.runtime.core.options import check_abort_ids, check_text
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.tenant import is_known, tenant_of
from outrider.runtime.core.validate import Admission, build_spec, check_fields
from outrider.runtime.serving.encoding import RequestEncoder
from outrider.runtime.serving.metrics import Metrics
from outrider.runtime.serving.outbox import Outbox, Post
from outrider.runtime.serving.served_model import Serving, describe
from outrider.runtime.serving.status import code_of, trailing_status
from outrider.runtime.serving.stream import CompletionStream
from outrider.runtime.serving.texts import TextLane
from outrider.runtime.serving.wire import check_counts, check_tokenize, fields_of, parse
from outrider.v1 import inference_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name
# Seconds past a deadline that the worker gets to end a request itself, between two steps.
LATE_S = 1.0

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext


T = TypeVar("T")


class _Live(NamedTuple):
    """A request that has not ended, and where its events go."""

    spec: RequestSpec
    outbox: Outbox
    submitted_s: float


class InferenceService:
    """Handlers of ``outrider.v1.Inference`` over one served model, counted in ``metrics``."""

    def __init__(self, serving: Serving, metrics: Metrics) -> None:
        self._serving = serving
        self._metrics = metrics
        # By tenant and the caller's id, while the request is live.
        self._live: dict[tuple[str, str], _Live] = {}
        self._has_failed = False
        self._is_ready = False
        self._is_draining = False
        self._has_changed_model = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_cut = 0
        self._texts = TextLane(
            max_queued=serving.config.max_queued,
            max_queued_tokens=serving.config.max_queued_tokens,
            retry_after_s=serving.config.retry_after_s,
        )
        self._encoder = RequestEncoder(serving.codec, self._texts)
        self._post = Post(asyncio.get_running_loop())
        serving.worker.after_step(self._post.send)

    def set_ready(self) -> None:
        """Take requests from now on."""
        self._is_ready = True

    def close_admission(self) -> None:
        """Answer new requests with DRAINING from now on; the other methods still work."""
        self._is_draining = True

    def end_overdue(self) -> None:
        """End streams whose deadline or queue timeout is well past: their worker is stuck in a step."""
        worker, config = self._serving.worker, self._serving.config
        now_s = self._serving.clock() - LATE_S
        for live in self._live.values():
            waited_s = now_s - live.submitted_s
            if live.spec.deadline_s is not None and now_s >= live.spec.deadline_s:
                live.outbox.cut(errors.DeadlineExceeded(live.outbox.num_tokens))
            elif waited_s > config.queue_timeout_s and worker.is_queued(live.spec.internal_id):
                live.outbox.cut(errors.QueueTimeout(waited_s))

    def fail(self) -> None:
        """End all streams, and refuse new ones: the worker is gone."""
        self._has_failed = True
        for live in self._live.values():
            live.outbox.cut(errors.EngineRestart(live.outbox.num_tokens))

    def refuse_changed_model(self) -> None:
        """Answer new requests with MODEL_INTEGRITY from now on."""
        self._has_changed_model = True

    @property
    def num_streams(self) -> int:
        """Number of streams that have not ended."""
        return len(self._live)

    @property
    def num_cut(self) -> int:
        """Number of streams that the end of a drain cut short."""
        return self._num_cut

    async def wait_idle(self) -> None:
        """Return once no stream is open."""
        await self._idle.wait()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods, for ``server.add_generic_rpc_handlers``."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Abort": unary(self.abort),
                "Tokenize": unary(self.tokenize),
                "GetServerInfo": unary(self.get_server_info),
            },
        )

    async def generate(self, data: bytes, context: Context) -> None:
        """Stream one completion."""
        await self._answer("Generate", context, self._generate(data, context))

    async def abort(self, data: bytes, context: Context) -> bytes:
        """End live requests by the caller's ids."""
        return await self._answer("Abort", context, self._abort(data, context))

    async def tokenize(self, data: bytes, context: Context) -> bytes:
        """Return the token ids of a text."""
        return await self._answer("Tokenize", context, self._tokenize(data))

    async def get_server_info(self, data: bytes, context: Context) -> bytes:
        """Return the description of the served model."""
        return await self._answer("GetServerInfo", context, self._get_server_info(data))

    async def _answer(self, method: str, context: Context, call: Awaitable[T]) -> T:
        """Run a handler and answer any exception with a status of the table, never UNKNOWN."""
        try:
            return await call
        except errors.ServingError as error:
            failure = error
        except Exception as error:
            if context.done():
                raise asyncio.CancelledError from error  # the client went away during a write
            failure = errors.InternalError(uuid.uuid4().hex)
            log.exception("%s: internal error %s", method, failure.error_id)
        code, message, trailing = trailing_status(failure)
        await context.abort(code, message, trailing)
        raise AssertionError("abort raises")

    async def _generate(self, data: bytes, context: Context) -> None:
        try:
            request = parse(wire.GenerateRequest, data)
            spec = await self._admit(request, context)
            outbox = self._submit(spec)
        except errors.ServingError as error:
            self._metrics.refused.labels(reason=error.reason).inc()
            raise
        stream = CompletionStream(self._serving, self._metrics, request, spec, context)
        code, reason = grpc.StatusCode.CANCELLED, "CLIENT_CANCELLED"
        try:
            finish = await stream.run(outbox)
            code, reason = grpc.StatusCode.OK, finish.value
        except errors.ServingError as error:
            code, reason = code_of(error), error.reason
            raise
        finally:
            if not outbox.is_ended:
                self._serving.worker.cancel(spec.internal_id, errors.Cancelled("client"))
            self._forget(spec)
            is_cut = reason in (errors.DrainDeadline.reason, errors.EngineRestart.reason)
            self._num_cut += self._is_draining and is_cut
            self._metrics.finished.labels(code=code.name, reason=reason).inc()

    async def _admit(self, request: wire.GenerateRequest, context: Context) -> RequestSpec:
        """Check a request, encode its texts, and return it as the queue takes it."""
        serving = self._serving
        if not self._is_ready:
            raise errors.NotReady
        if self._has_changed_model:
            raise errors.ModelChanged
        if self._is_draining:
            raise errors.Draining
        if self._has_failed:
            raise errors.EngineRestart
        check_counts(request, serving.limits, serving.model)
        fields = fields_of(request, serving.defaults)
        check_fields(fields, serving.limits, serving.model)
        remaining_s = context.time_remaining()
        budget_s = serving.limits.max_request_s
        if remaining_s is not None:
            budget_s = min(budget_s, remaining_s)
        deadline_s = serving.clock() + budget_s
        if fields.text is not None:
            # A full queue needs no tokenised text to say so; prompts on their way count as if they were there.
            num_ahead, num_tokens = self._texts.prompts
            serving.worker.check_room(1, num_tokens + 1, num_ahead)
        encoder = self._encoder
        prefix = encoder.decoder_prefix(fields)
        fields = await encoder.with_reference(fields)
        internal_id, tenant = uuid.uuid4().hex, _tenant(context)
        prompt = await encoder.prompt(fields)
        words = fields.bad_words
        admission = Admission(
            internal_id=internal_id,
            request_id=fields.request_id or internal_id,
            prompt_tokens=prompt if prefix is None else prefix,
            source_tokens=() if prefix is None else prompt,
            answer_prefix=await encoder.answer_prefix(fields),
            bad_words=await encoder.bad_words(words) if words else serving.defaults.bad_words,
            seed=secrets.randbits(63) if fields.seed is None else fields.seed,
            deadline_s=deadline_s,
            tenant=tenant,
            is_known=is_known(tenant, context.peer()),
        )
        return build_spec(fields, admission, serving.limits, serving.model)

    def _submit(self, spec: RequestSpec) -> Outbox:
        """Queue a request and register the caller's id; both happen or neither."""
        if (spec.tenant, spec.request_id) in self._live:
            raise errors.DuplicateRequestId
        if self._has_failed:
            raise errors.EngineRestart
        worker = self._serving.worker
        outbox = Outbox(
            self._post,
            self._serving.config.max_unsent_chunks,
            lambda: worker.cancel(spec.internal_id, errors.SlowConsumer()),
            interval_s=self._serving.config.message_interval_s,
        )
        worker.submit(spec, outbox.deliver)
        live = _Live(spec, outbox, self._serving.clock())
        self._live[spec.tenant, spec.request_id] = live
        self._idle.clear()
        self._metrics.admitted.inc()
        self._metrics.prompt_tokens.inc(spec.num_prompt_tokens)
        return outbox

    def _forget(self, spec: RequestSpec) -> None:
        del self._live[spec.tenant, spec.request_id]
        if not self._live:
            self._idle.set()

    async def _abort(self, data: bytes, context: Context) -> bytes:
        request_ids = parse(wire.AbortRequest, data).request_ids
        check_abort_ids(request_ids, self._serving.limits.max_abort_ids)
        tenant = _tenant(context)
        aborted = [one for one in dict.fromkeys(request_ids) if (tenant, one) in self._live]
        for request_id in aborted:
            internal_id = self._live[tenant, request_id].spec.internal_id
            self._serving.worker.cancel(internal_id, errors.Cancelled("abort"))
        return wire.AbortResponse(aborted=aborted).SerializeToString()

    async def _tokenize(self, data: bytes) -> bytes:
        request = parse(wire.TokenizeRequest, data)
        model = self._serving.model
        check_text("text", request.text, self._serving.limits.max_prompt_bytes)
        check_tokenize(request, has_encoder=model.max_source > 0)
        return await self._encoder.tokenize(request, model.max_context)

    async def _get_server_info(self, data: bytes) -> bytes:
        parse(wire.GetServerInfoRequest, data)
        serving = self._serving
        response = describe(serving)
        snapshot = serving.worker.snapshot()
        response.load.num_running = snapshot.num_running
        response.load.num_queued = snapshot.num_queued
        response.load.num_slots = snapshot.num_slots
        response.load.num_free_slots = snapshot.num_free_slots
        response.load.is_draining = self._is_draining
        if serving.certificate:
            response.certificate_json = json.dumps(dict(serving.certificate), sort_keys=True)
        return response.SerializeToString()


def _tenant(context: Context) -> str:
    """Return the tenant of a call, or raise RequestError where its metadata names an impossible one."""
    return tenant_of((key, value) for key, value in context.invocation_metadata() or ())
