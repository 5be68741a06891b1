"""The chunk that ends a prompt answers with the first token, the very one that a step of its own would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.pair import HOST
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.events import EmittedToken, FinishReason, Progressed
from outrider.runtime.core.request import Request
from outrider.runtime.gamma.costs import CostTable

from tests.runtime.gamma.test_controller import table
from tests.runtime.markov import Harness, counting_logits, feed_all_but_last_tokens, limits, spec
from tests.runtime.pair import PairHarness

CHUNK = 4
# Prompts are read one by one, and three in one call.
CHUNKS = (CHUNK, 16)
STABLE, MAX_ACCEPT = ExactnessMode.SEED_STABLE, ExactnessMode.MAX_ACCEPT
GENERATOR = np.random.default_rng(5)
# Of one token, of a chunk and less, with one token left behind a chunk, and of several chunks; those that are read in
# one call end in tokens of their own.
PROMPTS = [GENERATOR.integers(4, size=length).tolist() for length in (1, 2, 4, 5, 11)]
LAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(),
    "truncated": SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=3.0),
    "biased": SamplingParams(temperature=0.0, logit_bias=((1, 9.0),)),
    "banned": SamplingParams(bad_words=((2,),), allowed_token_ids=(1, 2, 3)),
    "not repeated": SamplingParams(no_repeat_ngram_size=2),
    "not yet ended": SamplingParams(min_tokens=3, end_token_ids=(0, 1, 2)),
}


def harness(chunk: int = CHUNK, *, is_apart: bool = False) -> Harness:
    """Over F4; ``is_apart`` has the last tokens of prompts decode in steps of their own."""
    one = Harness("F4", prefill_chunk=chunk)
    if is_apart:
        feed_all_but_last_tokens(one.worker)
    return one


def emitted(one: Harness, name: str) -> list[EmittedToken]:
    events = [event for event in one.events[name] if isinstance(event, Progressed)]
    return [token for event in events for token in event.tokens]


def told(one: Harness, names: Sequence[int], **options: object) -> dict[int, object]:
    """Tokens and their log-probabilities of prompts that arrive together, and why they ended."""
    for name in names:
        one.submit(str(name), PROMPTS[name], seed=name, max_tokens=7, num_logprobs=2, **options)
    one.run()
    one.check_is_idle()
    return {
        name: (
            [(token.token, token.logprobs) for token in emitted(one, str(name))],
            one.finished(str(name)).reason,
        )
        for name in names
    }


@pytest.mark.parametrize("params", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("mode", [STABLE, MAX_ACCEPT])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_answers_are_those_of_steps_of_their_own(
    params: SamplingParams, mode: ExactnessMode, chunk: int
) -> None:
    options = {"params": params, "mode": mode, "is_enabled": False}
    everyone = range(len(PROMPTS))
    apart = told(harness(chunk, is_apart=True), everyone, **options)
    assert told(harness(chunk), everyone, **options) == apart
    assert told(harness(chunk), everyone[::-1], **options) == apart
    for name in everyone:
        assert told(harness(chunk), [name], **options) == {name: apart[name]}


@pytest.mark.parametrize("params", [LAWS["greedy"], LAWS["sampled"], LAWS["penalties"]])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_answers_with_drafts_are_those_of_steps_of_their_own(
    params: SamplingParams, chunk: int
) -> None:
    options = {"params": params, "mode": STABLE, "drafter": "model", "gamma": 3}
    everyone = range(len(PROMPTS))
    apart = told(harness(chunk, is_apart=True), everyone, **options)
    assert told(harness(chunk), everyone, **options) == apart


def test_a_first_token_does_not_depend_on_drafts() -> None:
    """It is drawn plainly: of a sampled draft's noise it uses none."""
    first_verdicts = []
    for options in ({"is_enabled": False}, {"gamma": 1}, {"gamma": 4}, {"drafter": "lookup"}):
        found = told(harness(), [1, 2, 4], mode=MAX_ACCEPT, temperature=1.0, **options)
        first_verdicts.append([tokens[0] for tokens, _ in found.values()])
    assert first_verdicts[1:] == first_verdicts[:1] * 3


@pytest.mark.parametrize(("length", "num_calls"), [(1, 6), (3, 6), (4, 6), (5, 7), (8, 7), (9, 8)])
def test_an_answer_costs_a_call_per_chunk_and_one_per_token_behind_the_first(
    length: int, num_calls: int
) -> None:
    """Where one token is left behind the chunks, it decodes."""
    one = harness()
    one.submit("a", [1] * length, max_tokens=6, is_enabled=False)
    one.run()
    assert len(one.tokens("a")) == 6
    assert one.target.num_extends == num_calls


def test_the_draft_model_reads_nothing_before_the_first_token() -> None:
    one = harness()
    one.submit("a", PROMPTS[2], drafter="model", gamma=3)
    one.worker.run_step()
    assert len(one.tokens("a")) == 1
    assert (one.target.num_extends, one.draft.num_extends) == (1, 0)


@pytest.mark.parametrize("drafter", ["model", "lookup", "model/lookup"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_sampled_answer_does_not_depend_on_whose_prompts_were_read_beside_its_own(
    drafter: str, chunk: int
) -> None:
    options = {"temperature": 1.0, "drafter": drafter, "gamma": 2}
    alone = [told(harness(chunk), [name], **options)[name] for name in range(len(PROMPTS))]
    for order in ((0, 1, 2, 3, 4), (4, 2, 1, 0, 3)):
        assert told(harness(chunk), order, **options) == {name: alone[name] for name in order}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"end_tokens": (4,)}, FinishReason.STOP_TOKEN),
        ({"stop_strings": ("e",)}, FinishReason.STOP_STRING),
        ({"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_an_answer_may_end_with_its_first_token(
    options: dict[str, object], reason: FinishReason
) -> None:
    one = Harness("F3", prefill_chunk=CHUNK)
    one.submit("stream", (5, 6), max_tokens=5, is_enabled=False)
    one.submit("a", (1, 2, 3), drafter="model", gamma=3, **options)
    one.run()
    finished = one.finished("a")
    assert (one.tokens("a"), finished.reason, finished.num_output) == ([4], reason, 1)
    # No pass verified anything.
    assert (finished.report.num_steps, finished.report.num_emitted) == (0, 0)
    assert finished.report.tokens_per_step is None
    assert one.tokens("stream") == [7, 8, 9, 0, 1]
    one.check_is_idle()


def test_figures_leave_first_tokens_out() -> None:
    """A draft that is always right: each pass gives five, and none is held to have drafted badly."""
    one = Harness("F3", draft=ScriptedEngine(counting_logits, limits(10)), prefill_chunk=CHUNK)
    one.submit("a", (1, 2, 3), max_tokens=11, drafter="model", gamma=4)
    one.run()
    report = one.finished("a").report
    assert (report.num_steps, report.num_emitted, report.tokens_per_step) == (2, 10, 5.0)
    assert (report.num_drafted, report.num_accepted, report.alpha_hat) == (8, 8, 1.0)
    snapshot = one.worker.snapshot()
    assert (snapshot.num_target_passes, snapshot.num_emitted) == (2, 11)
    traces = [event.trace for event in one.events["a"] if isinstance(event, Progressed)]
    assert [(len(trace.draft_tokens), trace.is_prompt) for trace in traces] == [
        (0, True),
        (4, False),
        (4, False),
    ]


def stream_and_prompt(prompt: Sequence[int] = (1, 2, 3), **options: object) -> Harness:
    """A stream in slot 0 that decodes, and a prompt that waits for slot 1."""
    one = Harness("F3", prefill_chunk=CHUNK)
    one.submit("stream", (8, 9), max_tokens=20, is_enabled=False)
    one.worker.run_step()
    one.submit("a", prompt, max_tokens=6, **options)
    return one


def test_a_row_takes_no_part_in_decoding_in_the_step_of_its_first_token() -> None:
    one = stream_and_prompt(gamma=3)
    one.worker.run_step()
    one.check_invariants()
    assert one.tokens("a") == [4]
    assert one.tokens("stream") == [0, 1]
    assert one.live[1].cache.num_computed == 3 == one.live[1].sequence.num_known - 1
    one.run()
    assert one.tokens("a") == [4, 5, 6, 7, 8, 9]
    assert one.tokens("stream") == [index % 10 for index in range(20)]


def test_a_row_in_front_of_rows_that_decode_keeps_all_that_was_read() -> None:
    """It is padding in the call that verifies the others: what it was fed, the last token included, stays."""
    one = Harness("F3", prefill_chunk=CHUNK)
    one.submit("a", range(6), max_tokens=6, gamma=2)
    one.submit("stream", (8,), max_tokens=20, gamma=2)
    for _ in range(2):
        one.worker.run_step()
        one.check_invariants()
    assert one.tokens("a") == [6]
    assert one.live[0].cache.num_computed == 6
    assert len(one.tokens("stream")) > 1
    one.run()
    assert one.tokens("a") == [6, 7, 8, 9, 0, 1]


def test_a_failing_verification_has_the_prompt_read_again() -> None:
    """The first token was drawn, and not yet told: nobody hears of it twice."""
    one = stream_and_prompt(range(6), temperature=1.0)
    one.worker.run_step()
    one.target.fail_at(one.target.num_extends + 1)
    one.worker.run_step()
    assert not one.events["a"]
    _, request = one.live
    assert request.cache.num_computed == request.sequence.num_output == 0
    one.run()
    expected = Harness("F3", prefill_chunk=CHUNK)
    expected.submit("a", range(6), max_tokens=6, temperature=1.0)
    expected.run()
    assert one.tokens("a") == expected.tokens("a")
    assert one.finished("a").report == expected.finished("a").report
    assert len(one.tokens("stream")) == 20
    one.check_is_idle()


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_failing_chunk_ends_whose_prompt_it_was(chunk: int) -> None:
    one = stream_and_prompt(range(6))
    while chunk:
        chunk -= 1
        one.worker.run_step()
    one.target.fail_at(one.target.num_extends, one.target.num_extends + 1)
    one.run()
    assert one.error("a").reason == "REQUEST_QUARANTINED"
    assert one.ending("a").num_output == 0
    assert len(one.tokens("stream")) == 20
    one.check_is_idle()


def test_a_sampler_that_fails_ends_whose_first_token_it_was_to_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = stream_and_prompt()
    sampler = one.worker._parts.sampler
    judge = sampler.judge

    def failing(logits, rows):
        if any(row.num_prompt == len(row.history) for row in rows):
            raise EngineError("the sampler failed")
        return judge(logits, rows)

    monkeypatch.setattr(sampler, "judge", failing)
    one.run()
    assert one.error("a").reason == "REQUEST_QUARANTINED"
    assert len(one.tokens("stream")) == 20
    one.check_is_idle()


def test_a_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.full(10, np.nan, np.float32) if prefix[0] == 9 else counting_logits(prefix)

    one = Harness("F3", target=ScriptedEngine(logits, limits(10)), prefill_chunk=16)
    for name, first in (("before", 1), ("bad", 9), ("behind", 1)):
        one.submit(name, (first, 2, 3), is_enabled=False)
    one.worker.run_step()
    assert one.error("bad").reason == "ENGINE_FAILED"
    assert one.tokens("before") == one.tokens("behind") == [4]
    one.run()
    assert one.tokens("before") == one.tokens("behind") == [(4 + i) % 10 for i in range(12)]


def test_whoever_chooses_gamma_sees_a_row_that_still_reads() -> None:
    costs: CostTable = table(c=0.01, slope=0.05)
    one = Harness("F3", prefill_chunk=CHUNK, costs=costs)
    gamma_controller = one.worker._parts.gamma_controller
    assert gamma_controller is not None
    choose, seen = gamma_controller.choose, Counter()

    def noting(live: Sequence[Request], caps: tuple[int | None, ...]) -> tuple[int | None, ...]:
        seen[tuple(cap is None for cap in caps)] += 1
        return choose(live, caps)

    gamma_controller.choose = noting  # type: ignore[method-assign]
    one.submit("stream", (8, 9), max_tokens=30)
    one.worker.run_step()
    assert not seen
    one.submit("a", (1, 2, 3), max_tokens=2)
    one.worker.run_step()
    assert seen == {(False, True): 1}
    one.worker.run_step()
    assert seen == {(False, True): 1, (False, False): 1}


def test_of_a_real_model_first_tokens_have_the_very_bits(tiny_bundle: Path) -> None:
    """Log-probabilities out of a chunk, alone or beside others, equal those of a step of one token (I2)."""
    whole = PairHarness(tiny_bundle, HOST)
    assert whole.pair.target.is_row_invariant
    apart = PairHarness.over(whole.pair, load_bundle(tiny_bundle), max_running=4)
    feed_all_but_last_tokens(apart.worker)
    asked = [
        spec(
            f"{length}", tuple(GENERATOR.integers(2, 500, length).tolist()), seed=length,
            max_tokens=3, temperature=temperature, mode=STABLE, gamma=2, num_logprobs=3,
        )
        for length, temperature in ((30, 1.0), (24, 0.0), (3, 1.0), (2, 0.0))
    ]  # fmt: skip

    def heard(harness: PairHarness, name: str) -> list[object]:
        events = [event for event in harness.events[name] if isinstance(event, Progressed)]
        return [(token.token, token.logprobs) for event in events for token in event.tokens]

    whole.answers(asked)
    apart.answers(asked)
    for one in asked:
        expected = heard(apart, one.request_id)
        assert heard(whole, one.request_id) == expected
        name = f"{one.request_id}-alone"
        whole.answers([replace(one, request_id=name, internal_id=name)])
        assert heard(whole, name) == expected
    whole.close()
