"""Completions of one prompt: each is that of its own seed asked alone, and the prompt is read once for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.errors import (
    Cancelled,
    DuplicateRequestId,
    Overloaded,
    RequestError,
    RequestQuarantined,
)
from outrider.runtime.core.events import Failed
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import sample_seed

from tests.runtime.markov import PAIRS, Harness, feed_all_but_last_tokens, limits
from tests.runtime.sourced import PREFIXES, sourced

NUM = 4
CHUNK = 4
# Nothing to read beside others, all in one chunk, one token behind a chunk, and several chunks.
PROMPTS = {length: tuple(i * i % 4 for i in range(length)) for length in (1, 4, 5, 15)}
MAX_ACCEPT, STABLE = ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE
LAWS = {
    "greedy": {"params": SamplingParams(temperature=0.0)},
    "sampled": {"params": SamplingParams()},
    "stable": {"params": SamplingParams(), "mode": STABLE},
    "truncated": {"params": SamplingParams(temperature=0.7, top_k=3, end_token_ids=(3,))},
}
DRAFTERS = ("none", "model", "lookup+model", "tree")


class Watched(ScriptedEngine):
    """Counts the tokens that it is fed and the slots that it copies; a prompt or a copy may fail."""

    def __init__(self, logits_of: Callable[..., FloatArray], bounds: object) -> None:
        super().__init__(logits_of, bounds)
        self.num_fed = self.num_copies = 0
        self.failing_copies: Sequence[int] = ()
        self.poison: tuple[int, ...] = ()

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.num_fed += sum(len(span.tokens) for span in spans)
        logits = super().extend(spans)
        if self.poison and any(self.tokens_of(span.slot) == self.poison for span in spans):
            raise EngineError("poison")
        return logits

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.num_copies += 1
        if self.num_copies - 1 in self.failing_copies:
            raise EngineError("scripted failure of a copy")
        super().move_slot(source, destination, length)


def harness(*, is_apart: bool = False, max_batch: int = 6, **settings: object) -> Harness:
    bounds = replace(limits(4, max_batch=max_batch), max_tree_nodes=8)
    engines = [Watched(logits_of, bounds) for logits_of in PAIRS["F4"][1:]]
    one = Harness(
        "F4",
        max_batch=max_batch,
        target=engines[0],
        draft=engines[1],
        **{"prefill_chunk": CHUNK, **settings},
    )
    if is_apart:
        feed_all_but_last_tokens(one.worker)
    return one


@cache
def alone(law: str, length: int, drafter: str, index: int, is_apart: bool) -> list[int]:
    """Tokens of a request that asks with the derived seed of a completion."""
    one = harness(is_apart=is_apart)
    seed = sample_seed(7, index)
    one.submit(
        "one", PROMPTS[length], seed=seed, max_tokens=11, drafter=drafter, gamma=3, **LAWS[law]
    )
    one.run()
    return one.tokens("one")


def ask(one: Harness, law: str, length: int, drafter: str = "none", num: int = NUM) -> None:
    options = {"max_tokens": 11, "drafter": drafter, "gamma": 3, **LAWS[law]}
    one.submit_group("g", PROMPTS[length], num, **options)


def check(
    one: Harness, law: str, length: int, drafter: str, indices: Sequence[int], **how: bool
) -> None:
    is_apart = how.get("is_apart", False)
    for index in indices:
        assert one.tokens(f"g.{index}") == alone(law, length, drafter, index, is_apart)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [1, 4, 15])
@pytest.mark.parametrize("law", ["sampled", "stable", "truncated"])
def test_each_is_the_answer_of_its_own_seed_asked_alone(
    law: str, length: int, drafter: str, is_apart: bool
) -> None:
    one = harness(is_apart=is_apart)
    ask(one, law, length, drafter)
    one.run()
    check(one, law, length, drafter, range(NUM), is_apart=is_apart)
    one.check_is_idle()


def test_a_prompt_is_copied_to_the_draft_no_sooner_than_it_would_be_fed() -> None:
    """Rows come to ask the draft model at different times; when its drafts begin decides their noise."""
    options = {"max_tokens": 25, "drafter": "lookup+model", "gamma": 3, "temperature": 1.0}
    one = harness()
    one.submit_group("g", PROMPTS[15], 6, **options)
    one.run()
    for index in range(6):
        other = harness()
        other.submit("one", PROMPTS[15], seed=sample_seed(7, index), **options)
        other.run()
        assert one.tokens(f"g.{index}") == other.tokens("one")


def test_completions_differ_and_end_by_themselves() -> None:
    one = harness()
    ask(one, "truncated", 5, num=6)
    one.run()
    endings = Counter(one.finished(f"g.{index}").num_output for index in range(6))
    assert len(endings) > 2
    assert {one.finished(f"g.{index}").num_prompt for index in range(6)} == {5}


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(4, 16), (15, CHUNK)])
def test_both_models_read_the_prompt_once(length: int, chunk: int, is_apart: bool) -> None:
    fed = []
    for num in (1, NUM):
        one = harness(is_apart=is_apart, prefill_chunk=chunk)
        options = {"max_tokens": 2, "drafter": "model", "gamma": 1, **LAWS["greedy"]}
        one.submit_group("g", PROMPTS[length], num, **options)
        one.run()
        fed.append((one.target.num_fed, one.draft.num_fed))
        assert one.target.num_copies >= num - 1
    of_one, of_all = fed
    # Behind the prompt, every completion is fed tokens of its own: no more than a few.
    assert of_all[0] - of_one[0] <= (NUM - 1) * 3
    assert of_all[1] - of_one[1] <= (NUM - 1) * 3
    assert of_one[0] >= length


def test_all_have_their_first_token_in_the_step_that_ends_the_prompt() -> None:
    one = harness()
    ask(one, "sampled", 15)
    for _ in range(3):
        one.worker.run_step()
        assert not any(one.events[f"g.{index}"] for index in range(NUM))
    one.worker.run_step()
    assert [len(one.tokens(f"g.{index}")) for index in range(NUM)] == [1] * NUM


def test_a_group_waits_for_all_its_slots_and_nobody_overtakes_it() -> None:
    one = harness(max_batch=4)
    for name in ("a", "b"):
        one.submit(name, (1, 2), max_tokens=5, is_enabled=False)
    ask(one, "sampled", 5, num=3)
    one.submit("later", (1, 2), max_tokens=5, is_enabled=False)
    assert one.worker.snapshot().num_queued == 4
    one.worker.run_step()
    assert {request.spec.request_id for request in one.live} == {"a", "b"}
    assert one.worker.snapshot().num_queued == 2
    one.run()
    check(one, "sampled", 5, "none", range(3))
    assert one.finished("later").num_output == 5


def test_beside_others_that_come_and_go_no_token_changes() -> None:
    one = harness(max_batch=6)
    one.submit("before", (1, 2, 3, 1, 2), max_tokens=3, temperature=1.0)
    ask(one, "sampled", 15, "model")
    one.submit("behind", (3, 2, 1, 1, 2, 1, 1), max_tokens=30, temperature=1.0)
    one.run()
    check(one, "sampled", 15, "model", range(NUM))


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 6])
def test_those_that_are_left_go_on(victims: Sequence[int], num_steps: int) -> None:
    """Before the prompt is read, another one reads it; the slots of those that leave are filled by the last."""
    one = harness()
    one.submit("before", (1, 2), max_tokens=2, is_enabled=False)
    ask(one, "sampled", 15, "model")
    one.submit("behind", (1,), max_tokens=20, is_enabled=False)
    for _ in range(num_steps):
        one.worker.run_step()
        one.check_invariants()
    for index in victims:
        one.worker.cancel("internal-g" + (f".{index}" if index else ""), Cancelled("client"))
    one.run()
    check(one, "sampled", 15, "model", [i for i in range(NUM) if i not in victims])
    for index in victims:
        assert one.error(f"g.{index}").reason == "CLIENT_CANCELLED"
    one.check_is_idle()


def test_of_a_queued_group_one_may_leave() -> None:
    one = harness(max_batch=4)
    one.submit("before", (1, 2), max_tokens=4, is_enabled=False)
    one.worker.run_step()
    ask(one, "sampled", 5)
    one.worker.cancel("internal-g", Cancelled("client"))
    one.run()
    check(one, "sampled", 5, "none", [1, 2, 3])
    one.submit("g", (1,), max_tokens=1)
    one.run()
    assert one.finished("g").num_output == 1


@pytest.mark.parametrize("failing", [(0,), (1, 2), (0, 1, 2), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("is_apart", [False, True])
def test_who_cannot_be_copied_to_reads_for_itself(failing: Sequence[int], is_apart: bool) -> None:
    one = harness(is_apart=is_apart)
    one.target.failing_copies = failing
    # As long as each other, so that none of them moves before all have ended.
    options = {"max_tokens": 11, "is_enabled": False, **LAWS["sampled"]}
    one.submit_group("g", PROMPTS[5], NUM, **options)
    one.run()
    for index in range(NUM):
        found = one.ending(f"g.{index}")
        if not isinstance(found, Failed) or len(failing) < 7:
            assert one.tokens(f"g.{index}") == alone("sampled", 5, "none", index, is_apart)
    one.check_is_idle()


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_a_failure_that_does_not_come_again_changes_no_token(number: int, is_apart: bool) -> None:
    one = harness(is_apart=is_apart)
    one.target.fail_at(number)
    one.submit("beside", (1, 2), max_tokens=12, temperature=1.0, is_enabled=False)
    ask(one, "stable", 15, "model")
    one.run()
    check(one, "stable", 15, "model", range(NUM), is_apart=is_apart)
    assert one.finished("beside").num_output == 12


def test_a_prompt_that_cannot_be_read_ends_its_group_alone() -> None:
    one = harness()
    one.target.poison = PROMPTS[5]
    one.submit("beside", (1, 2), max_tokens=30, temperature=1.0, is_enabled=False)
    one.worker.run_step()
    ask(one, "sampled", 5)
    one.run()
    for index in range(NUM):
        assert isinstance(one.error(f"g.{index}"), RequestQuarantined)
    assert one.finished("beside").num_output == 30
    one.check_is_idle()


@pytest.mark.parametrize("drafter", ["none", "model"])
@pytest.mark.parametrize("prefix", [PREFIXES[0], PREFIXES[1], PREFIXES[4]])
def test_a_source_is_read_once_by_each_model(prefix: Sequence[int], drafter: str) -> None:
    source = (1, 3, 2, 0, 1)
    options = {
        "source_tokens": source,
        "drafter": drafter,
        "gamma": 3,
        "max_tokens": 9,
        "temperature": 1.0,
        "mode": MAX_ACCEPT,
    }
    one = sourced()
    one.submit_group("g", prefix, NUM, **options)
    one.run()
    assert one.target.num_reads == 1
    assert one.draft.num_reads == (drafter == "model")
    for index in range(NUM):
        other = sourced()
        other.submit("one", prefix, **{**options, "seed": sample_seed(7, index)})
        other.run()
        assert one.tokens(f"g.{index}") == other.tokens("one")
    one.check_is_idle()


@pytest.mark.parametrize("number", range(3))
def test_a_failing_step_behind_a_read_spares_the_group(number: int) -> None:
    options = {"source_tokens": (1, 3, 2), "max_tokens": 6, "mode": STABLE, "temperature": 1.0}
    found = []
    for failing in ((), (number,)):
        one = sourced()
        one.target.fail_at(*failing)
        one.submit_group("g", PREFIXES[0], NUM, **options)
        one.run()
        found.append([one.tokens(f"g.{index}") for index in range(NUM)])
    assert found[0] == found[1]


def test_who_waits_counts_as_reading() -> None:
    one = sourced()
    one.submit_group("g", PREFIXES[0], 3, source_tokens=(1, 2), max_tokens=3)
    one.worker._admit()
    assert [request.state for request in one.live] == [State.READING] * 3
    assert [request.group.leader for request in one.live] == [None, *one.live[:1] * 2]
    one.run()


def test_a_queue_counts_a_group_as_one_request() -> None:
    one = harness(max_batch=3, max_queued=2, max_queued_tokens=20)
    one.submit("runs", (1, 2), max_tokens=9, is_enabled=False)
    one.worker.run_step()
    ask(one, "sampled", 15, num=3)
    snapshot = one.worker.snapshot()
    assert (snapshot.num_queued, snapshot.num_queued_tokens) == (1, 15)
    with pytest.raises(Overloaded):
        one.submit("too much", (1,) * 6)
    with pytest.raises(DuplicateRequestId):
        one.submit_group("g", (1,), 2)
    one.submit("fits", (1,) * 5)
    with pytest.raises(Overloaded):
        one.submit("no room", (1,))
    one.run()
    one.check_is_idle()


def test_a_name_is_free_when_the_last_of_a_group_has_ended() -> None:
    one = harness()
    ask(one, "truncated", 5, num=6)
    while sum(bool(e) and not hasattr(e[-1], "trace") for e in one.events.values()) < 3:
        one.worker.run_step()
    with pytest.raises(DuplicateRequestId):
        one.submit("g", (1,))
    one.run()
    one.submit("g", (1,))


def test_more_than_there_are_slots_is_refused() -> None:
    one = harness(max_batch=3)
    with pytest.raises(RequestError, match="at most 3, the slots of this server") as refused:
        ask(one, "sampled", 5, num=4)
    assert refused.value.field == "n"
    one.check_is_idle()
