"""What callers use: held against their tenants' shares, counted, and written down.

One account per request, on the event loop: opened when it arrives, ended once, whatever becomes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from outrider.runtime.admission.quotas import Quotas
from outrider.runtime.core.errors import Hopeless, QuotaExceeded, ServingError
from outrider.runtime.core.options import check_range
from outrider.runtime.core.params import Finished, RequestSpec
from outrider.runtime.core.tenant import NO_RULES, TenantRules
from outrider.runtime.core.validate import GenerateFields
from outrider.runtime.serving.doors.audit import AuditEntry, AuditLog, host_of
from outrider.runtime.serving.outbox import Batch
from outrider.runtime.serving.status import code_of
from outrider.runtime.serving.watch.metrics import Metrics

OTHER = "other"
"""Label of the metrics of tenants that nobody has listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks.

    Attributes:
        tenant: whose request it is, as ``runtime.core.tenant`` reads it.
        is_known: whether that is certain enough to share anything within the tenant.
        remaining_s: seconds until the caller stops waiting; None where he does not say.
        rules: the tenant's share.
        key: what proved it, as of ``runtime.core.tenant.Identity``.
        peer: address of the caller, as gRPC spells it.
    """

    tenant: str = ""
    is_known: bool = True
    remaining_s: float | None = None
    rules: TenantRules = NO_RULES
    key: str = ""
    peer: str = ""


NOBODY = Caller()


class Ledger:
    """Accounts of one server.

    Args:
        metrics: counts what was refused, admitted and used.
        clock: monotonic seconds.
        audit: takes an entry of each request; None where nobody asks for it.
        is_listed: whether a tenant has a name in the metrics; None where no tenant has.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        audit: AuditLog | None = None,
        is_listed: Callable[[str], bool] | None = None,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.audit = audit
        self.quotas = Quotas()
        # Requests by tenant that are not queued yet, most of them since their texts are being tokenised.
        self.on_way: Counter[str] = Counter()
        self._is_listed = is_listed

    def open(self) -> Account:
        """Return the account of a request that has just arrived."""
        return Account(self)

    def refused(self, method: str, caller: Caller, error: ServingError) -> None:
        """Note a call that was refused before it was anybody's request."""
        self.metrics.refused.labels(reason=error.reason).inc()
        self.write("refused", method, caller, code_of(error).name, error.reason)

    def begin_call(self, method: str, caller: Caller) -> None:
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
        self, outcome: str, method: str, caller: Caller, code: str, reason: str, **more: object
    ) -> None:
        """Write an entry of the audit log, where there is one."""
        if self.audit is not None:
            self.audit.write(
                AuditEntry(
                    outcome=outcome,
                    method=method,
                    tenant=caller.tenant,
                    key=caller.key,
                    peer=host_of(caller.peer),
                    code=code,
                    reason=reason,
                    **more,  # type: ignore[arg-type]
                )
            )


class Account:
    """One request's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._began_s = ledger.clock()
        self._caller = NOBODY
        self._fields = GenerateFields()
        self._is_on_way = False
        self._num_prompt = self._num_output = 0

    def called_by(self, caller: Caller) -> None:
        """Note who asks."""
        self._caller = caller

    def begin(self, fields: GenerateFields) -> None:
        """Count a request that could be answered, before its texts are tokenised.

        Raises:
            RequestError: the tenant may not ask for such a priority.
            Hopeless: the caller has stopped waiting.
            QuotaExceeded: the tenant has used up what it may.
        """
        self._fields, caller, ledger = fields, self._caller, self._ledger
        rules = caller.rules
        check_range("priority", fields.priority, *rules.priorities)
        if caller.remaining_s is not None and caller.remaining_s <= 0.0:
            raise Hopeless
        if rules.max_queued is not None and ledger.on_way[caller.tenant] >= rules.max_queued:
            raise QuotaExceeded("max_queued", 1.0)
        ledger.quotas.begin(caller.tenant, rules, ledger.clock())
        ledger.on_way[caller.tenant] += 1
        self._is_on_way = True

    def arrived(self) -> None:
        """Note that the request is on its way no longer: it was queued, refused, or given up."""
        if self._is_on_way:
            self._is_on_way = False
            on_way, tenant = self._ledger.on_way, self._caller.tenant
            on_way[tenant] -= 1
            if not on_way[tenant]:
                del on_way[tenant]

    def admitted(self, spec: RequestSpec) -> None:
        """Count a request that was queued."""
        self._num_prompt = spec.num_prompt_tokens
        metrics = self._ledger.metrics
        metrics.admitted.inc()
        metrics.samples.inc(spec.num_samples)
        metrics.prompt_tokens.inc(spec.num_prompt_tokens)
        self._use(spec.num_prompt_tokens)

    def refused(self, error: ServingError) -> None:
        """Count a request that was not."""
        self._ledger.metrics.refused.labels(reason=error.reason).inc()
        self._end("refused", code_of(error).name, error.reason)

    def emitted(self, batch: Batch) -> None:
        """Count the tokens of an answer."""
        num_tokens = len(batch.tokens)
        if isinstance(batch.end, Finished) and batch.end.beams:
            num_tokens = batch.end.num_output
        self._num_output += num_tokens
        self._use(num_tokens)

    def ended(self, code: str, reason: str) -> None:
        """Count the end of a request that was queued."""
        self._ledger.metrics.finished.labels(code=code, reason=reason).inc()
        self._end("admitted", code, reason)

    def _use(self, num_tokens: int) -> None:
        caller, ledger = self._caller, self._ledger
        ledger.quotas.charge(caller.tenant, caller.rules, num_tokens, ledger.clock())
        if (label := ledger.label(caller.tenant)) is not None:
            ledger.metrics.tenant_tokens.labels(tenant=label).inc(num_tokens)

    def _end(self, outcome: str, code: str, reason: str) -> None:
        ledger, caller = self._ledger, self._caller
        if (label := ledger.label(caller.tenant)) is not None:
            ledger.metrics.tenant_requests.labels(tenant=label, outcome=outcome).inc()
        ledger.write(
            outcome,
            "Generate",
            caller,
            code,
            reason,
            request_id=self._fields.request_id,
            priority=self._fields.priority,
            prompt_tokens=self._num_prompt,
            output_tokens=self._num_output,
            ms=round((ledger.clock() - self._began_s) * 1000.0, 1),
        )
