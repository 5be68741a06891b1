"""One request that makes the engine raise ends alone; its neighbours' tokens are those of an undisturbed run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.halves import tried_in_halves
from outrider.runtime.core.params import BeamParams
from outrider.runtime.core.request import Request

from tests.runtime.markov import MAX_CONTEXT, PAIRS, Harness, limits

POISON = (3, 3, 3)
PROMPTS = {"a": (1, 2), "b": (0, 1, 2, 3, 0, 1), "c": (2,), "d": (1, 1, 2)}
MODES = [
    (0.0, ExactnessMode.MAX_ACCEPT),
    (1.0, ExactnessMode.MAX_ACCEPT),
    (1.0, ExactnessMode.SEED_STABLE),
]


class Poisoned(ScriptedEngine):
    """Raises whenever the poisonous prompt is in a call and long enough."""

    def __init__(self, error: type[Exception], bad_from: int) -> None:
        vocab_size, target, _ = PAIRS["F4"]
        super().__init__(target, limits(vocab_size, max_batch=6, max_context=MAX_CONTEXT))
        self._error = error
        self._bad_from = bad_from

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        for span in spans:
            text = self.tokens_of(span.slot)[: span.start] + span.tokens
            if span.tokens and text[:3] == POISON and len(text) >= self._bad_from:
                for lost in spans:
                    self._slots[lost.slot] = ()
                raise self._error("poison")
        return super().extend(spans)


def served(
    harness: Harness, order: Sequence[str], temperature: float, mode: ExactnessMode, drafter: str
) -> None:
    for name in order:
        prompt = PROMPTS.get(name, POISON)
        options = {"temperature": temperature, "mode": mode, "drafter": drafter, "gamma": 3}
        harness.submit(name, prompt, max_tokens=14, seed=len(prompt), **options)
    harness.run()


@pytest.mark.parametrize("drafter", ["model", "lookup", "ngram", "model/lookup", "phrases", "none"])
@pytest.mark.parametrize(("temperature", "mode"), MODES)
@pytest.mark.parametrize("bad_from", [2, 3, 6])
def test_the_guilty_request_ends_alone_and_no_other_token_changes(
    drafter: str, temperature: float, mode: ExactnessMode, bad_from: int
) -> None:
    undisturbed = Harness("F4", max_batch=6)
    served(undisturbed, tuple(PROMPTS), temperature, mode, drafter)
    for error, order in (
        (EngineError, ("a", "poison", "b", "c", "d")),
        (ZeroDivisionError, ("a", "b", "c", "d", "poison")),
    ):
        harness = Harness("F4", max_batch=6, target=Poisoned(error, bad_from))
        served(harness, order, temperature, mode, drafter)
        assert harness.error("poison").reason == "REQUEST_QUARANTINED"
        for name in PROMPTS:
            assert harness.tokens(name) == undisturbed.tokens(name)
            report = undisturbed.finished(name).report
            assert harness.finished(name).report.off_reason == report.off_reason
        harness.check_is_idle()


def test_two_guilty_requests_are_both_found() -> None:
    harness = Harness("F4", max_batch=6, target=Poisoned(EngineError, 5))
    for name, prompt in (("one", POISON), ("a", (1, 2)), ("two", POISON), ("b", (2,))):
        harness.submit(name, prompt, max_tokens=9, gamma=2)
    harness.run()
    reasons = {harness.error(name).reason for name in ("one", "two")}
    assert reasons == {"REQUEST_QUARANTINED"}
    assert harness.finished("a").num_output == harness.finished("b").num_output == 9


def test_where_every_half_fails_the_engine_is_blamed() -> None:
    harness = Harness("F4", max_batch=6)
    served(harness, ("a", "b"), 0.0, MODES[0][1], "none")
    for name in ("c", "d"):
        harness.submit(name, PROMPTS[name], max_tokens=9)
    while len(harness.live) < 2 or not all(one.num_output for one in harness.live):
        harness.worker.run_step()
    harness.target.fail_at(*range(harness.target.num_extends, 1000))
    harness.run()
    assert {harness.error(name).reason for name in "cd"} == {"ENGINE_FAILED"}
    harness.check_is_idle()


@pytest.mark.parametrize("failing", range(12))
def test_a_failure_that_does_not_come_again_ends_nobody(failing: int) -> None:
    undisturbed, harness = Harness("F4"), Harness("F4")
    harness.target.fail_at(failing)
    for one in (undisturbed, harness):
        served(one, tuple(PROMPTS), 1.0, ExactnessMode.MAX_ACCEPT, "model")
    for name in PROMPTS:
        assert harness.tokens(name) == undisturbed.tokens(name)


@pytest.mark.parametrize("bad_from", [2, 6])
def test_a_guilty_search_ends_alone(bad_from: int) -> None:
    beams = BeamParams(num_beams=2)
    undisturbed = Harness("F4", max_batch=6)
    harness = Harness("F4", max_batch=6, target=Poisoned(EngineError, bad_from))
    for one in (undisturbed, harness):
        one.submit("good", (1, 2), beams=beams, max_tokens=8)
        one.submit("row", (2, 1), max_tokens=12)
        if one is harness:
            one.submit("poison", POISON, beams=beams, max_tokens=8)
        one.run()
    assert harness.error("poison").reason == "REQUEST_QUARANTINED"
    assert harness.finished("good").beams == undisturbed.finished("good").beams
    assert harness.tokens("row") == undisturbed.tokens("row")
    harness.check_is_idle()


def test_a_bug_behind_a_verdict_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Request.commit

    def broken(request: Request, *arguments: object, **options: object) -> object:
        if request.spec.request_id == "bad":
            raise ArithmeticError("a bug in the text")
        return commit(request, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Request, "commit", broken)
    harness = Harness("F4")
    harness.submit("bad")
    harness.submit("other")
    harness.run()
    assert harness.error("bad").reason == "ENGINE_FAILED"
    assert harness.finished("other").num_output == 12


@pytest.mark.parametrize("size", range(1, 9))
def test_whoever_fails_alone_is_found_in_every_group(size: int) -> None:
    for guilty in itertools.chain.from_iterable(
        itertools.combinations(range(size), count) for count in range(size + 1)
    ):
        tries: list[Sequence[int]] = []

        def attempt(part: Sequence[int], guilty: Sequence[int] = guilty) -> Sequence[int]:
            tries.append(part)  # noqa: B023 - called in this round only
            if {*part} & {*guilty}:
                raise ValueError
            return part

        done, failed = tried_in_halves(range(size), attempt)
        assert [one for part in done for one in part] == [*sorted({*range(size)} - {*guilty})]
        assert tuple(one for one, _ in failed) == guilty
        # Whoever fails alone was tried alone twice; the whole of one member had failed before.
        assert all(tries.count(range(one, one + 1)) == 2 - (size == 1) for one in guilty)
