"""After a step: slots of what ended are freed, then everyone is told.

Holds the worker's W1 and W2: one terminal event per request, and its slot free before it leaves.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.runtime.core.errors import (
    RequestError,
    RequestFailed,
    RequestQuarantined,
    ServingError,
)
from outrider.runtime.core.events import Event, Failed, Finished
from outrider.runtime.core.request import Ending, Request
from outrider.runtime.drafters.registry import Drafters
from outrider.runtime.loop.drafter_policy import SpeculationPolicy
from outrider.runtime.loop.event_queue import EventQueue
from outrider.runtime.loop.inbox import Inbox
from outrider.runtime.loop.result import StepResult
from outrider.runtime.loop.rows import LiveRows
from outrider.runtime.loop.totals import Totals

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finisher:
    """Ends requests, on the worker's thread; ``guard`` is the lock of the inbox."""

    rows: LiveRows
    inbox: Inbox
    guard: threading.Condition
    event_queue: EventQueue
    policy: SpeculationPolicy
    drafters: Drafters
    totals: Totals
    clock: Callable[[], float]

    def finish(self, result: StepResult) -> None:
        """Free the slots of what a step ended, then tell everyone."""
        if any(result.called.values()) or self.policy.breakers:
            self._note_drafters(result)
        ended = [one for one in result.progressed if one[2] is not None]
        lost: list[tuple[Request, Exception]] = []
        if ended or result.failed or result.alone or result.searched:
            leaving = [request for request, _, _ in ended]
            leaving += [request for request, _ in result.searched]
            leaving += [request for request, _ in (*result.failed, *result.alone)]
            lost = self._free(leaving)
        now = self.clock()
        self._count(result, now)
        self.event_queue.put(
            [(request, progressed) for request, progressed, _ in result.progressed]
        )
        for request, _, ending in ended:
            assert ending is not None
            self._end(request, _finished(request, ending, now))
        for request, finished in result.searched:
            self._end(request, replace(finished, times=request.timestamps.times(now)))
        if result.failed or result.alone:
            self.end_with_errors(_explained(result))
        if lost:
            self.end_with_errors(lost)

    def _count(self, result: StepResult, now: float) -> None:
        """Add a step that ended ``now`` to the totals.

        Tokens after a cut count nowhere.
        """
        totals = self.totals
        totals.step_count += 1
        totals.last_step_at = now
        if result.host_fallback_reason is not None:
            totals.host_fallback_reasons[result.host_fallback_reason] += 1
        for num_tokens, took_s in result.reads:
            totals.count_read(num_tokens, took_s)
        totals.num_target_passes += result.num_search_passes
        passes = []
        for request, progress, ending in result.progressed:
            trace = progress.trace
            if request.timestamps.first_at is None:
                request.timestamps.first_at = now
            totals.num_emitted += len(progress.tokens)
            totals.num_finished += ending is not None
            if not trace.is_prompt:
                passes.append((len(trace.draft_tokens), trace.num_accepted))
        for _, finished in result.searched:
            totals.num_emitted += finished.num_output
            totals.num_finished += 1
        by_position = totals.accepted_by_position
        for num_drafted, num_accepted in passes:
            totals.num_target_passes += 1
            totals.num_drafted += num_drafted
            totals.num_accepted += num_accepted
            by_position.extend([0] * (num_accepted - len(by_position)))
            for position in range(num_accepted):
                by_position[position] += 1

    def _note_drafters(self, result: StepResult) -> None:
        self.policy.note(result.called, self.clock())
        for name, error in result.called.items():
            if error is not None:
                logger.error("drafter %s failed; going on without", name, exc_info=error)

    def end_with_errors(self, endings: Sequence[tuple[Request, Exception]]) -> None:
        """End requests that hold a slot, or wait for one, each with its error."""
        while endings:
            lost = self._free([request for request, _ in endings])
            for request, error in endings:
                if not request.has_ended:
                    request.fail()
                self.totals.num_failed += 1
                if request.spec.beams is not None:  # others' tokens were counted step by step
                    self.totals.num_emitted += request.num_output
                failed = Failed(
                    error=error,
                    num_output=request.num_output,
                    times=request.timestamps.times(self.clock()),
                )
                self._end(request, failed)
            endings = lost

    def _free(self, requests: Sequence[Request]) -> list[tuple[Request, Exception]]:
        """Give slots back.

        Returns:
            Requests whose row could not be moved, with the error to end them with.
        """
        for request in requests:
            if request.slot is not None:
                self.drafters.forget(request.spec.internal_id)
        lost = self.rows.free(requests)
        return [(request, RequestFailed(new_error_id())) for request in lost]

    def _end(self, request: Request, event: Event) -> None:
        """Forget the request before it is told, so that whoever is told may use its name again."""
        self.policy.ended(request)
        self.event_queue.close(request, event)
        with self.guard:
            self.inbox.forget(request)


def _finished(request: Request, ending: Ending, now: float) -> Finished:
    return Finished(
        reason=ending.reason,
        stop=ending.stop,
        text=ending.text,
        num_prompt=request.spec.num_prompt_tokens,
        num_output=request.sequence.num_output,
        report=request.report(),
        num_cached=request.cache.num_cached,
        times=request.timestamps.times(now),
    )


def _explained(result: StepResult) -> list[tuple[Request, ServingError]]:
    """Return who ends with an error after a step, with the error; log the causes under its id.

    What the caller asked for and cannot have is told as it is, and is no line of the log.
    """
    error_id = new_error_id()
    refused = [
        (request, cause) for request, cause in result.failed if isinstance(cause, RequestError)
    ]
    failed = [one for one in result.failed if not isinstance(one[1], RequestError)]
    for request, cause in (*failed, *result.alone):
        name = request.spec.internal_id
        logger.error(
            "error id %s: request %s cannot go on",
            error_id,
            name,
            exc_info=cause,
            extra={"request_id": request.spec.request_id},
        )
    fault = RequestQuarantined if result.is_sound else RequestFailed
    return [
        *refused,
        *[(request, RequestFailed(error_id)) for request, _ in failed],
        *[(request, fault(error_id)) for request, _ in result.alone],
    ]


def new_error_id() -> str:
    """Return a name under which the log and the caller's error speak of the same thing."""
    return uuid.uuid4().hex[:16]
