"""Enforces quotas and records metrics, access log and audit log per request.

One record per request, on the event loop: opened when it arrives, ended once, whatever becomes of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from outrider.runtime.admission.quotas import Quotas
from outrider.runtime.core.checks.rules import check_range
from outrider.runtime.core.errors import (
    DeadlineUnreachable,
    PermissionDenied,
    QuotaExceeded,
    ServingError,
    Unauthenticated,
)
from outrider.runtime.core.events import Finished, Times
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.observability.logs import ACCESS, begin_request, bounded
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.tracing import Ended, Span, Spans, trace_id_of
from outrider.runtime.serving.requests.client import ANONYMOUS, ClientIdentity
from outrider.runtime.serving.response_stream import Batch
from outrider.runtime.serving.security.audit import AuditEntry, AuditLog, host_of
from outrider.runtime.serving.status import code_of
from outrider.v1 import inference_pb2 as wire

LINES_PER_S = 10
"""Of refused strangers, in the log and in the audit log; the others are counted."""
OTHER = "other"
"""Label of the metrics of tenants that nobody has listed."""


class RequestAccounting:
    """Records of one server's requests.

    Args:
        metrics: counts what was refused, admitted and used.
        clock: monotonic seconds.
        audit: takes an entry of each request; None where nobody asks for it.
        is_listed: whether a tenant has a name in the metrics; None where no tenant has.
        has_access_lines: whether the log has a line of each request.
        spans: makes a span of each; None where nobody collects them.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        audit: AuditLog | None = None,
        is_listed: Callable[[str], bool] | None = None,
        has_access_lines: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.audit = audit
        self.quotas = Quotas()
        # Requests by tenant that are not queued yet, most of them since their texts are being tokenised.
        self.on_way: Counter[str] = Counter()
        self._is_listed = is_listed
        self._has_access_lines = has_access_lines
        self._stranger_lines = LineLimit(LINES_PER_S, clock)
        self.spans = spans

    def open(self) -> RequestRecord:
        """Return the record of a request that has just arrived."""
        return RequestRecord(self)

    def refused(self, method: str, caller: ClientIdentity, error: ServingError) -> None:
        """Note a call that was refused before it was anybody's request."""
        self.metrics.refused.labels(reason=error.reason).inc()
        ended = Ended(outcome="refused", code=code_of(error).name, reason=error.reason)
        num_left_out: int | None = 0
        if not caller.key and isinstance(error, (Unauthenticated, PermissionDenied)):
            num_left_out = self._stranger_lines.take()
        if num_left_out is not None:
            self.write(replace(caller, method=bounded(method)), ended, not_written=num_left_out)

    def begin_call(self, method: str, caller: ClientIdentity) -> None:
        """Count a call that is no request, and takes of its tenant's share as one does.

        Raises:
            QuotaExceeded: the tenant has used up what it may.
        """
        try:
            self.quotas.begin(caller.tenant, caller.rules, self.clock())
        except QuotaExceeded as error:
            self.refused(method, caller, error)
            raise

    def label(self, tenant: str) -> str | None:
        """Return what the metrics call a tenant; None where they have no tenants."""
        if self._is_listed is None:
            return None
        return tenant if self._is_listed(tenant) else OTHER

    def write(
        self,
        caller: ClientIdentity,
        ended: Ended,
        request_id: str = "",
        priority: int = 0,
        not_written: int = 0,
        trace_id: str = "",
    ) -> None:
        """Write what became of a request into the audit log and the server's, where they want it.

        ``request_id`` is the caller's name for it, ``not_written`` as of ``AuditEntry``. It may be written by whoever
        collects what callers left, so the names are not those of the context.
        """
        ms = round(ended.total_s * 1000.0, 1)
        if self.audit is not None:
            self.audit.write(
                AuditEntry(
                    outcome=ended.outcome,
                    method=caller.method,
                    tenant=caller.tenant,
                    key=caller.key,
                    peer=host_of(caller.peer),
                    code=ended.code,
                    reason=ended.reason,
                    request_id=request_id,
                    priority=priority,
                    prompt_tokens=ended.num_prompt,
                    output_tokens=ended.num_output,
                    ms=ms,
                    not_written=not_written,
                )
            )
        if self._has_access_lines and ACCESS.isEnabledFor(logging.INFO):
            fields = _access_fields(caller, ended) | {"ms": ms}
            if not_written:
                fields["not_written"] = not_written
            names = {"request_id": request_id, "trace_id": trace_id}
            known = {name: value for name, value in names.items() if value}
            ACCESS.info("request ended", extra={"fields": fields, **known})


def _access_fields(caller: ClientIdentity, ended: Ended) -> dict[str, object]:
    """Return what a line of the log says of a request beside its names; what is unknown is left out."""
    fields: dict[str, object] = {
        "dialect": caller.protocol,
        "method": bounded(caller.method),
        "tenant": bounded(caller.tenant),
        "key": bounded(caller.key),
        "peer": bounded(host_of(caller.peer)),
        "outcome": ended.outcome,
        "code": ended.code,
        "reason": ended.reason,
        "prompt_tokens": ended.num_prompt,
        "output_tokens": ended.num_output,
    }
    if ended.times is not None:
        fields["queue_ms"] = round(ended.times.queued_s * 1000.0, 1)
    if ended.first_token_s is not None:
        fields["first_token_ms"] = round(ended.first_token_s * 1000.0, 1)
    return fields


class LineLimit:
    """Lets so many lines through in a second, and counts the others."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._second, self._num, self._num_left_out = 0, 0, 0

    def take(self) -> int | None:
        """Return how many lines were left out before this one; None where this one is left out, too."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num = second, 0
        self._num += 1
        if self._num > self._most:
            self._num_left_out += 1
            return None
        num, self._num_left_out = self._num_left_out, 0
        return num


class RequestRecord:
    """The record of one request; log lines of its task carry its names from now on."""

    def __init__(self, accounting: RequestAccounting) -> None:
        self._accounting = accounting
        self._began_s = accounting.clock()
        self._names = begin_request()
        self._span: Span | None = None
        self._caller = ANONYMOUS
        self._request_id, self._priority = "", 0
        self._is_on_way = False
        self._spec: RequestSpec | None = None
        self._queued_at_s = 0.0
        self._num_output = 0
        self._first_token_s: float | None = None
        self._times: Times | None = None
        self._ends: list[Finished] = []

    def called_by(self, caller: ClientIdentity) -> None:
        """Note the client of the request."""
        self._caller = caller
        if self._accounting.spans is not None:
            self._span = self._accounting.spans.begin(caller.trace)
            self._names.trace_id = self._span.trace_id
        elif caller.trace:
            self._names.trace_id = trace_id_of(caller.trace)

    def begin(self) -> None:
        """Count a request among its tenant's, before it is parsed.

        Raises:
            DeadlineUnreachable: the caller has stopped waiting.
            QuotaExceeded: the tenant has used up what it may.
        """
        caller, accounting, rules = self._caller, self._accounting, self._caller.rules
        if caller.remaining_s is not None and caller.remaining_s <= 0.0:
            raise DeadlineUnreachable
        if rules.max_queued is not None and accounting.on_way[caller.tenant] >= rules.max_queued:
            raise QuotaExceeded("max_queued", 1.0)
        if not caller.is_counted:
            accounting.quotas.begin(caller.tenant, rules, accounting.clock())
        accounting.on_way[caller.tenant] += 1
        self._is_on_way = True

    def asked(self, request: wire.GenerateRequest) -> None:
        """Note what a request asks for.

        Raises:
            RequestError: the tenant may not ask for such a priority.
        """
        self._request_id, self._priority = request.request_id, request.priority
        self._names.request_id = request.request_id
        if self._span is not None:
            self._span.asked(request)
        check_range("priority", request.priority, *self._caller.rules.priorities)

    def arrived(self) -> None:
        """Note that the request is on its way no longer: it was queued, refused, or given up."""
        if self._is_on_way:
            self._is_on_way = False
            on_way, tenant = self._accounting.on_way, self._caller.tenant
            on_way[tenant] -= 1
            if not on_way[tenant]:
                del on_way[tenant]

    def admitted(self, spec: RequestSpec) -> None:
        """Count a request that was queued."""
        self._spec = spec
        self._names.request_id = spec.request_id
        self._queued_at_s = self._elapsed_s()
        metrics = self._accounting.metrics
        metrics.admitted.inc()
        metrics.samples.inc(spec.num_samples)
        metrics.prompt_tokens.inc(spec.num_prompt_tokens)
        self._use(spec.num_prompt_tokens)

    def refused(self, error: ServingError) -> None:
        """Count a request that was not."""
        self._accounting.metrics.refused.labels(reason=error.reason).inc()
        self._end("refused", code_of(error).name, error.reason)

    def emitted(self, batch: Batch) -> None:
        """Count the tokens of an answer, and note how a completion ended."""
        num_tokens, end = len(batch.tokens), batch.end
        if end is not None:
            self._times = _joined(self._times, end.times)
            if isinstance(end, Finished):
                self._ends.append(end)
                if end.beams:
                    num_tokens = end.num_output
        if self._first_token_s is None and num_tokens:
            self._first_token_s = self._elapsed_s()
        self._num_output += num_tokens
        self._use(num_tokens)

    def made(self, num_tokens: int) -> None:
        """Charge what no message took of the tokens that were made: who does not read pays for his work, too."""
        num_unsent = num_tokens - self._num_output
        if num_unsent > 0:
            self._num_output += num_unsent
            self._use(num_unsent)

    def ended(self, code: str, reason: str) -> None:
        """Count the end of a request that was queued."""
        metrics, spec, times = self._accounting.metrics, self._spec, self._times
        metrics.finished.labels(code=code, reason=reason).inc()
        if times is not None:
            metrics.requests.count_queued(times)
            if spec is not None and len(self._ends) == spec.num_samples:
                metrics.requests.count_answered(spec, times, self._num_output)
        self._end("admitted", code, reason)

    def _elapsed_s(self) -> float:
        return self._accounting.clock() - self._began_s

    def _use(self, num_tokens: int) -> None:
        caller, accounting = self._caller, self._accounting
        accounting.quotas.charge(caller.tenant, caller.rules, num_tokens, accounting.clock())
        if (label := accounting.label(caller.tenant)) is not None:
            accounting.metrics.tenant_tokens.labels(tenant=label).inc(num_tokens)

    def _end(self, outcome: str, code: str, reason: str) -> None:
        accounting, caller, spec = self._accounting, self._caller, self._spec
        if (label := accounting.label(caller.tenant)) is not None:
            accounting.metrics.tenant_requests.labels(tenant=label, outcome=outcome).inc()
        ended = Ended(
            outcome=outcome,
            code=code,
            reason=reason,
            total_s=self._elapsed_s(),
            num_prompt=0 if spec is None else spec.num_prompt_tokens,
            num_output=self._num_output,
            spec=spec,
            queued_at_s=self._queued_at_s,
            first_token_s=self._first_token_s,
            times=self._times,
            ends=tuple(self._ends),
        )
        if self._span is not None:
            self._span.ended(ended)
        accounting.write(
            caller, ended, self._request_id, self._priority, trace_id=self._names.trace_id
        )


def _joined(times: Times | None, others: Times | None) -> Times | None:
    """Return the times of completions together: to the first token of any of them, and to the last one's end."""
    if times is None or others is None:
        return times or others
    prefill_s = min(times.prefill_s, others.prefill_s)
    inference_s = max(one.prefill_s + one.decode_s for one in (times, others))
    return replace(times, prefill_s=prefill_s, decode_s=inference_s - prefill_s)
