"""A draft model that proposes several tokens in one call: what it is fed and keeps, and the answers' law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import Draft, DrafterParts
from outrider.runtime.drafters.model import model
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import sequence_probs

from tests.engines.sampling.chosen_noise import law_of
from tests.mutants import assert_caught
from tests.runtime.drafters.model.test_model import VOCAB_SIZE, row, sampler
from tests.runtime.drafters.test_laws import MAX_ERROR, Trailing
from tests.runtime.markov import Harness, LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

UNKNOWN = VOCAB_SIZE
"""Beyond the target's vocabulary, as that of a published draft may be."""


def known_and_unknown(prefix: tuple[int, ...], unknown: int) -> tuple[tuple[int, ...], int]:
    """The text of a prefix, and how many unknown tokens follow it."""
    num_known = next((i for i, token in enumerate(prefix) if token == unknown), len(prefix))
    assert {*prefix[num_known:]} <= {unknown}, "an unknown token was left in the cache"
    return prefix[:num_known], len(prefix) - num_known


def counting(prefix: tuple[int, ...]) -> FloatArray:
    """The successor, and behind n unknown tokens the one n places on."""
    text, num_unknown = known_and_unknown(prefix, UNKNOWN)
    logits = np.zeros(VOCAB_SIZE + 1, dtype=np.float32)
    logits[(text[-1] + num_unknown + 1) % VOCAB_SIZE] = 9.0
    return logits


class Parallel(ScriptedEngine):
    """Such a draft model; keeps the spans it was given."""

    def __init__(self, *, max_extend: int = 8) -> None:
        bounds = replace(limits(VOCAB_SIZE + 1), parallel_token=UNKNOWN, max_extend=max_extend)
        super().__init__(counting, bounds)
        self.fed: list[list[tuple[int, ...]]] = []

    def extend(self, spans: list[Span]) -> FloatArray:
        self.fed.append([span.tokens for span in spans])
        return super().extend(spans)


def propose(engine: Parallel, *rows: object, chunk: int = 8) -> list[Draft]:
    parts = DrafterParts(draft=engine, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=chunk)
    return ModelDrafter(parts).propose(rows, range(len(rows)))


def test_a_round_is_one_call_and_nothing_of_the_unknown_tokens_is_kept() -> None:
    engine = Parallel()
    rows = [row(0, [1, 2], gamma=3), row(1, [5], gamma=1), row(2, [7], gamma=2)]
    drafts = propose(engine, *rows)
    assert [(one.tokens, one.num_computed, one.num_calls) for one in drafts] == [
        ((3, 4, 5), 2, 1),
        ((6,), 1, 1),
        ((8, 9), 1, 1),
    ]
    assert engine.fed == [[(1, 2, UNKNOWN, UNKNOWN), (5,), (7, UNKNOWN)]]
    (again,) = propose(engine, row(0, [1, 2, 3, 9], gamma=2, num_computed=2))
    assert (again.tokens, again.num_computed) == ((0, 1), 4)
    assert engine.fed[1:] == [[(3, 9, UNKNOWN)]]


def test_rows_whose_whole_drafts_were_kept_take_one_call_too() -> None:
    engine = Parallel()
    propose(engine, *(row(slot, [1], gamma=3) for slot in range(2)))
    kept = [row(slot, [1, 2, 3, 4, 5], gamma=2, num_computed=1) for slot in range(2)]
    drafts = propose(engine, *kept)
    assert [one.tokens for one in drafts] == [(6, 7)] * 2
    assert engine.fed[1:] == [[(2, 3, 4, 5, UNKNOWN)] * 2]


def test_nothing_is_drafted_behind_an_end_token_nor_beyond_what_a_call_takes() -> None:
    engine = Parallel(max_extend=5)
    (ended,) = propose(engine, row(0, [1], gamma=6, end_tokens=(3,)))
    assert ended.tokens == (2, 3)
    (full,) = propose(engine, row(0, [1, 2, 3], gamma=6), chunk=4)
    assert full.tokens == (4, 5, 6)
    assert max(len(tokens) for spans in engine.fed for tokens in spans) == 5


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_served_with_it(temperature: float, mode: ExactnessMode) -> None:
    """The harness audits the draft model's cache after every step; determined answers are those of plain decoding."""
    engine = Parallel()
    harness = Harness("F3", draft=engine)
    options = {"temperature": temperature, "mode": mode, "max_tokens": 20}
    for number in range(3):
        prompt = [number, number + 1]
        harness.submit(f"{number}", prompt, gamma=2 + number, seed=number, **options)
        harness.submit(f"plain {number}", prompt, is_enabled=False, seed=number, **options)
    harness.run()
    reports = [harness.finished(f"{number}").report for number in range(3)]
    assert all(report.drafter == "model" and report.num_accepted > 5 for report in reports)
    if temperature == 0.0 or mode is ExactnessMode.SEED_STABLE:
        for number in range(3):
            assert harness.tokens(f"{number}") == harness.tokens(f"plain {number}")


TABLE = np.array([[0.3, 0.7], [0.8, 0.2]])
# By unknown tokens and the text's last token.
ROWS = np.array([[[0.6, 0.4], [0.5, 0.5]], [[0.45, 0.55], [0.7, 0.3]]])


def answer(noise: object, *, is_block: bool) -> tuple[int, tuple[int, ...]]:
    """Tokens that were drafted, and those of an answer of three tokens, drafted two at a time."""

    def drafted(prefix: tuple[int, ...]) -> FloatArray:
        text, num_unknown = known_and_unknown(prefix, 2)
        return np.log([*ROWS[num_unknown, text[-1]], 1e-9]).astype(np.float32)

    def target(prefix: tuple[int, ...]) -> FloatArray:
        return np.log(TABLE[prefix[-1]]).astype(np.float32)

    bounds = replace(limits(2), max_batch=1)
    engines = ServedEngines(
        target=ScriptedEngine(target, bounds),
        draft=ScriptedEngine(drafted, replace(bounds, vocab_size=3, parallel_token=2)),
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
        spec("a", (0, 1, 0), max_tokens=3, temperature=1.0, speculation=params), events.append
    )
    while worker.run_step():
        pass
    steps = [event for event in events if isinstance(event, Progressed)]
    num_drafted = sum(len(step.trace.draft_tokens) for step in steps)
    return num_drafted, tuple(token.token for step in steps for token in step.tokens)


@pytest.mark.parametrize("is_block", [False, True])
def test_answers_have_the_targets_law(is_block: bool) -> None:
    most = 0

    def run(noise: object) -> tuple[int, ...]:
        nonlocal most
        num_drafted, tokens = answer(noise, is_block=is_block)
        most = max(most, num_drafted)
        return tokens

    found = law_of(run)
    assert most >= 2
    assert (
        distance(found, sequence_probs(lambda prefix: TABLE[prefix[-1] if prefix else 0], 3))
        < MAX_ERROR
    )


MUTANTS = {
    "unknown tokens stay in the cache": (
        "            computed[slot] += len(tokens)\n        logits",
        "            computed[slot] += len(tokens) + num_unknown\n        logits",
        test_a_round_is_one_call_and_nothing_of_the_unknown_tokens_is_kept,
    ),
    "all drawn from the first row": (
        "logits[:, column:],\n                [rows[slot] for slot in drafting]",
        "logits,\n                [rows[slot] for slot in drafting]",
        test_a_round_is_one_call_and_nothing_of_the_unknown_tokens_is_kept,
    ),
    "as long as the context allows, whatever a call takes": (
        "min(gammas[slot] - 1, self._limits.max_extend - len(tokens))",
        "gammas[slot] - 1",
        test_nothing_is_drafted_behind_an_end_token_nor_beyond_what_a_call_takes,
    ),
    "drafting on behind an end": (
        "if len(drafted) >= most or token in row.sampling.params.end_token_ids:",
        "if len(drafted) >= most:",
        test_nothing_is_drafted_behind_an_end_token_nor_beyond_what_a_call_takes,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, model, old, new, killer, (AssertionError, Exception))
