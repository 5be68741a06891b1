"""One thread owns the engines and serves all requests.

Other threads reach it through ``submit``, ``cancel``, ``drain`` and ``stop``, which only leave word
under one lock; everything else happens between two steps, on the worker's thread. Invariants:

* W1  Every request that ``submit`` took gets exactly one terminal event.
* W2  A request's slot is free again before its terminal event is delivered.
* W3  ``runtime.loop.rows``: request i of the live ones holds slot i.

Where steps run on a device, the host has the device's time for all that does not depend on the answers
under way: it hands over the last step's events, lets in who found a free slot, and feeds the next step's
chunk of prompt behind the round (``runtime.loop.prefill``). On the CPU the next step begins with the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from outrider.engines.rounds import do_nothing
from outrider.runtime.admission.request_factory import RequestFactory
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import (
    DeadlineUnreachable,
    InternalError,
    RequestError,
    ServingError,
)
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.core.tenant import ANY_CLAIM, Claim
from outrider.runtime.core.text import Decoder
from outrider.runtime.drafters.model.prompt_end import PromptEndEngine
from outrider.runtime.grammar.base import MOST_FORCED, Constraints
from outrider.runtime.loop.beams.step import SearchParts, run_searches
from outrider.runtime.loop.drafter_policy import SpeculationPolicy
from outrider.runtime.loop.event_queue import Deliver, EventQueue
from outrider.runtime.loop.finish import Finisher, new_error_id
from outrider.runtime.loop.inbox import Group, Inbox, num_unfed
from outrider.runtime.loop.result import NOTHING_DONE, with_searches
from outrider.runtime.loop.rows import LiveRows
from outrider.runtime.loop.step import run_step
from outrider.runtime.loop.step_context import ServedEngines, StepContext, step_parts
from outrider.runtime.loop.totals import Heartbeat, Totals, WorkerSnapshot
from outrider.runtime.prefix_cache.reuse import PrefixCounts, Prefixes

__all__ = ["Worker", "WorkerSnapshot"]

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""Seconds beyond its timeout that ``stop`` waits for a step that is under way."""


class Worker:
    """Runs requests on one target and, where there is one, its draft.

    The engines stay the caller's to close, after ``stop``.

    Args:
        engines: what computes and samples.
        config: of the server.
        decoder: turns tokens into text.
        clock: monotonic seconds; deadlines are on it.
        on_beat: called on the worker's thread as a step does what makes it longer than its like.
        constraints: makes the constraints of answers; None where none are served.

    Attributes:
        heartbeat: signs of life of the thread.
        is_ready: whether there is an engine; here it is never replaced.
        has_changed_model: whether another process computes from files that have changed; here there is none.
        num_restarts: engines that another one has replaced.
    """

    is_ready = True
    has_changed_model = False
    num_restarts = 0

    def __init__(
        self,
        engines: ServedEngines,
        *,
        config: ServerConfig,
        decoder: Decoder,
        clock: Callable[[], float] = time.monotonic,
        on_beat: Callable[[], None] = do_nothing,
        constraints: Constraints | None = None,
    ) -> None:
        engines = engines.with_prompt_ends()
        self._clock = clock
        self._event_queue = EventQueue()
        self._on_beat = on_beat
        self.heartbeat = Heartbeat()
        self._parts = step_parts(
            engines,
            config,
            clock=clock,
            meanwhile=self._meanwhile,
            are_waiting=lambda: self._inbox.has_waiting,
            beat=self._beat,
        )
        limits = self._parts.limits
        self._policy = _speculation_policy(self._parts, config, clock)
        self._searching = SearchParts(
            target=engines.target,
            chunk=limits.prefill_chunk,
            decoder=decoder,
            beat=self._beat,
            clock=clock,
        )
        self._rows = _live_rows(engines, config, limits.prefill_chunk)
        # A span has room for the last judged token, those forced behind it, and a draft.
        max_behind = engines.target.limits.max_extend - 1 - limits.max_gamma
        self._factory = RequestFactory(
            limits=engines.target.limits,
            num_slots=self._rows.slots.num_slots,
            max_forced=min(MOST_FORCED, max_behind),
            decoder=decoder,
            resolve=self._policy.resolve_request,
            constraints=constraints,
        )
        self._totals = Totals()
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._inbox = Inbox(config, self._rows.slots)  # guarded by the condition
        self._hopeless: list[Request] = []
        self._finisher = Finisher(
            rows=self._rows,
            inbox=self._inbox,
            guard=self._wake,
            event_queue=self._event_queue,
            policy=self._policy,
            drafters=self._parts.drafters,
            totals=self._totals,
            clock=clock,
        )

    def start(self) -> None:
        """Start the thread that runs steps until ``stop``."""
        self._thread = threading.Thread(target=self._loop, name="outrider-worker", daemon=True)
        self._thread.start()

    def restart(self, complaint: str) -> bool:
        """Return False: an engine that hangs holds this process."""
        return False

    def is_queued(self, internal_id: str) -> bool:
        """Return whether a request waits for a slot; callable from any thread."""
        with self._wake:
            return self._inbox.is_queued(internal_id)

    def after_step(self, call: Callable[[], None]) -> None:
        """Call something on the worker's thread after each step's events; before ``start``."""
        self._event_queue.after_sending(call)

    def submit(self, spec: RequestSpec, deliver: Deliver) -> None:
        """Queue a request as a group of one; see ``submit_group``."""
        self.submit_group((spec,), (deliver,))

    def submit_group(self, specs: Sequence[RequestSpec], delivers: Sequence[Deliver]) -> None:
        """Queue completions of one prompt (``RequestSpec.samples``), all or none.

        The events of ``specs[i]`` go to ``delivers[i]``, on the worker's thread.

        Raises:
            ContextTooLong: the prompt leaves no room for a token.
            RequestError: more slots are needed than there are, or the constraint cannot be had.
            Draining: the server is shutting down.
            DuplicateRequestId: a request of this name is queued or running.
            DeadlineUnreachable: it would be answered too late.
            QuotaExceeded: too many requests of the tenant wait.
            Overloaded: the queue is full.
        """
        if len(specs) > self._rows.slots.num_slots:
            rule = f"must be at most {self._rows.slots.num_slots}, the slots of this server"
            raise RequestError("n", rule)
        now = self._clock()
        group: list[Request] = []
        for spec in specs:
            group.append(self._factory.make(spec, now, *group[:1]))
        try:
            with self._wake:
                self._inbox.put(group)
                for request, deliver in zip(group, delivers, strict=True):
                    self._event_queue.open(request, deliver)
                self._wake.notify_all()
        except ServingError:
            for request in group:
                self._policy.ended(request)
            raise

    def check_room(
        self, num_slots: int, num_tokens: int, num_ahead: int = 0, claim: Claim = ANY_CLAIM
    ) -> None:
        """Refuse a request that ``submit`` would refuse now; callable from any thread.

        Args:
            num_slots: that it takes.
            num_tokens: of its prompt, and of those ahead.
            num_ahead: requests that are on their way to the queue.
            claim: what its place in the queue goes by.

        Raises:
            Draining: the server is shutting down.
            DeadlineUnreachable: the request would be answered too late.
            QuotaExceeded: too many requests of the tenant wait.
            Overloaded: the queue is full.
        """
        now = self._clock()
        with self._wake:
            self._inbox.check_room(num_slots, num_tokens, num_ahead, claim=claim, now=now)

    def cancel(self, internal_id: str, error: Exception) -> None:
        """End a request with ``error`` before the next step; one that has ended is left alone."""
        with self._wake:
            self._inbox.cancel(internal_id, error)
            self._wake.notify_all()

    @property
    def max_beams(self) -> int:
        """Beams that a request may ask for."""
        return self._rows.slots.num_slots

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Drafters a request may ask for."""
        return tuple(self._parts.drafters)

    @property
    def guesser_names(self) -> tuple[str, ...]:
        """Those of them that may stand behind "model/"."""
        return self._parts.drafters.guessers

    @property
    def default_speculation(self) -> Speculation:
        """How a request that asks for nothing in particular is drafted for."""
        return self._policy.resolve(SpeculationParams())

    def takes(self, wanted: SpeculationParams) -> bool:
        """Return whether a drafter has room for what a request asks of it; callable from any thread."""
        return self._policy.takes(wanted)

    def drain(self) -> None:
        """Refuse new requests and end the queued ones; running ones go on."""
        with self._wake:
            self._inbox.close()
            self._wake.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """Drain, give running requests ``timeout_s``, end the rest, and end the thread.

        Returns:
            Whether everything ended; False when a step is stuck in a backend.
        """
        with self._wake:
            self._inbox.close(self._clock() + timeout_s)
            self._wake.notify_all()
        if self._thread is None:
            while self.run_step():
                pass
            return True
        self._thread.join(timeout_s + STOP_GRACE_S)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the thread has ended; after ``start``."""
        assert self._thread is not None
        self._thread.join()

    def snapshot(self) -> WorkerSnapshot:
        """Where the worker stands; callable from any thread."""
        with self._wake:
            num_queued, num_queued_tokens = self._inbox.queued()
        return self._totals.snapshot(
            num_running=len(self._rows.requests) + len(self._rows.searches),
            num_queued=num_queued,
            num_queued_tokens=num_queued_tokens,
            num_slots=self._rows.slots.num_slots,
            num_free_slots=self._rows.slots.num_free,
            is_draining=self._inbox.is_draining,
            num_kv_tokens=self._rows.num_kv_tokens,
            num_reading=sum(one.cache.num_unread > 0 for one in self._rows.all_requests),
            control=None
            if self._parts.gamma_controller is None
            else self._parts.gamma_controller.report(),
            prefixes=PrefixCounts() if self._rows.prefixes is None else self._rows.prefixes.counts,
        )

    def run_step(self) -> bool:
        """Do what was asked since the last step, then run one; False when there was nothing to run.

        For the worker's thread, or for tests and benchmarks that never call ``start``.
        """
        waits_for_device = False
        rows, policy = self._rows, self._policy
        began_s = now = self._clock()
        self.heartbeat.begin()
        has_run = False
        try:
            if now >= self._inbox.due_at:
                self._end_overdue(now)
            self._admit()
            self._end_hopeless()
            if not rows.requests and not rows.searches:
                return False
            has_run = True
            reading = [
                one for one in rows.all_requests if one.state in (State.READING, State.PREFILLING)
            ]
            num_unfed_before = sum(map(num_unfed, reading))
            self.heartbeat.reads_prompt = bool(reading)
            if policy.has_chosen:
                policy.begin(rows.requests)
            if policy.breakers:
                policy.pause(rows.requests, now)
            # Of its own: whoever is let in meanwhile has no part in this step.
            live = tuple(rows.requests)
            if self._rows.prefixes is not None:
                self._rows.prefixes.prepare(live)
            result = run_step(self._parts, live) if live else NOTHING_DONE
            if rows.searches:
                result = with_searches(result, run_searches(self._searching, rows.searches))
            if reading:
                num_fed = num_unfed_before - sum(map(num_unfed, reading))
                self._inbox.forecast.fed(num_fed, self._clock() - began_s)
            self._finisher.finish(result)
            # The next step follows at once, and will have time for this one's events.
            waits_for_device = result.host_fallback_reason == "" and bool(rows.requests)
        except Exception:  # the root of the thread: a bug ends requests, never the worker
            error_id = new_error_id()
            logger.exception("a step broke an invariant; error id %s", error_id)
            with self._wake:
                unanswered = self._inbox.admitted()  # some may have lost their slots already
            self._finisher.end_with_errors([(r, InternalError(error_id)) for r in unanswered])
        finally:
            if not has_run:  # who takes the events may ask for the heartbeat
                self.heartbeat.end(None)
            if not waits_for_device:
                self._event_queue.send()
            if has_run:
                took_s = self._clock() - began_s
                self._totals.count_step(took_s)
                self.heartbeat.end(took_s)
        return True

    def _end_overdue(self, now: float) -> None:
        """End whoever was cancelled or has no time left."""
        with self._wake:
            overdue = self._inbox.take_overdue(now)
        if self._rows.prefixes is not None and not self._inbox.is_draining:
            for request, _ in overdue:
                # Between two steps its caches are sound.
                self._rows.prefixes.keep(request)
        self._finisher.end_with_errors(overdue)

    def _meanwhile(self) -> None:
        """What the host does while the device runs a round; the next step is spared it."""
        self._event_queue.send()
        self._admit()
        self._parts.prompts.feed_ahead(self._rows.requests)

    def _beat(self) -> None:
        """Note that the step goes on with what makes it longer than its like."""
        self.heartbeat.begin()
        self._on_beat()

    def _admit(self) -> None:
        """Let in queued requests as far as slots are free; those whose turn is too late end between two steps."""
        if self._inbox.has_queued:
            now = self._clock()

            def let_in(group: Group) -> None:
                self._rows.admit(group)
                for request in group:
                    request.timestamps.admitted_at = now

            with self._wake:
                self._hopeless += self._inbox.admit(let_in, now)

    def _end_hopeless(self) -> None:
        """End whose turn came too late, and who has not ended otherwise."""
        hopeless, self._hopeless = self._hopeless, []
        endings = [
            (request, DeadlineUnreachable()) for request in hopeless if not request.has_ended
        ]
        if endings:
            self._finisher.end_with_errors(endings)

    def _loop(self) -> None:
        try:
            while self.run_step() or self._wait():
                pass
        except BaseException:  # nobody else would hear of it
            logger.critical("the worker's thread ended; nothing is served any more", exc_info=True)
            self.heartbeat.has_died = True

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the end has come."""
        with self._wake:
            while not self._inbox.has_work:
                if self._inbox.is_stopping:
                    return False
                self._wake.wait()
        return True


def _speculation_policy(
    parts: StepContext, config: ServerConfig, clock: Callable[[], float]
) -> SpeculationPolicy:
    gamma_controller = parts.gamma_controller
    return SpeculationPolicy(
        parts.drafters,
        config,
        parts.limits.max_gamma,
        can_adapt=gamma_controller is not None,
        judges_blocks=parts.rounds is None,
        elapsed=clock if gamma_controller is None else gamma_controller.elapsed,
    )


def _live_rows(engines: ServedEngines, config: ServerConfig, chunk: int) -> LiveRows:
    """Return rows in as many slots as all engines have, with a cache of prefixes where one is configured."""
    opened = engines.opened
    num_slots = min(config.max_running, *(engine.limits.max_batch for engine in opened))
    if not config.prefix_cache_bytes:
        return LiveRows(opened, num_slots, None)
    left_out = (
        engines.draft.left_out if isinstance(engines.draft, PromptEndEngine) else [0] * num_slots
    )
    # A head reads a text anew from the features that the target's slots keep.
    kept = [engine for engine in opened if not engine.limits.reads_features]
    prefixes = Prefixes(kept, config.prefix_cache_bytes, chunk, lambda slot: not left_out[slot])
    return LiveRows(opened, num_slots, prefixes)
