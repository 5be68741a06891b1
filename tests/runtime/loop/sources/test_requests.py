"""Requests with a source: who reads what and when, and every answer is that of the request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import FloatArray, Source
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ContextTooLong, Overloaded, RequestError
from outrider.runtime.core.events import Finished, FinishReason, Progressed
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import BeamParams, SpeculationParams
from outrider.runtime.drafters.registry import REGISTRY
from outrider.runtime.drafters.text.suffix_array import write_datastore

from tests.runtime.markov import Clock, Harness
from tests.runtime.sourced import (
    GREEDY,
    MAX_SOURCE,
    PAIRS,
    SHARED_NOISE,
    answer,
    bounds_of,
    mixed,
    sourced,
    stable,
    submit,
)

COMPOSED = ("model/lookup", "model/phrases", "lookup+model", "suffix:6+model:2", "tree+suffix")
NAMES = (*(name for name in REGISTRY if name != "none"), *COMPOSED)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    rng = np.random.default_rng(5)
    write_datastore([rng.integers(0, 4, 60).tolist()], folder, vocab_size=4)
    return folder


@pytest.mark.parametrize("way", [GREEDY, SHARED_NOISE], ids=["greedy", "shared noise"])
@pytest.mark.parametrize("drafter", NAMES)
def test_no_drafter_changes_a_token(
    corpus: Path, drafter: str, way: tuple[float, ExactnessMode]
) -> None:
    """Every gamma, batches of 1 to 16, random arrivals, sources of mixed length."""
    temperature, mode = way
    drafting = DraftingConfig(
        datastore=str(corpus), min_prob=0.02, suffix_factor=4.0, trees_may_round_differently=True
    )
    has_trees = "tree" in drafter or drafter in ("lookahead", "ouroboros")
    harness = sourced(max_batch=16, drafting=drafting, num_nodes=16 if has_trees else 0)
    reference = tuple(answer("S4", 2, *way)[:9])
    num_drafted = num_accepted = 0
    for gamma, batch in [*((gamma, 3) for gamma in range(9)), (2, 1), (4, 16)]:
        params = SpeculationParams(
            drafter=drafter, gamma=gamma, mode=mode, reference_tokens=reference
        )
        arrivals = np.random.default_rng(gamma * 17 + batch)
        label = f"{gamma}-{batch}-"
        for index in range(batch):
            submit(harness, "S4", index, temperature, params, label)
            for _ in range(int(arrivals.integers(0, 4))):
                harness.worker.run_step()
                harness.check_invariants()
        harness.run()
        for index in range(batch):
            assert harness.tokens(f"{label}{index}") == answer("S4", index, *way), (gamma, index)
            report = harness.finished(f"{label}{index}").report
            assert report.off_reason == ("DISABLED" if gamma == 0 else None)
            num_drafted += report.num_drafted
            num_accepted += report.num_accepted
    harness.check_is_idle()
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "phrases"])
def test_a_drafter_of_text_finds_the_answer_in_the_source(drafter: str) -> None:
    """S3 copies most of its source; where it may not be quoted, less is found."""
    kept = []
    for is_quotable in (True, False):
        harness = sourced("S3", drafting=DraftingConfig(lookup_min_ngram=1, min_prob=0.1))
        source = tuple(np.random.default_rng(3).permutation(10).tolist()) * 2
        harness.submit(
            "a", (source[0],), source_tokens=source, source_is_quotable=is_quotable,
            max_tokens=18, drafter=drafter, gamma=4,
        )  # fmt: skip
        harness.run()
        kept.append(harness.finished("a").report.num_accepted)
    assert kept[0] > kept[1]


@pytest.mark.parametrize("drafter", NAMES)
def test_ids_of_the_source_that_no_answer_has_are_never_proposed(
    corpus: Path, drafter: str
) -> None:
    """The source's vocabulary is larger than the answer's."""
    bounds = replace(bounds_of("S4"), max_tree_nodes=32, max_extend=32)
    target, draft = (
        ScriptedEngine(mixed(seed, like=1 if seed == 2 else None), bounds, source_vocab_size=9)
        for seed in (1, 2)
    )
    drafting = DraftingConfig(
        datastore=str(corpus), min_prob=0.02, window=2, draft_window=2, lookup_min_ngram=1,
        trees_may_round_differently=True,
    )  # fmt: skip
    harness = sourced(target=target, draft=draft, drafting=drafting)
    prompt = {"prompt": (0,), "source_tokens": (0, 7, 1, 8, 2, 5, 3, 6, 0, 4), "max_tokens": 14}
    harness.submit("plain", is_enabled=False, **prompt)
    harness.submit("fast", drafter=drafter, gamma=6, **prompt)
    harness.run()
    assert harness.tokens("fast") == harness.tokens("plain")
    assert harness.finished("fast").report.off_reason is None
    traces = [one.trace for one in harness.events["fast"] if isinstance(one, Progressed)]
    assert all(0 <= token < 4 for trace in traces for token in trace.draft_tokens)


def test_sampled_answers_of_a_fixed_gamma_do_not_depend_on_neighbours() -> None:
    """When a row's draft model reads, and so which noise its draws use, is the row's own affair."""
    way = SpeculationParams(drafter="model", gamma=3)

    def answers_of(names: Sequence[int]) -> dict[int, list[int]]:
        harness = sourced()
        for name in names:
            submit(harness, "S4", name, 1.0, way, max_tokens=20)
        harness.run()
        return {name: harness.tokens(str(name)) for name in names}

    alone = {name: answers_of([name])[name] for name in range(9)}
    assert answers_of(range(9)) == alone
    assert answers_of(range(8, -1, -1)) == alone


def test_answers_in_random_slot_reuse_are_those_of_requests_alone(num_requests: int = 300) -> None:
    harness = sourced(max_batch=7)
    rng = np.random.default_rng(0)
    names = ["model", "lookup", "model/lookup", "suffix+model", "none"]
    for index in range(num_requests):
        params = SpeculationParams(
            drafter=names[int(rng.integers(len(names)))],
            gamma=int(rng.integers(1, 6)),
            mode=ExactnessMode.SEED_STABLE,
        )
        submit(harness, "S4", index, 1.0, params)
        for _ in range(int(rng.integers(0, 5))):
            harness.worker.run_step()
            harness.check_invariants()
    harness.run(max_steps=20_000)
    harness.check_is_idle()
    alone = sourced(max_batch=1)
    for index in range(num_requests):
        submit(alone, "S4", index, *stable("none"))
        while alone.worker.run_step():
            pass
        assert harness.tokens(str(index)) == alone.tokens(str(index)), index


def test_a_source_is_told_as_the_prompt_and_the_prefix_nowhere() -> None:
    harness = sourced()
    harness.submit("a", (1, 2, 3), source_tokens=(0, 1, 2, 3, 0), max_tokens=4)
    harness.run()
    assert harness.finished("a").num_prompt == 5
    assert harness.finished("a").num_output == 4


def test_penalties_see_the_decoders_text_alone() -> None:
    """A repetition penalty is of the prefix and the answer; presence and frequency of the answer."""

    def logits(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
        return np.array([2.0, 1.9, 1.7, 1.5], np.float32)

    for params, expected in (
        (SamplingParams(temperature=0.0, repetition_penalty=2.0), [0, 1, 2, 0]),
        (SamplingParams(temperature=0.0, presence_penalty=0.25), [0, 1, 0, 0]),
    ):
        for gamma in (0, 3):
            prefix = (3,) if params.repetition_penalty == 2.0 else (0,)
            harness = sourced(target=ScriptedEngine(logits, bounds_of("S4")))
            harness.submit(
                "a", prefix, source_tokens=(0, 1, 0, 1, 2), params=params, drafter="lookup",
                gamma=gamma, max_tokens=4,
            )  # fmt: skip
            harness.run()
            assert harness.tokens("a") == expected, params


def test_a_forced_prefix_is_never_sampled_and_never_told() -> None:
    harness = sourced("S3")
    harness.submit("a", (7, 9), source_tokens=(4, 5, 6), max_tokens=3, drafter="model", gamma=2)
    harness.run()
    # The chain goes on behind two tokens, and none of them is in the answer.
    assert harness.tokens("a") == [5, 6, 5]
    assert harness.text("a") == "fgf"


def test_a_row_whose_prefix_is_one_token_decodes_in_the_step_of_its_read() -> None:
    harness = sourced()
    harness.submit("a", (0,), source_tokens=(1, 2), is_enabled=False)
    harness.worker.run_step()
    assert (harness.target.num_reads, len(harness.tokens("a"))) == (1, 1)
    harness.submit("b", (0, 1), source_tokens=(1, 2), is_enabled=False)
    harness.worker.run_step()
    assert (harness.target.num_reads, len(harness.tokens("b"))) == (2, 0)
    assert harness.live[1].state is State.PREFILLING
    harness.worker.run_step()
    assert len(harness.tokens("b")) == 1


def test_a_stream_waits_for_one_read_a_step_and_sources_alike_share_it() -> None:
    harness = sourced(max_batch=9)
    harness.submit("stream", (0,), source_tokens=(1,), max_tokens=60, is_enabled=False)
    harness.worker.run_step()
    lengths = {"a": 10, "b": 9, "c": 10, "d": 24, "e": 2}
    for name, length in lengths.items():
        harness.submit(name, (0,), source_tokens=(1,) * length, max_tokens=30, is_enabled=False)
    unread = []
    while any(one.cache.num_unread for one in harness.live) or len(harness.live) == 1:
        before, reads = len(harness.tokens("stream")), harness.target.num_reads
        harness.worker.run_step()
        assert len(harness.tokens("stream")) == before + 1
        assert harness.target.num_reads == reads + 1
        unread.append(harness.worker.snapshot().num_reading)
    # Three of ten tokens fit into 32; two tokens would be padded by 22.
    assert unread == [2, 1, 0]


def test_reads_are_counted() -> None:
    clock = Clock()

    class Slow(ScriptedEngine):
        def read(self, sources: Sequence[Source]) -> None:
            clock.now += 0.02 * len(sources)
            super().read(sources)

    harness = sourced(target=Slow(PAIRS["S4"][1], bounds_of("S4")), clock=clock)
    for name, length in (("a", 8), ("b", 8), ("c", MAX_SOURCE)):
        harness.submit(name, (0,), source_tokens=(1,) * length, is_enabled=False)
    harness.run()
    snapshot = harness.worker.snapshot()
    assert snapshot.num_source_tokens == 16 + MAX_SOURCE
    assert snapshot.read_s == pytest.approx(0.06)
    # 20 ms and 40 ms: buckets end at 25 and at 50.
    assert snapshot.reads_by_s == (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
    assert snapshot.num_reading == 0


def test_a_draft_model_reads_when_it_is_asked_and_once() -> None:
    harness = sourced()
    for index in range(4):
        submit(harness, "S4", index, *stable("lookup"))
    harness.run()
    assert harness.draft.num_reads == 0
    submit(harness, "S4", 5, *stable("lookup+model"), max_tokens=30)
    harness.run()
    assert harness.draft.num_reads == 1


@pytest.mark.parametrize("length", [1, 4])
def test_sources_alike_are_read_by_the_draft_model_in_one_call(length: int) -> None:
    """Also where a row misses no more tokens than are fed along with the others."""
    harness = sourced()
    for name in range(3):
        source = (name,) * length
        harness.submit(
            str(name), (0,), source_tokens=source, drafter="model", gamma=3, max_tokens=9
        )
    harness.worker.run_step()
    harness.check_invariants()
    assert (harness.target.num_reads, harness.draft.num_reads) == (1, 1)
    harness.run()
    for name in range(3):
        report = harness.finished(str(name)).report
        assert (report.off_reason, report.num_drafted > 0) == (None, True)


def test_a_source_too_long_for_the_draft_model_is_answered_plainly() -> None:
    draft = ScriptedEngine(mixed(2, like=1), bounds_of("S4", max_source=4))
    harness = sourced(draft=draft)
    for name, length in (("short", 4), ("long", 5)):
        source = (1,) * length
        harness.submit(name, (0,), source_tokens=source, drafter="model", gamma=3)
    harness.run()
    assert harness.finished("short").report.num_drafted > 0
    assert harness.finished("long").report.num_drafted == 0
    # It was not asked to.
    assert harness.finished("long").report.off_reason != "DEGRADED"
    assert harness.finished("long").num_output == 12


def test_the_queue_counts_sources_and_what_answers_begin_with() -> None:
    harness = sourced(max_batch=1, max_queued_tokens=20)
    harness.submit("runs", (0,), source_tokens=(1,))
    harness.worker.run_step()
    harness.submit("waits", (0,) * 4, source_tokens=(1,) * 6)
    assert harness.worker.snapshot().num_queued_tokens == 10
    with pytest.raises(Overloaded):
        harness.submit("prefix", (0,) * 5, source_tokens=(1,) * 6)
    harness.submit("fits", (0,) * 4, source_tokens=(1,) * 6)


def test_a_step_that_reads_is_held_to_the_time_of_its_like() -> None:
    told: list[bool] = []

    class Watched(ScriptedEngine):
        def read(self, sources: Sequence[Source]) -> None:
            told.append(harness.worker.heartbeat.reads_prompt)
            super().read(sources)

    harness = sourced(target=Watched(mixed(1), bounds_of("S4")))
    harness.submit("a", (0,), source_tokens=(1, 2))
    harness.run()
    assert told == [True]


def test_sources_of_those_that_left_are_forgotten() -> None:
    harness = sourced()
    harness.submit("search", (0,), source_tokens=(1, 2), beams=BeamParams(num_beams=2))
    options = {"drafter": "model", "gamma": 3, "max_tokens": 3}
    harness.submit("drafts", (0,), source_tokens=(1, 2, 1), **options)
    harness.submit("plain", (0,), source_tokens=(2, 2, 1), is_enabled=False)
    while not any(isinstance(event, Finished) for event in harness.events["drafts"]):
        assert harness.worker.run_step()
    assert [one.spec.request_id for one in harness.live] == ["plain"]
    assert [harness.target.source_of(slot) for slot in range(3)] == [(2, 2, 1), (), ()]
    assert [harness.draft.source_of(slot) for slot in range(3)] == [()] * 3
    assert harness.target.source_of(4) == (1, 2)


def test_sources_that_do_not_fit_are_refused() -> None:
    harness = sourced()
    with pytest.raises(ContextTooLong, match=r"prompt: must be at most 24 tokens") as caught:
        harness.submit("a", (0,), source_tokens=(1,) * 25)
    assert (caught.value.limit, caught.value.given) == (24, 25)
    with pytest.raises(RequestError, match="prompt: must be a source"):
        harness.submit("a", (0,))
    with pytest.raises(RequestError, match="prompt: must not be a source"):
        Harness().submit("a", (0,), source_tokens=(1,))


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"end_tokens": (6,)}, FinishReason.STOP_TOKEN),
        ({"stop_strings": ("gi",)}, FinishReason.STOP_STRING),
        ({"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_an_answer_is_cut_where_plain_decoding_stops(
    gamma: int, options: dict[str, object], reason: FinishReason
) -> None:
    harness = sourced("S3")
    prompt = {"prompt": (3,), "source_tokens": (4, 5, 6, 7)}
    harness.submit("plain", is_enabled=False, num_logprobs=2, **prompt, **options)
    harness.submit("fast", drafter="model", gamma=gamma, num_logprobs=2, **prompt, **options)
    harness.run()
    assert harness.tokens("fast") == harness.tokens("plain")
    assert harness.text("fast") == harness.text("plain")
    assert harness.finished("fast").reason is harness.finished("plain").reason is reason
    assert _logprobs(harness, "fast") == _logprobs(harness, "plain")


def _logprobs(harness: Harness, name: str) -> list[object]:
    events = [one for one in harness.events[name] if isinstance(one, Progressed)]
    found = [token.logprobs for event in events for token in event.tokens]
    assert all(found)
    return found
