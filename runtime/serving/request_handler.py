"""Handles the requests of all protocols: admits a request, queues it, streams its answer.

Every protocol brings an ``ApiRequest`` for each of its requests: a parser in front, a sink behind. Validation,
limits, tenants, metrics, the drain and the one end of every request are here; no protocol touches the worker. What a
protocol answers where a ``ServingError`` is raised is a table of its own (``runtime.serving.status`` is gRPC's).
Clean-up is in ``finally`` only, since a disconnect may raise any exception of the transport.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.runtime.core import errors
from outrider.runtime.core.checks.rules import check_abort_ids
from outrider.runtime.core.drafting import scope_of
from outrider.runtime.core.events import Failed, Finished, FinishReason
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.tenant import Claim
from outrider.runtime.grammar.compile_queue import GrammarCompileQueue
from outrider.runtime.serving.accounting import RequestAccounting, RequestRecord
from outrider.runtime.serving.chat.answer import AnswerReader, answer_reader
from outrider.runtime.serving.encoding import RequestEncoder
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.metrics import StreamCounts
from outrider.runtime.serving.requests.checks import check_request
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.spec import (
    Admission,
    build_spec,
    grammar_of,
    has_search,
    num_results,
)
from outrider.runtime.serving.response_stream import (
    Batch,
    EventDispatcher,
    GroupResponseStream,
    ResponseStream,
)
from outrider.runtime.serving.status import code_of
from outrider.runtime.serving.tokenization import INLINE_TEXT, TokenizationQueue, Turns
from outrider.v1 import inference_pb2 as wire

# Seconds past a deadline that the worker gets to end a request itself, between two steps.
LATE_S = 1.0


class ApiRequest(Protocol):
    """One request of a protocol: its parser, and where its answer goes."""

    @property
    def default_max_tokens(self) -> int | None:
        """The protocol's own default of max_tokens; None for the server's."""
        ...

    def client(self) -> ClientIdentity:
        """Return who asks; called before ``message``, and behind it, when it may know more of his deadline.

        Raises:
            ServingError: nobody can be told.
        """
        ...

    def message(self) -> wire.GenerateRequest:
        """Return what is asked for, unchecked and the handler's to change; called once, where the server is open.

        Raises:
            ServingError: the request says nothing that could be asked.
        """
        ...

    def begin(self, spec: RequestSpec) -> None:
        """Note that the request is in the queue, as ``spec``; called once, before ``write``.

        Of several completions it is the first's; the seeds of the others are ``core.params.sample_seed``.
        """
        ...

    async def write(self, batch: Batch) -> None:
        """Send what was answered, as one message; the last batch of each completion has a ``Finished`` end.

        ``complete`` raises failures instead: where one completion fails, all end.
        """
        ...


class _Live(NamedTuple):
    """A request that has not ended, as the worker has it, one per completion, and where its events go."""

    samples: Sequence[RequestSpec]
    stream: ResponseStream | GroupResponseStream
    submitted_s: float


class RequestHandler:
    """Takes requests for one served model, on the event loop; each has a record in ``accounting``."""

    def __init__(self, serving: LoadedModel, accounting: RequestAccounting) -> None:
        self._serving = serving
        self._rules = serving.rules
        self._accounting = accounting
        # By tenant and the caller's id, while the request is live.
        self._live: dict[tuple[str, str], _Live] = {}
        # Whose callers have gone, until the worker has ended them: by internal id.
        self._leaving: dict[str, _Live] = {}
        self._has_failed = False
        self._is_draining = False
        self._has_changed_model = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_cut = 0
        self._texts, short_chats = (
            TokenizationQueue(
                max_queued=serving.config.max_queued,
                max_queued_tokens=serving.config.max_queued_tokens,
                retry_after_s=serving.config.retry_after_s,
            )
            for _ in range(2)
        )
        self._turns = Turns()
        self._encoder = RequestEncoder(
            serving.codec,
            self._texts,
            short_chats,
            serving.chats,
            serving.model,
            serving.limits.max_prompt_bytes,
        )
        self._grammars = GrammarCompileQueue(serving.grammars, serving.config.retry_after_s)
        self._dispatcher = EventDispatcher(asyncio.get_running_loop())
        serving.worker.after_step(self._dispatcher.send)

    def close_admission(self) -> None:
        """Answer new requests with DRAINING from now on; the other methods still work."""
        self._is_draining = True

    def check_open(self) -> None:
        """Refuse where no request is taken now.

        Raises:
            ServingError: says why.
        """
        if self._has_changed_model:
            raise errors.ModelChanged
        if self._is_draining:
            raise errors.Draining
        if self._has_failed:
            raise errors.EngineRestart

    def end_overdue(self) -> None:
        """End streams whose deadline or queue timeout is well past: their worker is stuck in a step.

        Those whose callers have left stay until the step ends, or the watchdog ends it: what it makes is charged.
        """
        worker, config = self._serving.worker, self._serving.config
        now_s = self._serving.clock() - LATE_S
        for live in self._live.values():
            spec, waited_s = live.samples[0], now_s - live.submitted_s
            if spec.deadline_s is not None and now_s >= spec.deadline_s:
                live.stream.cut(errors.DeadlineExceeded(live.stream.num_tokens))
            elif waited_s > config.queue_timeout_s and worker.is_queued(spec.internal_id):
                live.stream.cut(errors.QueueTimeout(waited_s))

    def fail(self) -> None:
        """End all streams, and refuse new ones: the worker is gone."""
        self._has_failed = True
        for live in (*self._live.values(), *self._leaving.values()):
            live.stream.cut(errors.EngineRestart(live.stream.num_tokens))

    def refuse_changed_model(self) -> None:
        """Answer new requests with MODEL_INTEGRITY from now on."""
        self._has_changed_model = True

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_draining

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

    async def complete(self, asked: ApiRequest) -> None:
        """Answer one request, to its end.

        Raises:
            ServingError: it was refused, it failed, or the caller read too slowly.
        """
        record = self._accounting.open()
        try:
            spec, echo_prefix, reader = await self._admit(asked, record)
            live = self._submit(spec, echo_prefix)
            record.admitted(spec)
        except errors.ServingError as error:
            record.refused(error)
            raise
        except asyncio.CancelledError:
            record.refused(errors.Cancelled("client"))
            raise
        except Exception:  # a bug: whoever answers gives it an id
            record.refused(errors.InternalError(""))
            raise
        finally:
            record.arrived()
        code, reason = "CANCELLED", "CLIENT_CANCELLED"
        try:
            asked.begin(spec)
            finish = await self._stream(asked, live, record, reader)
            code, reason = "OK", finish.value
        except errors.ServingError as error:
            code, reason = code_of(error).name, error.reason
            raise
        finally:
            is_cut = reason in (errors.DrainDeadline.reason, errors.EngineRestart.reason)
            self._num_cut += self._is_draining and is_cut
            del self._live[spec.tenant, spec.request_id]
            self._leaving[spec.internal_id] = live
            if not live.stream.is_ended:
                self._cancel(live, errors.Cancelled("client"))
                # Those that an interval keeps back were made, too.
                self._dispatcher.collect()
            # What the step makes that the worker is in is charged, too.
            live.stream.when_over(lambda: self._close(live, record, code, reason))

    def encoder_of(self, tenant: str) -> RequestEncoder:
        """Return who works on a tenant's texts."""
        return self._encoder.of(tenant)

    def encoder_for(self, method: str, caller: ClientIdentity) -> RequestEncoder:
        """Return who tokenises texts of a call that is no request; the call takes of its tenant's share.

        Raises:
            QuotaExceeded: the tenant has used up what it may.
        """
        self._accounting.begin_call(method, caller)
        return self._encoder.of(caller.tenant)

    def abort(self, request_ids: Sequence[str], tenant: str) -> list[str]:
        """End a tenant's live requests by the caller's ids; return those that were live.

        Raises:
            RequestError: too many ids, none, or impossible ones.
        """
        check_abort_ids(request_ids, self._serving.limits.max_abort_ids)
        aborted = [one for one in dict.fromkeys(request_ids) if (tenant, one) in self._live]
        for request_id in aborted:
            self._cancel(self._live[tenant, request_id], errors.Cancelled("abort"))
        return aborted

    def _cancel(self, live: _Live, error: errors.Cancelled) -> None:
        for spec in live.samples:
            self._serving.worker.cancel(spec.internal_id, error)

    async def _admit(
        self, asked: ApiRequest, record: RequestRecord
    ) -> tuple[RequestSpec, str, AnswerReader | None]:
        """Check a request and encode its texts.

        Returns:
            The request as the queue takes it, the text it begins with, and what reads its answer's parts.
        """
        serving = self._serving
        client = asked.client()
        record.called_by(client)
        self.check_open()
        record.begin()
        await self._turns.take()
        request = asked.message()
        rules, defaults = self._rules, serving.defaults
        check_request(request, defaults.fill(request), rules)
        record.asked(request)
        admission = self._admission(asked.client(), asked.default_max_tokens)
        self._check_room(request, admission)
        encoder = self._encoder.of(client.tenant)
        texts = await encoder.encode(request)
        if (grammar := grammar_of(request, rules, client.tenant, texts.prompt)) is not None:
            await self._grammars.prepare(grammar)
        spec = build_spec(request, texts, admission, rules, defaults)
        if not request.echo:
            return spec, "", answer_reader(request, rules.answers, texts.prompt)
        if request.HasField("text"):
            return spec, request.text, None
        skips_special = spec.skip_special_tokens
        echoed = await encoder.decode(texts.prompt, skip_special_tokens=skips_special)
        return spec, echoed, None

    def _admission(self, client: ClientIdentity, default_max_tokens: int | None) -> Admission:
        serving, remaining_s = self._serving, client.remaining_s
        budget_s = serving.limits.max_request_s
        if remaining_s is not None:
            budget_s = min(budget_s, remaining_s)
        known = client.tenant if client.is_known else None
        return Admission(
            internal_id=uuid.uuid4().hex,
            seed=secrets.randbits(63),
            deadline_s=serving.clock() + budget_s,
            client=client,
            cache_scope=scope_of(serving.config.prefix_cache_scope, known),
            default_max_tokens=default_max_tokens,
        )

    def _check_room(self, request: wire.GenerateRequest, admission: Admission) -> None:
        """Refuse what the queue has no room for before it is tokenised, where that takes time or others are ahead.

        Prompts on their way count as if they were there.
        """
        client = admission.client
        num_ahead, num_tokens = self._texts.prompts_of(client.tenant)
        is_quick = request.ByteSize() < INLINE_TEXT and grammar_of(request, self._rules) is None
        if request.HasField("tokens") or (not num_ahead and is_quick):
            return
        claim = Claim(
            tenant=client.tenant,
            priority=request.priority,
            deadline_s=admission.deadline_s,
            rules=client.rules,
        )
        num_slots = 1 if has_search(request) else num_results(request)
        self._serving.worker.check_room(num_slots, num_tokens + 1, num_ahead, claim)

    def _submit(self, spec: RequestSpec, echo_prefix: str) -> _Live:
        """Queue a request and register the caller's id; both happen or neither."""
        if (spec.tenant, spec.request_id) in self._live:
            raise errors.DuplicateRequestId
        # Since it was admitted, its texts were on their way.
        self.check_open()
        samples, has_events = spec.samples(), asyncio.Event()
        streams = [self._response_stream(sample, has_events, echo_prefix) for sample in samples]
        self._serving.worker.submit_group(samples, [one.deliver for one in streams])
        stream = streams[0] if len(streams) == 1 else GroupResponseStream(streams, has_events)
        live = _Live(samples, stream, self._serving.clock())
        self._live[spec.tenant, spec.request_id] = live
        self._idle.clear()
        return live

    def _response_stream(
        self, spec: RequestSpec, has_events: asyncio.Event, echo_prefix: str
    ) -> ResponseStream:
        worker, config = self._serving.worker, self._serving.config
        return ResponseStream(
            self._dispatcher,
            config.max_unsent_chunks,
            lambda: worker.cancel(spec.internal_id, errors.SlowConsumer()),
            interval_s=config.message_interval_s,
            index=spec.sample,
            has_events=has_events,
            echo_prefix=echo_prefix,
        )

    async def _stream(
        self,
        asked: ApiRequest,
        live: _Live,
        record: RequestRecord,
        reader: AnswerReader | None,
    ) -> FinishReason:
        """Hand batches to a request's sink until its request ends; return the reason of the completion that ends last.

        Raises:
            ServingError: the request failed, or the caller read too slowly.
        """
        # One timeout for all messages costs a third of one for each.
        try:
            async with asyncio.timeout(None) as stall:
                return await self._write(asked, live, record, reader, stall)
        except TimeoutError as error:
            raise errors.SlowConsumer from error

    async def _write(
        self,
        asked: ApiRequest,
        live: _Live,
        record: RequestRecord,
        reader: AnswerReader | None,
        stall: asyncio.Timeout,
    ) -> FinishReason:
        loop, stall_s = asyncio.get_running_loop(), self._serving.config.stall_timeout_s
        stream, num_open = live.stream, len(live.samples)
        count = StreamCounts(self._accounting.metrics, self._serving.clock, num_open).count
        while True:
            batch = await stream.take()
            end = batch.end
            record.emitted(batch)
            if reader is not None:
                batch = reader.read(batch)
            if batch.tokens or not isinstance(end, Failed):
                # Counted while the message is on its way.
                loop.call_soon(count, batch)
                for part in batch.parts() if batch.prompt else (batch,):
                    stall.reschedule(loop.time() + stall_s)
                    await asked.write(part)
                stall.reschedule(None)
            if isinstance(end, Failed):
                raise end.error
            if isinstance(end, Finished):
                num_open -= 1
                if num_open == 0:
                    return end.reason

    def _close(self, live: _Live, record: RequestRecord, code: str, reason: str) -> None:
        """Charge and note a request for which the worker makes nothing more."""
        del self._leaving[live.samples[0].internal_id]
        record.made(live.stream.num_tokens)
        record.ended(code, reason)
        if not self._live and not self._leaving:
            self._idle.set()
