"""After a step: slots of what ended are freed, then everyone is told.

Holds the worker's W1 and W2: one terminal event per request, and its slot free before it leaves.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence

from outrider.runtime.core.errors import RequestFailed
from outrider.runtime.core.params import Event, Failed, Finished
from outrider.runtime.core.request import Ending, Request
from outrider.runtime.drafters.registry import Drafters
from outrider.runtime.loop.drafter_policy import SpeculationPolicy
from outrider.runtime.loop.inbox import Inbox
from outrider.runtime.loop.outgoing import Outgoing
from outrider.runtime.loop.rows import LiveRows
from outrider.runtime.loop.step_parts import StepResult
from outrider.runtime.loop.totals import Totals

logger = logging.getLogger(__name__)


class Settlement:
    """Ends requests on the worker's thread.

    Args:
        rows: who holds which slot.
        inbox: who is to be told.
        guard: lock of the inbox.
        policy: learns which drafters failed and which requests ended.
        drafters: forget what ended.
        totals: counted into.
        outgoing: takes the events.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        rows: LiveRows,
        inbox: Inbox,
        guard: threading.Condition,
        policy: SpeculationPolicy,
        drafters: Drafters,
        totals: Totals,
        outgoing: Outgoing,
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._inbox = inbox
        self._guard = guard
        self._policy = policy
        self._drafters = drafters
        self._totals = totals
        self._outgoing = outgoing
        self._clock = clock

    def settle(self, result: StepResult) -> None:
        """Free the slots of what ended, then tell everyone."""
        if result.asked:
            self._policy.note(result.asked, self._clock())
        if result.host_fallback_reason is not None:
            self._totals.host_fallback_reasons[result.host_fallback_reason] += result.num_steps
        for name, error in result.asked.items():
            if error is not None:
                logger.error("drafter %s failed; going on without", name, exc_info=error)
        lost = self._free_ended(result)
        with self._guard:
            receivers = [self._inbox.deliver_to(request) for request, _, _ in result.progressed]
        for (request, progressed, ending), deliver in zip(
            result.progressed, receivers, strict=True
        ):
            self._totals.count(progressed)
            self._outgoing.put(deliver, progressed)
            if ending is not None:
                self._totals.num_finished += 1
                self._end(request, _finished(request, ending))
        for num_drafted, num_accepted in result.passes:
            self._totals.count_pass(num_drafted, num_accepted)
        for request, finished in result.searched:
            self._totals.num_finished += 1
            self._totals.num_emitted += finished.num_output
            self._end(request, finished)
        if result.failed:
            self.end_with_errors(self._explain(result))
        if lost:
            self.end_with_errors(lost)

    def _free_ended(self, result: StepResult) -> list[tuple[Request, Exception]]:
        """Give back the slots of what ended; the answer is that of ``_free``."""
        ended = [request for request, _, ending in result.progressed if ending is not None]
        ended += [request for request, _ in result.searched]
        ended += [request for request, _ in result.failed]
        return self._free(ended) if ended else []

    def _explain(self, result: StepResult) -> list[tuple[Request, Exception]]:
        error_id = new_error_id()
        cause = next((error for _, error in result.failed if error is not None), None)
        logger.error("the target failed; error id %s", error_id, exc_info=cause)
        return [(request, RequestFailed(error_id)) for request, _ in result.failed]

    def end_with_errors(self, endings: Sequence[tuple[Request, Exception]]) -> None:
        """End requests that hold a slot, or wait for one, each with its error."""
        while endings:
            lost = self._free([request for request, _ in endings])
            for request, error in endings:
                if not request.has_ended:
                    request.fail()
                self._totals.num_failed += 1
                self._end(request, Failed(error=error, num_output=request.num_output))
            endings = lost

    def _free(self, requests: Sequence[Request]) -> list[tuple[Request, Exception]]:
        """Give slots back.

        Returns:
            Requests whose row could not be moved, with the error to end them with.
        """
        for request in requests:
            if request.slot is not None:
                self._drafters.forget(request.spec.internal_id)
        lost = self._rows.free(requests)
        return [(request, RequestFailed(new_error_id())) for request in lost]

    def _end(self, request: Request, event: Event) -> None:
        """Forget the request before it is told, so that whoever is told may use its name again."""
        self._policy.ended(request)
        with self._guard:
            deliver = self._inbox.deliver_to(request)
            self._inbox.forget(request)
        self._outgoing.put(deliver, event)


def _finished(request: Request, ending: Ending) -> Finished:
    return Finished(
        reason=ending.reason,
        stop=ending.stop,
        text=ending.text,
        num_prompt=request.num_prompt,
        num_output=request.num_output,
        report=request.report(),
    )


def new_error_id() -> str:
    """A name under which the log and the caller's error speak of the same thing."""
    return uuid.uuid4().hex[:16]
