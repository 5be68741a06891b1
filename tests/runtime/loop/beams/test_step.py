"""Beam searches served: the plain search's answer, beside any neighbours; all slots are given back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.errors import Cancelled, RequestError
from outrider.runtime.core.events import Finished, FinishReason
from outrider.runtime.core.params import BeamParams
from outrider.runtime.loop.beams.beam import BeamRules

from tests.runtime.loop.beams.test_beam import plain
from tests.runtime.markov import Harness, limits

V = 6
END = 5


def table(seed: int, *, like: int | None = None, weight: float = 0.5):
    """Logits that depend on every token of the text; ``like`` mixes in another table's, so that they often agree."""

    def logits_of(prefix: tuple[int, ...]) -> FloatArray:
        row = np.random.default_rng([seed, len(prefix), *prefix]).normal(size=V)
        if like is not None:
            row = weight * row + np.random.default_rng([like, len(prefix), *prefix]).normal(size=V)
        return (1.5 * row).astype(np.float32)

    return logits_of


TARGET = table(1)
DRAFTS = {"close": table(2, like=1, weight=0.3), "far": table(3), "same": TARGET}


def harness_of(draft: str | None = "close", *, max_batch: int = 6, **settings: object) -> Harness:
    bounds = limits(V, max_batch=max_batch)
    return Harness(
        "F4",
        max_batch=max_batch,
        target=ScriptedEngine(TARGET, bounds),
        draft=None if draft is None else ScriptedEngine(DRAFTS[draft], bounds),
        has_draft=draft is not None,
        **settings,
    )


def oracle(
    prompt: Sequence[int], beams: BeamParams, max_tokens: int, end_tokens: Sequence[int] = ()
) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and sums, best first, by the plain implementation of the core's tests, from whole float64 rows."""

    def row_of(tokens: tuple[int, ...]) -> np.ndarray:
        row = TARGET((*prompt, *tokens)).astype(np.float64)
        return row - np.log(np.exp(row).sum())

    rules = BeamRules(
        num_beams=beams.num_beams,
        max_tokens=max_tokens,
        end_tokens=frozenset(end_tokens),
        length_penalty=beams.length_penalty,
        stops_early=beams.stops_early,
        is_exhaustive=beams.is_exhaustive,
    )
    return plain(row_of, rules)


def assert_answer(finished: Finished, expected: list[tuple[tuple[int, ...], float]]) -> None:
    assert [answer.tokens for answer in finished.beams] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(
        [answer.log_prob for answer in finished.beams], [total for _, total in expected], atol=1e-5
    )


def all_of(num_beams: int, **options: object) -> BeamParams:
    return BeamParams(num_beams=num_beams, num_results=num_beams, **options)


@pytest.mark.parametrize("num_beams", [1, 2, 3, 4])
def test_the_answer_is_the_plain_searchs(num_beams: int) -> None:
    harness = harness_of()
    for ends, penalty, stopping in product(
        ((), (END,), (4, END)), (1.0, -0.5), ({}, {"stops_early": True}, {"is_exhaustive": True})
    ):
        beams = all_of(num_beams, length_penalty=penalty, **stopping)
        expected = oracle((1, 2, 3), beams, 9, ends)
        name = f"{ends} {penalty} {stopping}"
        harness.submit(name, beams=beams, max_tokens=9, end_tokens=ends)
        harness.run()
        assert_answer(harness.finished(name), expected)
    harness.check_is_idle()


def test_a_search_is_not_drafted_for_whatever_is_asked() -> None:
    found = []
    for options in ({}, {"gamma": 4}, {"gamma": 4, "drafter": "model"}):
        for width in (0, 5):
            harness = harness_of()
            harness.submit("a", beams=all_of(2, width=width), max_tokens=20, **options)
            harness.worker.run_step()
            assert harness.worker.snapshot().num_free_slots == 4
            harness.run()
            found.append(harness.finished("a"))
            assert harness.draft.num_extends == 0
    assert all(one.beams == found[0].beams for one in found)
    for report in (one.report for one in found):
        assert (report.off_reason, report.num_steps, report.num_drafted) == ("DISABLED", 20, 0)
        assert report.tokens_per_step == 1.0


def test_searches_and_drawn_answers_share_a_server_and_change_nothing_of_each_other() -> None:
    """Random arrivals; each answer is the one its request gets alone."""
    rng = np.random.default_rng(5)
    requests: dict[str, dict[str, object]] = {}
    for index in range(30):
        options: dict[str, object] = {
            "prompt": [int(t) for t in rng.integers(0, V, size=rng.integers(1, 14))],
            "max_tokens": int(rng.integers(1, 14)),
            "gamma": index % 5,
            "end_tokens": (END,) if index % 2 else (),
            "seed": index,
        }
        if index % 3:
            options["beams"] = all_of(1 + index % 4, length_penalty=float(index % 2))
        else:
            options["temperature"] = float(index % 2)
        requests[str(index)] = options
    alone = {}
    for name, options in requests.items():
        single = harness_of()
        single.submit(name, **options)
        single.run()
        alone[name] = (single.tokens(name), single.finished(name).beams)
    harness = harness_of()
    for name, options in requests.items():
        harness.submit(name, **options)
        for _ in range(int(rng.integers(0, 3))):
            harness.worker.run_step()
            harness.check_invariants()
    harness.run()
    for name, options in requests.items():
        assert (harness.tokens(name), harness.finished(name).beams) == alone[name]
        if "beams" in options:
            beams, ends = options["beams"], options["end_tokens"]
            expected = oracle(options["prompt"], beams, options["max_tokens"], ends)
            assert_answer(harness.finished(name), expected)
    harness.check_is_idle()
    assert not any(harness.target.tokens_of(slot) for slot in range(6))


def test_the_best_results_come_with_text_scores_and_counts() -> None:
    harness = harness_of()
    beams = BeamParams(num_beams=3, num_results=2)
    harness.submit("a", beams=beams, max_tokens=6, end_tokens=(END,))
    harness.run()
    finished = harness.finished("a")
    expected = oracle((1, 2, 3), beams, 6, (END,))[:2]
    assert_answer(finished, expected)
    for answer, (tokens, total) in zip(finished.beams, expected, strict=True):
        is_stopped = tokens[-1] == END
        assert answer.text == "".join("abcdef"[t] for t in tokens[: len(tokens) - is_stopped])
        assert answer.score == pytest.approx(total / len(tokens))
        assert answer.reason == (FinishReason.STOP_TOKEN if is_stopped else FinishReason.LENGTH)
        assert answer.stop == (END if is_stopped else None)
    assert finished.text == finished.beams[0].text
    assert finished.num_output == sum(len(tokens) for tokens, _ in expected)
    assert finished.num_prompt == 3
    assert len(harness.events["a"]) == 1, "nothing is final before the end"
    snapshot = harness.worker.snapshot()
    assert snapshot.num_emitted == finished.num_output
    assert snapshot.num_target_passes == finished.report.num_steps
    assert snapshot.num_accepted == finished.report.num_accepted


def test_a_search_is_told_from_its_neighbours_when_rows_move() -> None:
    """The search that came first ends first: the rows of the other move into its slots and go on."""
    harness = harness_of(max_batch=5)
    harness.submit("first", beams=all_of(2), gamma=2, max_tokens=3)
    harness.submit("second", (2, 2, 4), beams=all_of(3), gamma=2, max_tokens=12)
    harness.worker.run_step()
    assert harness.worker._rows.searches[1].slots == [0, 1, 2]
    while len(harness.worker._rows.searches) == 2:
        harness.worker.run_step()
        harness.check_invariants()
    assert sorted(harness.worker._rows.searches[0].slots) == [2, 3, 4]
    harness.run()
    assert_answer(harness.finished("first"), oracle((1, 2, 3), all_of(2), 3))
    assert_answer(harness.finished("second"), oracle((2, 2, 4), all_of(3), 12))


def test_end_tokens_are_not_searched_before_min_tokens() -> None:
    harness = harness_of()
    params = SamplingParams(temperature=0.0, end_token_ids=(END,), min_tokens=4)
    harness.submit("a", beams=all_of(3), max_tokens=8, params=params)
    harness.run()
    lengths = [len(answer.tokens) for answer in harness.finished("a").beams]
    assert min(lengths) > 4
    assert all(END not in answer.tokens[:4] for answer in harness.finished("a").beams)


def test_a_search_waits_until_all_its_slots_are_free_and_nobody_overtakes_it() -> None:
    harness = harness_of(max_batch=3)
    harness.submit("runs", max_tokens=6, is_enabled=False)
    harness.worker.run_step()
    harness.submit("search", beams=all_of(3), max_tokens=3)
    harness.submit("behind", max_tokens=3)
    harness.worker.run_step()
    snapshot = harness.worker.snapshot()
    assert (snapshot.num_running, snapshot.num_queued, snapshot.num_free_slots) == (1, 2, 2)
    while not harness.events["runs"] or not isinstance(harness.events["runs"][-1], Finished):
        harness.worker.run_step()
        harness.check_invariants()
    harness.worker.run_step()
    snapshot = harness.worker.snapshot()
    assert (snapshot.num_running, snapshot.num_queued, snapshot.num_free_slots) == (1, 1, 0)
    harness.run()
    assert len(harness.finished("search").beams) == 3
    assert harness.finished("behind").num_output == 3
    harness.check_is_idle()


def test_more_beams_than_slots_are_refused() -> None:
    harness = harness_of(max_batch=2)
    with pytest.raises(RequestError) as refusal:
        harness.submit("a", beams=all_of(3))
    assert refusal.value.field == "num_beams"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_cancelled_search_frees_all_its_slots_within_one_step(num_steps: int) -> None:
    harness = harness_of(max_batch=4)
    harness.submit("a", (1,) * 9, beams=all_of(4), max_tokens=50)
    for _ in range(num_steps):
        harness.worker.run_step()
    harness.submit("waiting", beams=all_of(4), max_tokens=3)
    harness.worker.cancel("internal-a", Cancelled("abort"))
    harness.worker.run_step()
    assert harness.error("a").reason == "ABORTED_BY_RPC"
    assert harness.worker.snapshot().num_running == 1
    harness.run()
    assert_answer(harness.finished("waiting"), oracle((1, 2, 3), all_of(4), 3))
    harness.check_is_idle()


def test_a_deadline_ends_a_search() -> None:
    harness = harness_of()
    harness.submit("a", beams=all_of(4), max_tokens=50, deadline_s=2.0)
    harness.submit("b", beams=all_of(2), max_tokens=5)
    harness.worker.run_step()
    harness.clock.now = 2.0
    harness.worker.run_step()
    assert harness.error("a").reason == "DEADLINE"
    harness.run()
    assert_answer(harness.finished("b"), oracle((1, 2, 3), all_of(2), 5))
    harness.check_is_idle()


def test_a_target_that_fails_once_changes_no_answer() -> None:
    harness = harness_of(max_batch=6)
    harness.submit("search", (1,), beams=all_of(2), gamma=0, max_tokens=9)
    harness.worker.run_step()
    harness.submit("drawn", (1,), max_tokens=9, is_enabled=False)
    harness.submit("feeds", (1,) * 20, beams=all_of(2), gamma=0, max_tokens=4)
    harness.worker.run_step()
    # The drawn row's pass, a chunk of the prompt, the search's pass.
    harness.target.fail_at(harness.target.num_extends + 2)
    harness.worker.run_step()
    assert [one.request.cache.num_computed for one in harness.worker._rows.searches] == [0, 0]
    harness.run()
    assert_answer(harness.finished("search"), oracle((1,), all_of(2), 9))
    assert harness.finished("drawn").num_output == 9
    assert_answer(harness.finished("feeds"), oracle((1,) * 20, all_of(2), 4))
    harness.check_is_idle()


def test_a_row_that_is_not_finite_ends_its_search_alone() -> None:
    def broken(prefix: tuple[int, ...]) -> FloatArray:
        row = TARGET(prefix)
        # Behind one of the two that live, and not behind the other.
        if prefix[0] == 4 and len(prefix) == 5 and prefix[-1] % 2:
            row[2] = np.nan
        return row

    harness = harness_of()
    harness.worker._rows._engines[0]._logits_of = broken
    harness.submit("bad", (4, 1), beams=all_of(2), max_tokens=9)
    harness.submit("good", beams=all_of(2), max_tokens=9)
    harness.run()
    assert harness.error("bad").reason == "ENGINE_FAILED"
    assert_answer(harness.finished("good"), oracle((1, 2, 3), all_of(2), 9))
    harness.check_is_idle()


def test_a_slot_that_cannot_be_copied_ends_its_search_alone() -> None:
    class Immovable(ScriptedEngine):
        def move_slot(self, source: int, destination: int, length: int) -> None:
            if self.tokens_of(source)[:1] == (4,):
                raise EngineError("cannot move")
            super().move_slot(source, destination, length)

    bounds = limits(V, max_batch=6)
    harness = Harness(
        "F4", max_batch=6, target=Immovable(TARGET, bounds), draft=ScriptedEngine(TARGET, bounds)
    )
    harness.submit("bad", (4, 1), beams=all_of(2), max_tokens=9)
    harness.submit("good", beams=all_of(2), max_tokens=9)
    harness.run()
    assert harness.error("bad").reason == "ENGINE_FAILED"
    assert_answer(harness.finished("good"), oracle((1, 2, 3), all_of(2), 9))
    harness.check_is_idle()


def test_stopping_ends_searches_that_run_and_that_wait() -> None:
    harness = harness_of(max_batch=4)
    harness.submit("runs", beams=all_of(3), gamma=2, max_tokens=50)
    harness.submit("waits", beams=all_of(2), max_tokens=50)
    harness.worker.run_step()
    assert harness.worker.stop(0.0)
    assert harness.error("runs").reason == "DRAIN_DEADLINE"
    assert harness.error("waits").reason == "DRAINING"
    harness.check_is_idle()


def test_a_row_that_cannot_be_moved_ends_its_search_alone() -> None:
    """The search that came first leaves; a row of the second cannot take its place."""

    class Stuck(ScriptedEngine):
        is_stuck = False

        def move_slot(self, source: int, destination: int, length: int) -> None:
            if self.is_stuck:
                raise EngineError("cannot move")
            super().move_slot(source, destination, length)

    target = Stuck(TARGET, limits(V, max_batch=6))
    harness = Harness("F4", max_batch=6, target=target, has_draft=False)
    harness.submit("first", beams=all_of(2), max_tokens=30)
    harness.submit("second", beams=all_of(2), max_tokens=30)
    harness.submit("other", max_tokens=9)
    for _ in range(4):
        harness.worker.run_step()
    target.is_stuck = True
    harness.worker.cancel("internal-first", Cancelled("client"))
    harness.worker.run_step()
    target.is_stuck = False
    assert harness.error("first").reason == "CLIENT_CANCELLED"
    assert harness.error("second").reason == "ENGINE_FAILED"
    harness.run()
    assert harness.finished("other").num_output == 9
    harness.check_is_idle()


def test_a_prompt_that_cannot_be_fed_ends_its_search_alone() -> None:
    harness = harness_of(max_batch=6)
    # The search that is fed stands between the two that run.
    harness.submit("above", (1,), beams=all_of(2), gamma=0, max_tokens=9)
    harness.submit("between", (1,) * 20, beams=all_of(2), gamma=0, max_tokens=4)
    harness.submit("below", (2,), beams=all_of(2), gamma=0, max_tokens=9)
    harness.worker.run_step()
    # A chunk of the prompt was fed; the next one fails.
    harness.target.fail_at(harness.target.num_extends, harness.target.num_extends + 1)
    harness.run()
    assert harness.error("between").reason == "REQUEST_QUARANTINED"
    assert_answer(harness.finished("above"), oracle((1,), all_of(2), 9))
    assert_answer(harness.finished("below"), oracle((2,), all_of(2), 9))
    harness.check_is_idle()
