"""One request that makes the engine raise ends alone; its neighbours' tokens are those of an undisturbed run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.bisect_failures import bisect_failures
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


@pytest.mark.parametrize(
    "drafter", ["model", "lookup", "suffix", "model/lookup", "phrases", "none"]
)
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
    while len(harness.live) < 2 or not all(one.sequence.num_output for one in harness.live):
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


class Watched(ScriptedEngine):
    """Notes, of every call, how many signs of life its worker had given when the call began."""

    def __init__(self) -> None:
        vocab_size, target, _ = PAIRS["F4"]
        super().__init__(target, limits(vocab_size, max_batch=6, max_context=MAX_CONTEXT))
        self.harness = Harness("F4", max_batch=6, target=self, has_draft=False)
        self.signs: list[int] = []

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.signs.append(self.harness.worker.heartbeat.num_steps)
        return super().extend(spans)


LONG_PROMPT = (0, 1, 2, 3) * 5
"""Several chunks, and more than one span."""


@pytest.mark.parametrize("options", [{}, {"beams": BeamParams(num_beams=2)}], ids=["rows", "beams"])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_no_call_of_a_recovery_is_late_because_of_those_before_it(
    options: dict[str, object], num_failures: int
) -> None:
    target = Watched()
    harness, heartbeat = target.harness, target.harness.worker.heartbeat
    for name in "ab":
        harness.submit(name, LONG_PROMPT, max_tokens=30, **options)
    # Both have read their prompts, and take their steps together.
    for _ in range(20):
        harness.worker.run_step()
    noted = len(heartbeat.took_s[False])
    target.fail_at(*range(target.num_extends, target.num_extends + num_failures))
    target.signs.clear()
    harness.worker.run_step()
    assert len(target.signs) > 2 + num_failures
    assert len({*target.signs}) == len(target.signs)
    assert len(heartbeat.took_s[False]) == noted
    harness.worker.run_step()
    assert len(heartbeat.took_s[False]) == noted + 1
    harness.run()
    assert harness.finished("a") and harness.finished("b")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_search_whose_prompt_fails_once_reads_it_again_with_a_sign_of_life_per_call(
    failing: int,
) -> None:
    target = Watched()
    harness = target.harness
    target.fail_at(failing)
    harness.submit("a", LONG_PROMPT, max_tokens=4, beams=BeamParams(num_beams=2))
    harness.run()
    assert harness.finished("a")
    # In every step of a search, the chunk that ends a prompt is followed by the first pass.
    assert len({*target.signs}) == len(target.signs) - 1


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

        done, failed = bisect_failures(range(size), attempt)
        assert [one for part in done for one in part] == [*sorted({*range(size)} - {*guilty})]
        assert tuple(one for one, _ in failed) == guilty
        # Whoever fails alone was tried alone twice; the whole of one member had failed before.
        assert all(tries.count(range(one, one + 1)) == 2 - (size == 1) for one in guilty)
