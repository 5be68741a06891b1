"""Log-probabilities of prompts: those of the model for every token, whatever the chunks, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.pair import DEVICE, HOST
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.draws import raw_logprobs
from outrider.runtime.core.events import FinishReason, Progressed, PromptToken
from outrider.runtime.loop import prefill, step_context

from tests.addons import needs_accelerators
from tests.mutants import assert_caught
from tests.runtime.loop.test_first_tokens import CHUNK, GENERATOR, PROMPTS, STABLE, emitted
from tests.runtime.markov import (
    PAIRS,
    Harness,
    counting_logits,
    feed_all_but_last_tokens,
    limits,
    spec,
)
from tests.runtime.pair import PairHarness


def scored(one: Harness | PairHarness, name: str) -> tuple[PromptToken, ...]:
    """What a request was told of its prompt: once, with its first event."""
    told = [event.prompt for event in one.events[name] if isinstance(event, Progressed)]
    assert not any(told[1:])
    return told[0]


def expected(prompt: Sequence[int], num_top: int, pair: str = "F4") -> tuple[PromptToken, ...]:
    """The definition: each token under the softmax of the logits behind those before it."""
    logits_of = PAIRS[pair][1]
    behind = [
        PromptToken(
            token=token, logprobs=raw_logprobs(logits_of(tuple(prompt[:at])), token, num_top)
        )
        for at, token in enumerate(prompt)
        if at
    ]
    return (PromptToken(token=prompt[0], logprobs=None), *behind)


def emitted_logprobs(one: Harness, name: str) -> list[object]:
    return [(token.token, token.logprobs) for token in emitted(one, name)]


def served(chunk: int, scored_chunk: int, *, is_apart: bool = False) -> Harness:
    one = Harness("F4", prefill_chunk=chunk)
    bounds = replace(one.worker._parts.limits, scored_chunk=scored_chunk)
    one.worker._parts = replace(one.worker._parts, limits=bounds)
    one.worker._parts.prompts._limits = bounds
    if is_apart:
        feed_all_but_last_tokens(one.worker)
    return one


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, CHUNK, 16])
def test_every_token_has_the_models_own_log_probability(chunk: int, is_apart: bool) -> None:
    """In chunks of any length, alone or beside others, where the last token is part of a chunk or decodes."""
    one = served(16, chunk, is_apart=is_apart)
    for number, prompt in enumerate(PROMPTS):
        one.submit(str(number), prompt, num_prompt_logprobs=number % 4, max_tokens=3)
    one.run()
    one.check_is_idle()
    for number, prompt in enumerate(PROMPTS):
        assert scored(one, str(number)) == expected(prompt, number % 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"drafter": "model", "gamma": 3}])
def test_an_answer_is_as_without_scores(temperature: float, options: dict[str, object]) -> None:
    """Also where other chunks have the last token of a prompt decode."""
    answers = []
    for asked in (None, 2):
        one = served(16, CHUNK)
        for number, prompt in enumerate(PROMPTS):
            one.submit(
                str(number), prompt, temperature=temperature, mode=STABLE, num_logprobs=1,
                num_prompt_logprobs=asked, **options,
            )  # fmt: skip
        one.run()
        names = [str(number) for number in range(len(PROMPTS))]
        answers.append([emitted_logprobs(one, name) for name in names])
        assert all(bool(scored(one, name)) is (asked is not None) for name in names)
    assert answers[0] == answers[1]


def spans_of(one: Harness, monkeypatch: pytest.MonkeyPatch) -> list[list[Span]]:
    """Every call of the target, without the rows that take no part."""
    calls: list[list[Span]] = []
    extend = one.target.extend

    def noting(spans: Sequence[Span]) -> FloatArray:
        calls.append([span for span in spans if span.tokens])
        return extend(spans)

    monkeypatch.setattr(one.target, "extend", noting)
    return calls


def test_neighbours_are_fed_the_chunks_that_they_have_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it, behind it and on its other side; and no call computes logits that nobody asked for."""
    fed = []
    for asked in (None, 3):
        one = served(6, 2)
        calls = spans_of(one, monkeypatch)
        for name, prompt in (("a", PROMPTS[4]), ("b", PROMPTS[4]), ("c", PROMPTS[2])):
            wanted = asked if name == "b" else None
            one.submit(name, prompt, max_tokens=9, is_enabled=False, num_prompt_logprobs=wanted)
        one.run()
        lengths = [
            [(span.slot, span.start, len(span.tokens), span.num_logits) for span in call]
            for call in calls
        ]
        fed.append([[span for span in call if span[0] != 1 and span[2] > 1] for call in lengths])
        own = [span for call in lengths for span in call if span[0] == 1 and span[2] > 1]
        assert {span[2] == span[3] for span in own} == ({False} if asked is None else {True})
        assert all(len(call) == 1 for call in lengths if asked and call[0] in own)
    without, with_it = ([call for call in calls if call] for calls in fed)
    assert with_it == without == [[(0, 0, 6, 0)], [(0, 6, 5, 1)], [(2, 0, 4, 1)]]


def test_scored_prompts_are_fed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(16, 12)
    calls = spans_of(one, monkeypatch)
    for name in "abc":
        one.submit(name, PROMPTS[2], max_tokens=1, num_prompt_logprobs=1)
    one.run()
    assert [len(call) for call in calls] == [3]
    assert scored(one, "a") == scored(one, "c") == expected(PROMPTS[2], 1)


@pytest.mark.parametrize("asked", [None, 0, 2])
@pytest.mark.parametrize("length", [0, 3, 4])
@pytest.mark.parametrize("is_apart", [False, True])
def test_an_answer_of_no_token_ends_with_its_prompt(
    length: int, asked: int | None, is_apart: bool
) -> None:
    one, prompt = served(CHUNK, CHUNK, is_apart=is_apart), PROMPTS[length]
    one.submit("a", prompt, max_tokens=0, num_prompt_logprobs=asked, end_tokens=(0, 1, 2, 3))
    one.submit("b", prompt, max_tokens=3)
    one.run()
    one.check_is_idle()
    finished = one.finished("a")
    assert (finished.reason, finished.stop, finished.num_output) == (FinishReason.LENGTH, None, 0)
    assert one.tokens("a") == [] and one.text("a") == ""
    assert scored(one, "a") == (() if asked is None else expected(prompt, asked))
    assert (finished.report.num_emitted, finished.report.num_drafted) == (0, 0)
    alone = served(CHUNK, CHUNK, is_apart=is_apart)
    alone.submit("b", prompt, max_tokens=3)
    alone.run()
    assert one.tokens("b") == alone.tokens("b")


@pytest.mark.parametrize("number", range(5))
def test_a_failing_call_changes_no_score_and_tells_none_twice(number: int) -> None:
    one = served(16, CHUNK)
    one.target.fail_at(number)
    for name, prompt in (("a", PROMPTS[4]), ("b", PROMPTS[4]), ("c", PROMPTS[0])):
        one.submit(name, prompt, max_tokens=4, num_prompt_logprobs=2)
    one.run()
    for name, prompt in (("a", PROMPTS[4]), ("b", PROMPTS[4]), ("c", PROMPTS[0])):
        assert scored(one, name) == expected(prompt, 2)
        assert len(one.tokens(name)) == 4
    one.check_is_idle()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(value: float) -> None:
    def logits(prefix: tuple[int, ...]) -> FloatArray:
        is_broken = prefix[0] == 9 and len(prefix) == 2
        return np.full(10, value, np.float32) if is_broken else counting_logits(prefix)

    one = Harness("F3", target=ScriptedEngine(logits, limits(10)), prefill_chunk=16)
    for name, first in (("before", 1), ("bad", 9), ("behind", 1)):
        one.submit(name, (first, 2, 3), num_prompt_logprobs=2)
    one.run()
    assert one.error("bad").reason == "REQUEST_QUARANTINED"
    assert one.tokens("before") == one.tokens("behind") == [(4 + i) % 10 for i in range(12)]
    assert scored(one, "before") == expected((1, 2, 3), 2, "F3")


def test_of_a_groups_samples_the_first_one_tells() -> None:
    one = served(16, CHUNK)
    for name, sample in (("a", 0), ("b", 1)):
        one.submit(name, PROMPTS[3], max_tokens=2, num_prompt_logprobs=0, sample=sample)
    one.run()
    assert scored(one, "a") == expected(PROMPTS[3], 0)
    assert scored(one, "b") == ()


@pytest.mark.parametrize(("vocab_size", "tokens"), [(10, 16), (2**21, 4), (2**24, 1)])
def test_logits_of_a_chunk_are_bounded(vocab_size: int, tokens: int) -> None:
    one = Harness("F3", target=ScriptedEngine(counting_logits, limits(vocab_size)), has_draft=False,
                  prefill_chunk=64)  # fmt: skip
    found = one.worker._parts.limits
    assert (found.prefill_chunk, found.scored_chunk) == (16, tokens)
    assert tokens * vocab_size * 4 <= step_context.SCORED_BYTES or tokens == 1


MUTANTS = {
    "a token has the log-probability of the one behind it": (
        "sequence.tokens[start + 1 : min(end + 1",
        "sequence.tokens[start : min(end",
    ),
    "chunks overlap by a token": (
        "commit_scores(\n            start,",
        "commit_scores(\n            max(0, start - 1),",
    ),
    "the first token of an answer is drawn behind the first of its chunk": (
        "last.append(found[-1:])",
        "last.append(found[:1])",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def killer() -> None:
        test_every_token_has_the_models_own_log_probability(3, is_apart=False)
        test_an_answer_is_as_without_scores(0.0, {})

    assert_caught(monkeypatch, prefill, *MUTANTS[name], killer, (AssertionError, IndexError))


@pytest.mark.parametrize("place", [HOST, pytest.param(DEVICE, marks=needs_accelerators)])
def test_of_a_real_model_they_are_pytorchs(
    place: str, tiny_bundle: Path, tiny_checkpoints: tuple[Path, Path]
) -> None:
    """To 1e-4, tokens and the likeliest others; chunk by chunk, beside a prompt that is not scored."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = PairHarness(tiny_bundle, place)
    one = PairHarness.over(whole.pair, load_bundle(tiny_bundle), max_running=4, prefill_chunk=16)
    prompts = {str(n): tuple(GENERATOR.integers(2, 500, n).tolist()) for n in (40, 17, 2, 1)}
    asked = [
        spec(name, prompt, max_tokens=4 * (name == "17"), num_prompt_logprobs=5)
        for name, prompt in prompts.items()
    ]
    plain = replace(asked[1], request_id="x", internal_id="x", num_prompt_logprobs=None)
    one.answers([asked[0], plain, *asked[1:]])
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).eval()
    for name, prompt in prompts.items():
        first, *others = scored(one, name)
        assert (first.token, first.logprobs) == (prompt[0], None)
        assert tuple(token.token for token in others) == prompt[1:]
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        theirs = torch.log_softmax(logits, dim=-1)
        for at, token in enumerate(others):
            assert token.logprobs is not None
            assert token.logprobs.logprob == pytest.approx(float(theirs[at, token.token]), abs=1e-4)
            values, ids = theirs[at].topk(5)
            assert [i for i, _ in token.logprobs.top] == ids.tolist()
            assert [value for _, value in token.logprobs.top] == pytest.approx(
                values.tolist(), abs=1e-4
            )
    assert len(one.tokens("17")) == 4 == len(one.tokens("x"))
    assert one.tokens("17") == one.tokens("x")
    whole.close()
