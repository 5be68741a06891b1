"""Drafts of a head: what is fed again, what is not offered with it, and the answers' law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import Engine, FloatArray, Span
from outrider.engines.heads import HeadEngine
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.model import model
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.model.prompt_end import PromptEndEngine
from outrider.runtime.drafters.registry import build_drafters
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import sequence_probs

from tests.engines.sampling.chosen_noise import law_of
from tests.mutants import assert_caught
from tests.runtime.drafters.model.test_model import VOCAB_SIZE, row, sampler
from tests.runtime.drafters.test_laws import MAX_ERROR, Trailing
from tests.runtime.grammar.letters import regex
from tests.runtime.grammar.test_answers import ENDED, GRAMMARS, PROMPT, forms_harness
from tests.runtime.markov import PAIRS, Harness, LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

RECYCLED = -1.0


class Featured(ScriptedEngine):
    """A target whose feature of a token is its id."""

    def features(self, slot: int, start: int, end: int) -> FloatArray:
        held = self.tokens_of(slot)[start:end]
        return np.array([*held, *[0.0] * (end - start - len(held))], np.float32)[:, None]


class Graph(ScriptedEngine):
    """A head's graph: logits by the last token and by its feature, that of the token before or ``RECYCLED``."""

    def __init__(self, logits_of: object, bounds: object) -> None:
        super().__init__(lambda prefix: self._answer(prefix), replace(bounds, reads_features=1))
        self._by_pair = logits_of
        self._features: dict[int, list[float]] = {}
        self.fed: list[list[tuple[int, tuple[int, ...]]]] = []

    def extend(self, spans: list[Span]) -> FloatArray:
        self.fed.append([(one.start, one.tokens) for one in spans])
        for one in spans:
            kept = self._features.get(one.slot, [])[: one.start]
            self._features[one.slot] = kept + one.features[:, 0].tolist()
        found = super().extend(spans)
        for index, one in enumerate(spans):
            if one.num_logits:
                pair = (one.tokens[-1], self._features[one.slot][-1])
                found[index, 0] = self._by_pair(*pair)
        return found

    def move_slot(self, source: int, destination: int, length: int) -> None:
        super().move_slot(source, destination, length)
        self._features[destination] = self._features.get(source, [])[:length]

    def recycled(self, slot: int) -> FloatArray:
        return np.array([RECYCLED], np.float32)

    def _answer(self, prefix: tuple[int, ...]) -> FloatArray:
        return np.zeros(self.limits.vocab_size, np.float32)


def counting(token: int, feature: float) -> FloatArray:
    """The successor, of a token whose feature is that of its predecessor or recycled; else its own id."""
    logits = np.zeros(VOCAB_SIZE, np.float32)
    is_next = feature in (RECYCLED, (token - 1) % VOCAB_SIZE)
    logits[(token + is_next) % VOCAB_SIZE] = 9.0
    return logits


def opened() -> tuple[Featured, Graph, Engine]:
    target = Featured(PAIRS["F3"][1], limits(VOCAB_SIZE))
    graph = Graph(counting, limits(VOCAB_SIZE))
    return target, graph, HeadEngine(graph, target)


def test_drafted_tokens_are_fed_again_with_the_targets_features() -> None:
    """Trap: what was made of recycled features is not what training saw at a place that is settled."""
    target, graph, head = opened()
    target.extend([Span(slot=0, start=0, tokens=(1, 2, 3), num_logits=0)])
    drafter = ModelDrafter(
        DrafterParts(draft=head, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=8)
    )
    (draft,) = drafter.propose([row(0, [1, 2, 3], gamma=3)], [0])
    assert (draft.tokens, draft.num_computed) == ((4, 5, 6), 3)
    assert graph.fed == [[(0, (2, 3))], [(2, (4,))], [(3, (5,))]]
    graph.fed.clear()
    target.extend([Span(slot=0, start=3, tokens=(4, 5), num_logits=0)])
    (draft,) = drafter.propose([row(0, [1, 2, 3, 4, 5], gamma=1, num_computed=3)], [0])
    assert (draft.tokens, graph.fed) == ((6,), [[(2, (4, 5))]])


def test_rows_whose_whole_drafts_were_kept_are_fed_in_one_call() -> None:
    _, graph, head = opened()
    drafter = ModelDrafter(
        DrafterParts(draft=head, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=8, max_gamma=4)
    )
    rows = [row(slot, [1, 2], gamma=1) for slot in range(2)]
    drafter.propose(rows, range(2))
    graph.fed.clear()
    drafter.propose(
        [row(s, [1, 2, 3, 4, 5, 6, 7], gamma=1, num_computed=2) for s in range(2)], range(2)
    )
    assert graph.fed == [[(1, (3, 4, 5, 6, 7))] * 2]


def test_what_reads_several_drafted_tokens_at_once_is_not_offered_with_a_head() -> None:
    _, _, head = opened()
    names = []
    for draft in (head, ScriptedEngine(PAIRS["F3"][2], limits(VOCAB_SIZE))):
        parts = DrafterParts(draft=draft, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=8)
        drafters = build_drafters(parts)
        names.append({*drafters, *(f"model/{one}" for one in drafters.guessers)})
        assert drafters.uses_model("model+lookup")
    of_head, of_model = names
    assert of_model - of_head == {"ouroboros", *(one for one in of_model if "/" in one)}
    drafters = build_drafters(
        DrafterParts(draft=head, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=8)
    )
    with pytest.raises(KeyError):
        drafters["model/lookup"]


def test_a_head_reads_whole_prompts() -> None:
    """Trap: a head that was not fed the prompt drafts nearly nothing."""
    _, _, head = opened()
    engines = ServedEngines(target=head, draft=head, sampler=sampler(), max_gamma=1)
    assert engines.with_prompt_ends().draft is head
    other = replace(engines, draft=ScriptedEngine(PAIRS["F3"][2], limits(VOCAB_SIZE)))
    assert isinstance(other.with_prompt_ends().draft, PromptEndEngine)


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_served_with_it(temperature: float, mode: ExactnessMode) -> None:
    target, _, head = opened()
    harness = Harness("F3", target=target, draft=head, prefix_cache_bytes=1 << 16)
    options = {"temperature": temperature, "mode": mode, "max_tokens": 20}
    for number in range(3):
        prompt = [number, *range(number, number + 4)]
        harness.submit(f"{number}", prompt, gamma=2 + number, seed=number, **options)
        harness.submit(f"plain {number}", prompt, is_enabled=False, seed=number, **options)
    harness.submit_group("all", [1, 2, 3, 4, 5, 6], 2, gamma=2, **options)
    harness.run()
    reports = [harness.finished(f"{number}").report for number in range(3)]
    assert all(report.drafter == "model" and report.num_accepted > 5 for report in reports)
    if temperature == 0.0 or mode is ExactnessMode.SEED_STABLE:
        for number in range(3):
            assert harness.tokens(f"{number}") == harness.tokens(f"plain {number}")


def test_rows_go_on_plainly_where_a_head_fails() -> None:
    target, graph, head = opened()
    harness = Harness("F3", target=target, draft=head)
    graph.fail_at(1)
    for name, is_enabled in (("drafted", True), ("plain", False)):
        harness.submit(
            name, [1, 2, 3], gamma=2, is_enabled=is_enabled, temperature=0.0, max_tokens=9
        )
    harness.run()
    assert harness.tokens("drafted") == harness.tokens("plain")
    assert harness.finished("drafted").report.off_reason is not None


def test_what_a_constraint_forced_is_fed_again_with_its_features() -> None:
    """Trap: the target has not read forced tokens when the head does; what it kept of them would be of no features."""
    vocab_size, target_logits, draft_logits = PAIRS["F6"]
    bounds = limits(vocab_size)
    target = Featured(target_logits, bounds)
    graph = Graph(lambda token, feature: draft_logits((token,)), bounds)
    harness = forms_harness(target=target, draft=HeadEngine(graph, target))
    for number, text in enumerate(GRAMMARS):
        options = {"gamma": 1 + number, "params": ENDED, "max_tokens": 30}
        harness.submit(text, PROMPT, grammar=regex(text), **options)
    num_kept = 0
    while harness.worker.run_step():
        for slot, request in enumerate(harness.live):
            count = max(request.cache.draft_computed - 1, 0)
            found = graph._features.get(slot, [])[:count]
            assert found == request.sequence.history[:count].tolist()
            num_kept += count
    reports = [harness.finished(text).report for text in GRAMMARS]
    assert sum(report.num_forced for report in reports) > 5
    assert sum(report.num_drafted for report in reports) > 5
    assert num_kept > 100


TABLE = np.array([[0.3, 0.7], [0.8, 0.2]])
# By the token and whether the target had the feature before it: 0, 1, or recycled.
ROWS = np.array([[[0.6, 0.4], [0.5, 0.5], [0.1, 0.9]], [[0.45, 0.55], [0.7, 0.3], [0.25, 0.75]]])


def answer(noise: object, num_tokens: int, *, is_block: bool) -> tuple[int, tuple[int, ...]]:
    """Tokens that were drafted, and those of an answer, drafted two at a time."""

    def target(prefix: tuple[int, ...]) -> FloatArray:
        return np.log(TABLE[prefix[-1]]).astype(np.float32)

    def drafted(token: int, feature: float) -> FloatArray:
        return np.log(ROWS[token, int(feature)]).astype(np.float32)

    bounds = replace(limits(2), max_batch=1)
    featured = Featured(target, bounds)
    engines = ServedEngines(
        target=featured,
        draft=HeadEngine(Graph(drafted, bounds), featured),
        sampler=Trailing(noise, vocab_size=2),
        max_gamma=2,
    )
    worker = Worker(
        engines,
        config=ServerConfig(prefill_chunk=2, block_verification=is_block),
        decoder=LetterDecoder(),
    )
    events: list[object] = []
    params = SpeculationParams(drafter="model", gamma=2)
    worker.submit(
        spec("a", (0, 1, 0), max_tokens=num_tokens, temperature=1.0, speculation=params),
        events.append,
    )
    while worker.run_step():
        pass
    steps = [event for event in events if isinstance(event, Progressed)]
    num_drafted = sum(len(step.trace.draft_tokens) for step in steps)
    return num_drafted, tuple(token.token for step in steps for token in step.tokens)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("num_tokens", [2, pytest.param(3, marks=pytest.mark.long)])
def test_answers_have_the_targets_law(num_tokens: int, is_block: bool) -> None:
    most = 0

    def run(noise: object) -> tuple[int, ...]:
        nonlocal most
        num_drafted, tokens = answer(noise, num_tokens, is_block=is_block)
        most = max(most, num_drafted)
        return tokens

    found = law_of(run)
    assert most >= num_tokens - 1
    assert (
        distance(
            found, sequence_probs(lambda prefix: TABLE[prefix[-1] if prefix else 0], num_tokens)
        )
        < MAX_ERROR
    )


MUTANTS = {
    "what was drafted stays": (
        "        if self._limits.reads_features:",
        "        if not self._limits:",
        test_drafted_tokens_are_fed_again_with_the_targets_features,
    ),
    "what was forced stays": (
        " - row.num_pending",
        "",
        test_what_a_constraint_forced_is_fed_again_with_its_features,
    ),
    "rows lag behind their own drafts": (
        " or draft.limits.reads_features > 0",
        "",
        test_rows_whose_whole_drafts_were_kept_are_fed_in_one_call,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, model, old, new, killer)
