"""The server's side of an engine in a process of its own: a worker that survives its engine.

When the engine's process ends or hangs, another one is started. Requests that have emitted nothing are given to it, the
others end with ``EngineRestart``: their tokens were sent, and what followed is lost. Invariant:

* K1  Every request that ``submit`` took gets exactly one terminal event, whatever becomes of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from outrider.runtime.core.errors import Draining, EngineRestart, Overloaded
from outrider.runtime.core.events import Event, Failed, Finished, Progressed, PromptToken
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Speculation
from outrider.runtime.core.scheduler import num_to_admit
from outrider.runtime.core.tenant import ANY_CLAIM, Claim
from outrider.runtime.loop.event_queue import Deliver
from outrider.runtime.loop.totals import Heartbeat, WorkerSnapshot
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.engine_process.messages import (
    Beat,
    Cancel,
    Changed,
    Declined,
    Drain,
    FromChild,
    Opened,
    ScoredPiece,
    Start,
    StepEvents,
    Stop,
    Submit,
)
from outrider.runtime.serving.engine_process.process import Engines
from outrider.runtime.serving.factory import grammar_compiler
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec

MOST_TRIES = 2
"""Engines that a request may be given to: one that two of them had when they died may be why."""
STOP_GRACE_S = 10.0
"""Seconds beyond its timeout that ``stop`` waits for a step that is under way."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unfinished:
    """A request that awaits its terminal event.

    Attributes:
        cancelled: the error that somebody wants it to end with.
        scored: pieces of its prompt that came ahead of its first event, and are delivered with that.
    """

    spec: RequestSpec
    deliver: Deliver
    num_output: int = 0
    num_tries: int = 1
    cancelled: Exception | None = None
    scored: list[PromptToken] = field(default_factory=list)

    def end(self, error: Exception) -> None:
        """Deliver the terminal event of a request that fails."""
        self.emit(Failed(error=error, num_output=self.num_output))

    def emit(self, event: Event) -> None:
        """Deliver an event."""
        try:
            self.deliver(event)
        except Exception:  # a receiver that is gone must not end its neighbours
            log.exception("an event could not be delivered")

    def lost(self) -> EngineRestart:
        """Return what a request ends with that no engine goes on with."""
        return EngineRestart(self.num_output)


class IsolatedWorker:
    """A worker in another process, with the methods of ``runtime.loop.worker.Worker`` that serving calls.

    Args:
        engines: starts it, and the ones after it.

    Attributes:
        opened: what the first process said of the bundle.
        heartbeat: signs of life; a step is what happens between two messages while requests are unfinished.
        is_ready: whether there is an engine that takes requests.
        num_restarts: processes that another one has replaced.
        has_changed_model: whether a file that engines compute from has changed.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        # Guards the requests, and which process they are given to.
        self._lock = threading.RLock()
        # By internal id, oldest first: so the engine's queue is behind those that hold its slots.
        self._unfinished: dict[str, _Unfinished] = {}
        self._calls: list[Callable[[], None]] = []
        self._is_draining = self.is_ready = False
        self._heard_s = 0.0
        self._thread: threading.Thread | None = None
        self.heartbeat = Heartbeat()
        self.num_restarts = 0
        self.has_changed_model = False
        self._engine, self.opened = engines.first()
        self._snapshot = self.opened.snapshot

    def start(self) -> None:
        """Have the engine run steps, and listen to it, until ``stop``."""
        self._engine.send(Start())
        self.is_ready = True
        self._thread = threading.Thread(target=self._listen, name="outrider-engine", daemon=True)
        self._thread.start()

    def after_step(self, call: Callable[[], None]) -> None:
        """Call something after each step's events; before ``start``."""
        self._calls.append(call)

    def submit(self, spec: RequestSpec, deliver: Deliver) -> None:
        """Give a request to the engine as a group of one; see ``submit_group``."""
        self.submit_group((spec,), (deliver,))

    def submit_group(self, specs: Sequence[RequestSpec], delivers: Sequence[Deliver]) -> None:
        """Give completions of one prompt to the engine; a refusal comes as the terminal event of each.

        Raises:
            EngineRestart: there is no engine at present.
            Draining: the server is shutting down.
        """
        with self._lock:
            self._check_open()
            if not self._unfinished:
                self.heartbeat.begin()
                self._heard_s = time.monotonic()
            for spec, deliver in zip(specs, delivers, strict=True):
                self._unfinished[spec.internal_id] = _Unfinished(spec, deliver)
            self.heartbeat.reads_prompt = True
            self._engine.send(Submit(specs))

    def check_room(
        self, num_slots: int, num_tokens: int, num_ahead: int = 0, claim: Claim = ANY_CLAIM
    ) -> None:
        """Refuse a request for which the engine's queue has clearly no room; the engine itself counts exactly.

        Raises:
            EngineRestart: there is no engine at present.
            Draining: the server is shutting down.
            Overloaded: the queue is full.
        """
        config = self.opened.config
        with self._lock:
            self._check_open()
            groups = self._groups()
        # As the engine's inbox counts: a group needs its slots at once, and is one request of the queue.
        num_needed = [sum(spec.num_slots for spec in group) for group in groups]
        num_left = self.opened.snapshot.num_slots - sum(num_needed)
        if num_ahead + num_slots <= num_left:
            return  # free slots await it
        waiting = groups[num_to_admit(num_needed, self.opened.snapshot.num_slots) :]
        num_waiting = len(waiting) + max(0, num_ahead - max(0, num_left))
        num_tokens += sum(group[0].num_queued_tokens for group in waiting)
        by_tenant = Counter(group[0].tenant for group in waiting)
        if max(by_tenant.values(), default=0) > by_tenant[claim.tenant] + 1:
            return  # somebody else may have to make room
        if num_waiting >= config.max_queued or num_tokens > config.max_queued_tokens:
            raise Overloaded(config.retry_after_s)

    def _groups(self) -> list[tuple[RequestSpec, ...]]:
        """Return what is left of every group, oldest first."""
        specs = [one.spec for one in self._unfinished.values()]
        groups = groupby(specs, key=lambda spec: (spec.tenant, spec.request_id))
        return [tuple(group) for _, group in groups]

    def _check_open(self) -> None:
        if self._is_draining:
            raise Draining
        if not self.is_ready:
            raise EngineRestart

    def cancel(self, internal_id: str, error: Exception) -> None:
        """End a request with ``error`` before the next step; one that has ended is left alone."""
        with self._lock:
            if (one := self._unfinished.get(internal_id)) is None:
                return
            if self.is_ready:
                # The engine may end before it reads this; no other one is to serve the request.
                one.cancelled = one.cancelled or error
                self._engine.send(Cancel(internal_id, error))
                return
            del self._unfinished[internal_id]
            one.end(error)
        self._call_after_step()

    def is_queued(self, internal_id: str) -> bool:
        """Return whether a request waits for an engine, or clearly for a slot; the engine itself knows exactly."""
        with self._lock:
            one = self._unfinished.get(internal_id)
            if one is None or one.num_output:
                return False
            # Whatever the order in which slots are given: who has emitted something and has not ended holds its own.
            held = (other.spec.num_slots for other in self._unfinished.values() if other.num_output)
            num_left = self.opened.snapshot.num_slots - sum(held)
            return not self.is_ready or one.spec.num_slots > num_left

    @property
    def default_speculation(self) -> Speculation:
        """How a request that asks for nothing in particular is drafted for."""
        return self.opened.speculation

    def snapshot(self) -> WorkerSnapshot:
        """Where the worker stood not long ago; callable from any thread."""
        return replace(self._snapshot, is_draining=self._is_draining)

    def drain(self) -> None:
        """Refuse new requests and end those without a slot; running ones go on, unless their engine ends."""
        with self._lock:
            self._is_draining = True
            if self.is_ready:
                self._engine.send(Drain())
            else:
                self._end_all(lambda one: one.lost() if one.num_output else Draining())
        self._engines.close()

    def stop(self, timeout_s: float) -> bool:
        """Drain, give running requests ``timeout_s``, end the rest, and end the engine.

        Returns:
            Whether everything ended; False where the engine had to be killed.
        """
        self.drain()
        # Nothing replaces it any more.
        engine = self._engine
        engine.send(Stop(timeout_s))
        if self._thread is None:
            engine.end()
            return True
        self._thread.join(timeout_s + STOP_GRACE_S)
        has_ended = not self._thread.is_alive()
        engine.kill()
        self._thread.join(STOP_GRACE_S)
        return has_ended

    def restart(self, complaint: str) -> bool:
        """End the engine, which hangs; called again it leaves it no choice. False where none will follow."""
        with self._lock:
            if self.heartbeat.has_died:
                return False
            if self.is_ready:
                log.critical("the engine hangs: %s; starting another", complaint)
                self.is_ready = False
                self._engine.abort()
            else:
                self._engine.kill()
        return True

    def _listen(self) -> None:
        """Take the engines' messages, one after the other, until none is wanted or too many of them have failed."""
        try:
            is_going_on = True
            while is_going_on:
                for message in self._engine.messages():
                    self._take(message)
                if code := self._engine.end():
                    log.error("the engine's process ended: %d", code)
                self._lose()
                is_going_on = self._replace()
            self.heartbeat.has_died = self._engines.has_given_up
        except BaseException:  # nobody else would hear of it
            log.critical("the engine's listener ended", exc_info=True)
            self.heartbeat.has_died = True
        finally:
            with self._lock:
                self.is_ready = False
                self._end_all(_Unfinished.lost)

    def _take(self, message: FromChild) -> None:
        with self._lock:
            match message:
                case StepEvents():
                    self._take_step(message)
                case ScoredPiece(internal_id, prompt):
                    if (one := self._unfinished.get(internal_id)) is not None:
                        one.scored += prompt
                    return
                case Beat() if self._unfinished:
                    self.heartbeat.begin()
                case Declined(internal_id, error):
                    if (one := self._unfinished.pop(internal_id, None)) is not None:
                        one.end(error)
                    self._note_prompts()
                    if not self._unfinished:
                        self.heartbeat.end(None)
                case Changed():
                    self.has_changed_model = True
        self._call_after_step()

    def _take_step(self, message: StepEvents) -> None:
        now_s = time.monotonic()
        has_stepped = message.has_stepped and self.heartbeat.is_stepping
        self.heartbeat.end(now_s - self._heard_s if has_stepped else None)
        self._heard_s = now_s
        self._snapshot = message.snapshot or self._snapshot
        for internal_id, event in message.events:
            if (one := self._unfinished.get(internal_id)) is None:
                continue
            if isinstance(event, Progressed):
                one.num_output += len(event.tokens)
                if one.scored:
                    event = replace(event, prompt=(*one.scored, *event.prompt))
                    one.scored.clear()
            else:
                del self._unfinished[internal_id]
            if isinstance(event, (Progressed, Finished)):
                self._engine.has_served = True
            one.emit(event)
        self._note_prompts()
        if self._unfinished:
            self.heartbeat.begin()

    def _note_prompts(self) -> None:
        self.heartbeat.reads_prompt = any(one.num_output == 0 for one in self._unfinished.values())

    def _lose(self) -> None:
        """End the requests that the next engine cannot serve, after one has ended."""
        with self._lock:
            self.is_ready = False
            self.heartbeat.end(None)
            for internal_id, one in list(self._unfinished.items()):
                is_lost = one.num_output or one.num_tries >= MOST_TRIES or self._is_draining
                if one.cancelled or is_lost:
                    del self._unfinished[internal_id]
                    one.end(one.cancelled or one.lost())
                else:
                    one.num_tries += 1
                    one.scored.clear()
        self._call_after_step()

    def _replace(self) -> bool:
        """Start another engine and give it the requests that wait; False where there is none."""
        following = self._engines.next(self._engine)
        if following is None:
            return False
        engine, opened = following
        with self._lock:
            if self._is_draining:
                engine.end()
                return False
            self._engine, self._snapshot = engine, opened.snapshot
            self.heartbeat.took_s = Heartbeat().took_s
            self.num_restarts += 1
            engine.send(Start())
            for group in self._groups():
                engine.send(Submit(group))
            if self._unfinished:
                self.heartbeat.begin()
            self._heard_s = time.monotonic()
            self.is_ready = True
        log.info("another engine is serving")
        return True

    def _end_all(self, error_of: Callable[[_Unfinished], Exception]) -> None:
        for one in self._unfinished.values():
            one.end(error_of(one))
        self._unfinished.clear()
        self._call_after_step()

    def _call_after_step(self) -> None:
        for call in self._calls:
            call()


def open_isolated(root: Path, options: ServeOptions) -> LoadedModel:
    """Return a bundle's worker with its engines in a process of their own, not yet started.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """
    worker = IsolatedWorker(Engines(root, options))
    opened = worker.opened
    codec = _codec(opened)
    return LoadedModel(
        worker=worker,
        codec=codec,
        model=opened.model,
        config=opened.config,
        limits=opened.limits,
        defaults=opened.defaults,
        certificate=opened.certificate,
        bit_equality=opened.bit_equality,
        weights_are_private=opened.weights_are_private,
        grammars=grammar_compiler(opened.model, codec),
        chats=None if opened.chat is None else ChatEncoder(opened.chat, codec),
        generation_defaults=opened.generation_defaults,
    )


def _codec(opened: Opened) -> TokenizersCodec:
    if opened.text2text is None:
        return TokenizersCodec(opened.tokenizer)
    return EncoderDecoderCodec(opened.tokenizer, opened.text2text, opened.source_tokenizer)
