"""Engines over order-1 Markov chains and a worker around them, for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.base import Engine, EngineLimits, FloatArray
from outrider.engines.pair import Pair
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.rounds import do_nothing
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Event, Failed, Finished, Progressed
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.grammar.base import Constraints
from outrider.runtime.loop.beams.cache import BeamCache
from outrider.runtime.loop.prefill import PromptFeeder
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker

MAX_GAMMA = 8
MAX_CONTEXT = 96


class LetterDecoder:
    """Token i is the i-th letter."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limits(vocab_size: int, *, max_batch: int = 5, max_context: int = MAX_CONTEXT) -> EngineLimits:
    return EngineLimits(
        max_batch=max_batch, max_context=max_context, max_extend=16, vocab_size=vocab_size
    )


def counting_logits(prefix: tuple[int, ...]) -> FloatArray:
    """F3, target: the successor modulo 10."""
    logits = np.zeros(10, dtype=np.float32)
    logits[(prefix[-1] + 1) % 10] = 8.0
    return logits


def erring_logits(prefix: tuple[int, ...]) -> FloatArray:
    """F3, draft: the successor, but wrong wherever the length is a multiple of three."""
    logits = np.zeros(10, dtype=np.float32)
    logits[(prefix[-1] + (2 if len(prefix) % 3 == 0 else 1)) % 10] = 8.0
    return logits


def markov_logits(seed: int, vocab_size: int = 4, *, like: int | None = None):
    """F4: a random order-1 chain; ``like`` mixes in another chain's so that they often agree."""
    table = np.random.default_rng(seed).normal(size=(vocab_size, vocab_size))
    if like is not None:
        table = 0.5 * table + np.random.default_rng(like).normal(size=(vocab_size, vocab_size))
    table = (2.0 * table).astype(np.float32)
    return lambda prefix: table[prefix[-1]]


PAIRS = {
    "F3": (10, counting_logits, erring_logits),
    "F4": (4, markov_logits(1), markov_logits(2, like=1)),
    # The vocabulary of ``tests.runtime.grammar.letters``.
    "F6": (6, markov_logits(3, 6), markov_logits(4, 6, like=3)),
}


def feed_all_but_last_tokens(worker: Worker) -> None:
    """Have the last token of a prompt decode, as where steps run on a device."""
    parts = worker._parts
    bounds = replace(parts.limits, answers_prompts=False)
    prompts = PromptFeeder(parts.target, parts.sampler, bounds)
    worker._parts = replace(parts, limits=bounds, prompts=prompts)


class Harness:
    """A worker without a thread, with everything it owns at hand."""

    def __init__(
        self,
        pair: str = "F3",
        *,
        max_batch: int = 5,
        target: Engine | None = None,
        draft: Engine | None = None,
        has_draft: bool = True,
        costs: CostTable | None = None,
        clock: Clock | None = None,
        on_beat: Callable[[], None] = do_nothing,
        decoder: Decoder | None = None,
        constraints: Constraints | None = None,
        **settings: object,
    ) -> None:
        vocab_size, target_logits, draft_logits = PAIRS[pair]
        bounds = limits(vocab_size, max_batch=max_batch)
        self.target = target or ScriptedEngine(target_logits, bounds)
        self.draft = draft or (ScriptedEngine(draft_logits, bounds) if has_draft else None)
        self.clock = clock or Clock()
        self.worker = Worker(
            ServedEngines(
                target=self.target,
                draft=self.draft,
                sampler=CpuSampler(
                    max_batch=max_batch,
                    max_gamma=MAX_GAMMA,
                    vocab_size=self.target.limits.vocab_size,
                ),
                max_gamma=MAX_GAMMA,
                costs=costs,
            ),
            config=ServerConfig(**{"prefill_chunk": 4, **settings}),
            decoder=decoder or LetterDecoder(),
            clock=self.clock,
            on_beat=on_beat,
            constraints=constraints,
        )
        self.events: dict[str, list[Event]] = {}

    @property
    def live(self) -> list[Request]:
        return self.worker._rows.requests

    def submit(self, name: str, prompt: Sequence[int] = (1, 2, 3), **options: object) -> None:
        request = spec(name, prompt, **options)
        received: list[Event] = []
        self.worker.submit(request, received.append)
        self.events[name] = received

    def submit_group(
        self, name: str, prompt: Sequence[int], num_samples: int, **options: object
    ) -> None:
        """Ask for completions of one prompt; events of the i-th are those of "name.i"."""
        specs = spec(name, prompt, num_samples=num_samples, **options).samples()
        received: list[list[Event]] = [[] for _ in specs]
        self.worker.submit_group(specs, [events.append for events in received])
        self.events |= {
            f"{name}.{one.sample}": events for one, events in zip(specs, received, strict=True)
        }

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.worker.run_step():
                return
            self.check_invariants()
        raise AssertionError("the worker never came to rest")

    def check_invariants(self) -> None:
        """W3, W4, R1, R2 and the audit of both caches (T30), to hold after every step."""
        rows = self.worker._rows
        assert self.worker.snapshot().num_running == len(self.live) + len(rows.searches)
        held = [slot for search in rows.searches for slot in search.slots]
        assert sorted(held) == list(range(rows.slots.num_slots - len(held), rows.slots.num_slots))
        for search in rows.searches:
            assert search.request.slot == search.slots[0]
            self._check_search(search.cache)
        for slot, request in enumerate(self.live):
            known = tuple(request.sequence.history.tolist())
            assert request.slot == slot
            assert not request.has_ended
            self._check_group(request)
            cache, sequence = request.cache, request.sequence
            num_judged = sequence.num_known - sequence.num_pending
            assert cache.num_computed <= sequence.num_known - 1
            if sequence.num_output:
                assert cache.num_computed == num_judged - 1
            assert cache.draft_computed <= num_judged - 1
            self._check_cache(self.target, slot, known, cache.num_computed)
            source = request.spec.source_tokens
            if not cache.num_unread:
                self._check_source(self.target, slot, source)
            if self.draft is not None and cache.draft_computed >= 0:
                self._check_cache(self.draft, slot, known, cache.draft_computed)
                self._check_source(self.draft, slot, source)

    def _check_group(self, request: Request) -> None:
        """R5: who waits has nothing, and is known to a live request that reads."""
        leader, followers = request.group.leader, request.group.followers
        if leader is not None:
            assert request in leader.group.followers and leader in self.live
            assert request.cache.num_computed == request.sequence.num_output == 0 and not followers
        assert all(one.group.leader is request and one in self.live for one in followers)

    @staticmethod
    def _check_search(cache: BeamCache) -> None:
        """What a search takes its slots to hold, they hold."""
        if not isinstance(cache.engine, ScriptedEngine):
            return
        for slot, held in zip(cache.slots, cache._held, strict=True):
            prompt = cache._prompt[: held.num_tokens]
            assert cache.engine.tokens_of(slot)[: held.num_tokens] == prompt + held.tail
            assert len(prompt + held.tail) == held.num_tokens

    @staticmethod
    def _check_cache(engine: object, slot: int, known: tuple[int, ...], computed: int) -> None:
        if isinstance(engine, ScriptedEngine):
            assert engine.tokens_of(slot)[:computed] == known[:computed]

    @staticmethod
    def _check_source(engine: object, slot: int, source: tuple[int, ...]) -> None:
        if isinstance(engine, ScriptedEngine):
            assert engine.source_of(slot) == source

    def tokens(self, name: str) -> list[int]:
        return [
            emitted.token
            for event in self.events[name]
            if isinstance(event, Progressed)
            for emitted in event.tokens
        ]

    def text(self, name: str) -> str:
        return "".join(e.text for e in self.events[name] if not isinstance(e, Failed))

    def ending(self, name: str) -> Finished | Failed:
        """The terminal event: exactly one, and last."""
        terminal = [e for e in self.events[name] if not isinstance(e, Progressed)]
        assert len(terminal) == 1
        assert self.events[name][-1] is terminal[0]
        return terminal[0]

    def finished(self, name: str) -> Finished:
        ending = self.ending(name)
        assert isinstance(ending, Finished), ending
        return ending

    def error(self, name: str) -> Exception:
        ending = self.ending(name)
        assert isinstance(ending, Failed)
        return ending.error

    def check_is_idle(self) -> None:
        snapshot = self.worker.snapshot()
        assert snapshot.num_free_slots == snapshot.num_slots
        assert snapshot.num_running == snapshot.num_queued == 0


def spec(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 12,
    temperature: float = 0.0,
    mode: ExactnessMode = ExactnessMode.MAX_ACCEPT,
    lenience: float = 1.0,
    drafter: str | None = None,
    gamma: int | None = None,
    is_enabled: bool = True,
    is_adaptive: bool | None = None,
    end_tokens: tuple[int, ...] = (),
    params: SamplingParams | None = None,
    **fields: object,
) -> RequestSpec:
    return RequestSpec(
        internal_id=f"internal-{name}",
        request_id=name,
        prompt_tokens=tuple(prompt),
        params=params or SamplingParams(temperature=temperature, end_token_ids=end_tokens),
        max_tokens=max_tokens,
        **{
            "seed": 7,
            "speculation": SpeculationParams(
                is_enabled=is_enabled,
                drafter=drafter,
                gamma=gamma,
                mode=mode,
                lenience=lenience,
                is_adaptive=is_adaptive,
            ),
            **fields,
        },
    )


def answers_with_and_without(
    pair: Pair, drafter: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[object], list[object], Harness]:
    """Return the tokens of greedy and seed-stable answers without drafts and with them, and who made the latter."""
    answers = []
    for is_enabled in (False, True):
        harness = Harness(target=pair.target, draft=pair.draft, max_batch=4)
        for temperature, mode in (
            (0.0, ExactnessMode.MAX_ACCEPT),
            (0.9, ExactnessMode.SEED_STABLE),
        ):
            for number, prompt in enumerate(prompts):
                options = {"temperature": temperature, "mode": mode, "max_tokens": max_tokens}
                options |= {"drafter": drafter, "gamma": 1 + number} if is_enabled else {}
                name = f"{temperature} {number}"
                harness.submit(name, prompt, seed=number, is_enabled=is_enabled, **options)
        harness.run()
        answers.append([harness.tokens(name) for name in harness.events])
    return answers[0], answers[1], harness
