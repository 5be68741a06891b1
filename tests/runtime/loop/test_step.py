"""Speculative decoding says what plain decoding says, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import EngineLimits
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, Verdict
from outrider.runtime.core.errors import ConstraintConflict, RequestFailed
from outrider.runtime.core.events import Failed, FinishReason, Progressed
from outrider.runtime.gamma.costs import CostTable

from tests.runtime.markov import Harness, counting_logits, limits, spec

DRAFTERS = ("none", "lookup", "model", "lookup+model")
PROMPTS = ((1, 2, 3), (3,), (0, 1, 2, 3, 0, 1, 2, 3, 1), (2, 2), (1, 0, 3, 2, 1, 0, 3))


def answers(
    pair: str,
    batch: int,
    arrivals: int | None,
    *,
    costs: CostTable | None = None,
    **options: object,
) -> list[list[int]]:
    """Tokens of ``batch`` requests, arriving at random steps if ``arrivals`` seeds them."""
    harness = Harness(pair, costs=costs)
    wait = np.random.default_rng(arrivals) if arrivals is not None else None
    for index in range(batch):
        harness.submit(str(index), PROMPTS[index], seed=index, max_tokens=10 + index, **options)
        for _ in range(int(wait.integers(0, 4)) if wait is not None else 0):
            harness.worker.run_step()
            harness.check_invariants()
    harness.run()
    harness.check_is_idle()
    for index in range(batch):
        assert harness.finished(str(index)).num_output == len(harness.tokens(str(index)))
    return [harness.tokens(str(index)) for index in range(batch)]


def plain(pair: str, **options: object) -> list[list[int]]:
    """Tokens of each request alone, without speculation."""
    found = []
    for index, prompt in enumerate(PROMPTS):
        harness = Harness(pair)
        harness.submit(
            "only", prompt, seed=index, max_tokens=10 + index, is_enabled=False, **options
        )
        harness.run()
        assert harness.finished("only").report.off_reason == "DISABLED"
        found.append(harness.tokens("only"))
    return found


@pytest.mark.parametrize("pair", ["F3", "F4"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_never_changes_a_token(pair: str, drafter: str, temperature: float) -> None:
    """T28 at temperature 0, T29 under shared noise: every gamma and batch, random arrivals."""
    options = {"temperature": temperature, "mode": ExactnessMode.SEED_STABLE}
    expected = plain(pair, **options)
    assert [len(tokens) for tokens in expected] == [10, 11, 12, 13, 14]
    for gamma in range(9):
        for batch in range(1, 6):
            found = answers(
                pair, batch, arrivals=gamma * 9 + batch, drafter=drafter, gamma=gamma, **options
            )
            assert found == expected[:batch], (gamma, batch)


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_a_seed_gives_the_same_answer_in_any_batch(drafter: str) -> None:
    options = {"drafter": drafter, "gamma": 3, "temperature": 1.0}
    alone = answers("F4", 1, None, **options)
    together = answers("F4", 5, None, **options)
    assert alone == together[:1]


def test_speculation_saves_target_passes() -> None:
    harness = Harness("F3")
    harness.submit("a", max_tokens=12, drafter="model", gamma=2)
    harness.submit("b", max_tokens=12, is_enabled=False)
    harness.run()
    # The first token of each came with its prompt.
    assert harness.finished("b").report.num_steps == 11
    assert harness.finished("a").report.num_steps < 9


def test_pointers_follow_the_worked_example() -> None:
    """T25: n = (10, 7, 12), gamma 4, accepted (4, 0, 2)."""
    accepted = {10: 4, 7: 0, 12: 2}

    class Judge:
        def propose(self, logits, rows, *, vocab_size):
            return [1] * len(rows)

        def judge(self, logits, rows):
            return [Verdict(num_accepted=accepted[len(r.history)], next_token=2) for r in rows]

    harness = Harness("F3", prefill_chunk=12)
    parts = harness.worker._parts
    for drafter in (parts.drafters["model"],):
        drafter._sampler = Judge()
    for name, length in (("a", 10), ("b", 7), ("c", 12)):
        harness.submit(name, range_prompt(length), max_tokens=40, drafter="model", gamma=4)
    harness.worker._inbox.admit(harness.worker._rows.admit, 0.0)
    for request in harness.live:
        slot, known = request.slot, tuple(request.sequence.history.tolist())
        for engine in (harness.target, harness.draft):
            engine.extend([one_span(slot, known[:-1])])
        request.commit_prefill(len(known) - 1)
        request.commit_draft_cache(len(known) - 1)
    harness.worker._parts = replace(parts, sampler=Judge())
    harness.worker.run_step()
    harness.check_invariants()
    assert [r.sequence.num_known for r in harness.live] == [15, 8, 15]
    assert [r.cache.num_computed for r in harness.live] == [14, 7, 14]
    assert [r.cache.draft_computed for r in harness.live] == [13, 7, 14]


def range_prompt(length: int) -> list[int]:
    return [token % 10 for token in range(length)]


def one_span(slot: int, tokens: tuple[int, ...]):
    from outrider.engines.base import Span

    return Span(slot=slot, start=0, tokens=tokens, num_logits=0)


def test_the_draft_cache_never_falls_behind_in_a_long_run() -> None:
    """T39: with constant gamma the deficit n - 1 - draft_computed stays in {0, 1}."""
    harness = Harness("F4")
    harness.submit("a", max_tokens=80, drafter="model", gamma=2, temperature=1.0)
    deficits = set()
    while harness.worker.run_step():
        harness.check_invariants()
        # Where fewer than gamma tokens remain, the last steps draft less, and not at all at one.
        deficits |= {
            r.sequence.num_known - 1 - r.cache.draft_computed
            for r in harness.live
            if r.sequence.num_remaining > 1 and r.stats.num_steps
        }
    assert deficits == {0, 1}
    assert len(harness.tokens("a")) == 80


def test_a_long_prompt_delays_a_running_stream_by_one_chunk_at_a_time() -> None:
    harness = Harness("F3")
    harness.submit("stream", max_tokens=60, is_enabled=False)
    harness.worker.run_step()
    harness.submit("long", range_prompt(60), max_tokens=3)
    for _ in range(10):
        before = len(harness.tokens("stream"))
        harness.worker.run_step()
        assert len(harness.tokens("stream")) == before + 1
    assert not harness.events["long"]
    harness.run()
    assert harness.tokens("long") == [0, 1, 2]


def test_prompts_that_wait_together_are_fed_in_one_call_and_begin_in_one_step() -> None:
    harness = Harness("F3", prefill_chunk=16)
    lengths = {"a": 4, "b": 5, "c": 4, "late": 4}
    for name, length in lengths.items():
        harness.submit(name, range_prompt(length), drafter="model", gamma=2, max_tokens=9)
    harness.worker.run_step()
    harness.check_invariants()
    # One call for the prompts of three, which answers them; it has no room for the fourth.
    assert (harness.target.num_extends, harness.draft.num_extends) == (1, 0)
    assert [len(harness.tokens(name)) for name in lengths] == [1, 1, 1, 0]
    harness.worker.run_step()
    harness.check_invariants()
    # One for the fourth, and one that verifies the drafts of the three; the draft model reads their prompts in one.
    assert (harness.target.num_extends, harness.draft.num_extends) == (1 + 2, 1 + 2)
    assert len(harness.tokens("late")) == 1
    harness.run()
    for name, first in lengths.items():
        assert harness.tokens(name) == [(first + i) % 10 for i in range(9)]


def test_prompts_that_fail_together_once_are_fed_again() -> None:
    harness = Harness("F3", prefill_chunk=8)
    harness.submit("stream", max_tokens=20, is_enabled=False)
    harness.worker.run_step()
    for name in ("a", "b", "later"):
        harness.submit(name, range_prompt(4), max_tokens=4, is_enabled=False)
    harness.target.fail_at(harness.target.num_extends)
    harness.run()
    assert len(harness.tokens("stream")) == 20
    for name in ("a", "b", "later"):
        assert harness.tokens(name) == [4, 5, 6, 7]
    harness.check_is_idle()


def test_a_draft_of_a_smaller_vocabulary_is_used_while_it_can_be_fed() -> None:
    """T35, smaller: target ids the draft model does not know are never fed to it."""
    draft = ScriptedEngine(lambda prefix: counting_logits(prefix)[:7], limits(7))
    harness = Harness("F3", draft=draft)
    harness.submit("a", (1, 2), max_tokens=12, drafter="model", gamma=2)
    harness.run()
    assert harness.tokens("a") == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert harness.finished("a").report.num_accepted > 0
    assert harness.finished("a").report.off_reason is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_a_larger_vocabulary_proposes_no_unknown_id(temperature: float) -> None:
    """T35, larger: the draft's favourite lies beyond the target's vocabulary."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([counting_logits(prefix), np.full(3, 20.0, np.float32)])

    harness = Harness("F3", draft=ScriptedEngine(logits, limits(13)))
    harness.submit("a", drafter="model", gamma=3, temperature=temperature)
    harness.run()
    assert harness.finished("a").num_output == 12
    drafted = [
        token
        for event in harness.events["a"]
        if isinstance(event, Progressed)
        for token in event.trace.draft_tokens
    ]
    assert drafted
    assert max(drafted) < 10


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_request_alone(
    bad: float, temperature: float
) -> None:
    """T36."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.full(10, bad, np.float32) if prefix[0] == 9 else counting_logits(prefix)

    harness = Harness("F3", target=ScriptedEngine(logits, limits(10)))
    harness.submit("bad", (9, 1), drafter="model", gamma=3, temperature=temperature)
    harness.submit("good", (1, 2), drafter="model", gamma=3)
    harness.run()
    assert harness.error("bad").reason == "ENGINE_FAILED"
    assert harness.finished("good").num_output == 12
    harness.check_is_idle()


def test_a_request_whose_constraints_leave_no_token_is_told_so_and_ends_alone() -> None:
    harness = Harness("F3")
    bans = SamplingParams(allowed_token_ids=(4, 5), bad_words=((4,), (5,)))
    harness.submit("bad", (1, 2), drafter="model", gamma=3, params=bans)
    harness.submit("good", (1, 2), drafter="model", gamma=3)
    harness.run()
    assert isinstance(harness.error("bad"), ConstraintConflict)
    assert harness.finished("good").num_output == 12
    harness.check_is_idle()


def test_what_was_rejected_or_cut_reaches_no_figure() -> None:
    """T32: usage, figures, logprobs and text know emitted tokens only."""
    harness = Harness("F3")
    harness.submit(
        "a", stop_strings=("hi",), max_tokens=30, drafter="model", gamma=8, num_logprobs=2
    )
    harness.run()
    finished = harness.finished("a")
    emitted = [t for e in harness.events["a"] if isinstance(e, Progressed) for t in e.tokens]
    assert harness.tokens("a") == [4, 5, 6, 7, 8]
    assert harness.text("a") == "efg"
    assert finished.stop == "hi"
    assert finished.num_output == 5
    assert all(token.logprobs is not None for token in emitted)
    assert all(token.logprobs.top[0][0] == token.token for token in emitted)
    assert finished.report.num_emitted == 4
    assert finished.report.tokens_per_step == 4 / finished.report.num_steps
    assert sum(finished.report.accepted_by_position) == finished.report.num_accepted <= 5


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"end_tokens": (8,)}, FinishReason.STOP_TOKEN),
        ({"stop_strings": ("ij",)}, FinishReason.STOP_STRING),
        ({"stop_strings": ("ja",), "include_stop": True}, FinishReason.STOP_STRING),
        ({"max_tokens": 2}, FinishReason.LENGTH),
        ({"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_a_run_is_cut_where_plain_decoding_stops(
    gamma: int, options: dict[str, object], reason: FinishReason
) -> None:
    """T27."""
    harness = Harness("F3", draft=ScriptedEngine(counting_logits, limits(10)))
    harness.submit("plain", is_enabled=False, **options)
    harness.submit("fast", drafter="model", gamma=gamma, **options)
    harness.run()
    assert harness.tokens("fast") == harness.tokens("plain")
    assert harness.text("fast") == harness.text("plain")
    fast, slow = harness.finished("fast"), harness.finished("plain")
    assert (fast.reason, fast.stop, fast.num_output) == (slow.reason, slow.stop, slow.num_output)
    assert fast.reason is reason


def test_drafting_stops_after_an_end_token() -> None:
    harness = Harness("F3", draft=ScriptedEngine(counting_logits, limits(10)))
    harness.submit("a", drafter="model", gamma=8, end_tokens=(6,), max_tokens=20)
    harness.run()
    first, event = (e for e in harness.events["a"] if isinstance(e, Progressed))
    assert [t.token for t in first.tokens] == [4]
    assert event.trace.draft_tokens == (5, 6)
    assert [t.token for t in event.tokens] == [5, 6]


def test_repetition_penalty_sees_the_drafted_prefix() -> None:
    """The hand example of stateful processors: A, B, then A for ever; never A, A."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([2.0, 1.5, -9.0], np.float32)

    bounds = EngineLimits(max_batch=5, max_context=40, max_extend=16, vocab_size=3)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    found = []
    for gamma in (0, 2, 5):
        harness = Harness(
            "F3", target=ScriptedEngine(logits, bounds), draft=ScriptedEngine(logits, bounds)
        )
        harness.submit("a", (2,), params=params, drafter="model", gamma=gamma, max_tokens=6)
        harness.run()
        found.append(harness.tokens("a"))
    assert found == [[0, 1, 0, 0, 0, 0]] * 3


@pytest.mark.parametrize("failing", range(6))
def test_a_failing_draft_model_degrades_and_fails_nobody(failing: int) -> None:
    draft = ScriptedEngine(counting_logits, limits(10), failing_extends=[failing])
    harness = Harness("F3", draft=draft)
    harness.submit("a", drafter="model", gamma=3)
    harness.submit("b", is_enabled=False)
    harness.run()
    assert harness.tokens("a") == harness.tokens("b")
    assert harness.finished("a").report.off_reason == "DEGRADED"
    assert harness.finished("b").report.off_reason == "DISABLED"
    harness.submit("later", drafter="model", gamma=3)
    harness.run()
    assert harness.finished("later").report.off_reason is None
    assert harness.tokens("later") == harness.tokens("b")


def test_a_failing_target_ends_the_step_and_the_worker_goes_on() -> None:
    harness = Harness("F3")
    harness.submit("a", gamma=3)
    harness.submit("b", drafter="lookup", gamma=3)
    while not (harness.events["a"] and harness.events["b"]):
        harness.worker.run_step()
    # The step, then twice for each row alone.
    harness.target.fail_at(*range(harness.target.num_extends, harness.target.num_extends + 5))
    harness.run()
    assert isinstance(harness.error("a"), RequestFailed)
    assert isinstance(harness.error("b"), RequestFailed)
    assert isinstance(harness.ending("a"), Failed)
    assert harness.ending("a").num_output == len(harness.tokens("a")) > 0
    harness.check_is_idle()
    harness.submit("next", gamma=3)
    harness.run()
    assert harness.finished("next").num_output == 12


def test_a_failing_verification_has_rows_that_still_prefill_begin_anew() -> None:
    harness = Harness("F3")
    harness.submit("a", gamma=3, max_tokens=30)
    harness.worker.run_step()
    harness.submit("long", range_prompt(20), gamma=3)
    # A prompt of one token decodes at once, in the slot behind: the row between them is padding in every call.
    harness.submit("b", (3,), gamma=3, max_tokens=30)
    harness.worker.run_step()
    assert harness.live[1].cache.num_computed == 4
    # Each step feeds a chunk of the prompt, drafts three tokens, and verifies.
    harness.target.fail_at(harness.target.num_extends + 1)
    harness.worker.run_step()
    assert harness.live[1].cache.num_computed == 0
    harness.run()
    assert harness.tokens("a") == [(4 + index) % 10 for index in range(30)]
    assert harness.tokens("b") == [(4 + index) % 10 for index in range(30)]
    assert harness.tokens("long") == [(20 + index) % 10 for index in range(12)]
    assert harness.finished("long").report.off_reason is None
    harness.check_is_idle()


def test_a_failing_prefill_ends_its_own_request_only() -> None:
    harness = Harness("F3")
    harness.submit("a", gamma=3)
    harness.worker.run_step()
    harness.submit("long", range_prompt(20))
    harness.target.fail_at(harness.target.num_extends, harness.target.num_extends + 1)
    harness.run()
    assert harness.error("long").reason == "REQUEST_QUARANTINED"
    assert harness.finished("a").num_output == 12


def test_the_answer_ends_at_the_context_limit() -> None:
    harness = Harness("F3", target=ScriptedEngine(counting_logits, limits(10, max_context=8)))
    harness.submit("a", (1, 2, 3), max_tokens=50, drafter="model", gamma=4)
    harness.run()
    assert harness.tokens("a") == [4, 5, 6, 7, 8]
    assert harness.finished("a").reason is FinishReason.LENGTH
    assert spec("a").max_tokens == 12


@pytest.mark.parametrize("drafter", ["model", "model/lookup", "lookup+model"])
def test_an_answer_of_a_fixed_gamma_does_not_depend_on_its_neighbours(drafter: str) -> None:
    """Not its law alone: prompts of many chunks keep the draft model busy, and still every draw is the same."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, size=length).tolist() for length in (40, 2, 33, 21, 38)]

    def answers_of(names: Sequence[int]) -> list[list[int]]:
        harness = Harness("F4")
        for name in names:
            options = {"temperature": 1.0, "gamma": 3, "drafter": drafter, "seed": name}
            harness.submit(str(name), prompts[name], max_tokens=20, **options)
        harness.run()
        return [harness.tokens(str(name)) for name in names]

    alone = [answers_of([name])[0] for name in range(5)]
    assert answers_of(range(5)) == alone
    assert answers_of(range(4, -1, -1)) == alone[::-1]
