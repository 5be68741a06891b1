"""Models with recurrent layers or rings, as target, as draft and as both: speculation changes no token of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError, FloatArray, Source, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.spans import WrappedEngine
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import BeamParams, SpeculationParams, sample_seed
from outrider.runtime.grammar.base import Constraints
from outrider.runtime.grammar.constraint import GrammarConstraints
from outrider.runtime.loop import verification
from outrider.runtime.loop.beams import cache as beam_cache

from tests.engines.handmade import write_bundle
from tests.engines.handmade_states import states_entry, write_states_bundle
from tests.engines.onnx.handmade_rings import (
    LEAST_COLUMNS,
    MAX_EXTEND,
    MAX_OPEN,
    WINDOW,
    write_rings_bundle,
)
from tests.mutants import put_in
from tests.runtime.grammar.letters import regex, tokenizer
from tests.runtime.markov import MAX_GAMMA, Harness

MAX_BATCH = 8
PROMPTS = (
    (5, 9, 5, 9),
    (2, 8, 2, 8, 2),
    (30, 31, 32) * 3,
    (4,),
    (9, 5, 9, 5, 7, 7),
    (1, 2),
    (80,) * 17,
    (3, 3, 4),
)
GAMMAS = (1, 8, 3, 5, 2, 8, 4, 6)
MAX_TOKENS = 20
DRAFTERS = (
    "lookup",
    "suffix",
    "phrases",
    "model",
    "model/lookup",
    "model/phrases",
    "lookup+model",
    "ouroboros",
)
GREEDY = (0.0, ExactnessMode.MAX_ACCEPT)
SHARED_NOISE = (1.0, ExactnessMode.SEED_STABLE)
PAIRS = {
    "both": ("scan", "convolution"),
    "target": ("scan", "dense"),
    "draft": ("dense", "scan"),
    "rings": ("rings", "rings alone"),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines by kind; a target of one test is the draft of another."""
    root = tmp_path_factory.mktemp("states")
    folders = {
        "dense": write_bundle(root / "dense", max_batch=MAX_BATCH),
        "scan": write_states_bundle(root / "scan", states_entry(MAX_GAMMA), max_batch=MAX_BATCH),
        "convolution": write_states_bundle(
            root / "convolution", states_entry(MAX_GAMMA, 3, has_scan=False), max_batch=MAX_BATCH
        ),
        **{
            name: write_rings_bundle(
                root / name,
                columns=LEAST_COLUMNS + MAX_GAMMA - MAX_OPEN,
                layers=layers,
                max_batch=MAX_BATCH,
            )
            for name, layers in (("rings", (0,)), ("rings alone", (0, 1)))
        },
        "whole": write_rings_bundle(root / "whole", columns=0, max_batch=MAX_BATCH),
    }
    opened = {name: open_engine(load_bundle(folder), "target") for name, folder in folders.items()}
    yield opened
    for engine in opened.values():
        engine.close()


def harness_over(
    target: Engine, draft: Engine | None = None, constraints: Constraints | None = None
) -> Harness:
    return Harness(
        constraints=constraints,
        target=target,
        draft=draft,
        has_draft=draft is not None,
        max_batch=MAX_BATCH,
        drafting=DraftingConfig(min_prob=0.02, suffix_factor=4.0, lookup_min_ngram=1),
    )


def plain(target: Engine, law: tuple[float, ExactnessMode]) -> list[list[int]]:
    """Answers one at a time, without drafts."""
    answers = []
    for index, prompt in enumerate(PROMPTS):
        harness = harness_over(target)
        options = {"temperature": law[0], "mode": law[1], "max_tokens": MAX_TOKENS}
        harness.submit("only", prompt, seed=index, is_enabled=False, **options)
        harness.run()
        answers.append(harness.tokens("only"))
    return answers


def serve(
    harness: Harness,
    drafter: str,
    law: tuple[float, ExactnessMode],
    expected: Sequence[list[int]],
    prompts: Sequence[int],
) -> int:
    """Serve prompts that arrive at random; return the tokens that were drafted."""
    arrivals = np.random.default_rng(len(prompts))
    for index in prompts:
        quoted = (*expected[index][:7], 7, *expected[index][4:])
        params = SpeculationParams(
            drafter=drafter, gamma=GAMMAS[index], mode=law[1], reference_tokens=quoted
        )
        harness.submit(
            f"{index}",
            PROMPTS[index],
            seed=index,
            temperature=law[0],
            max_tokens=MAX_TOKENS,
            speculation=params,
        )
        for _ in range(int(arrivals.integers(0, 4))):
            harness.worker.run_step()
    harness.run()
    harness.check_is_idle()
    for index in prompts:
        assert harness.tokens(f"{index}") == expected[index], index
    reports = [harness.finished(f"{index}").report for index in prompts]
    assert {report.off_reason for report in reports} == {None}
    return sum(report.num_drafted for report in reports)


@pytest.mark.parametrize("law", [GREEDY, SHARED_NOISE], ids=["greedy", "shared noise"])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_drafter_changes_a_token(
    engines: dict[str, Engine], pair: str, law: tuple[float, ExactnessMode]
) -> None:
    """Eight at a time and alone, every drafter that makes chains."""
    target, draft = (engines[name] for name in PAIRS[pair])
    expected = plain(target, law)
    for drafter in DRAFTERS:
        num_drafted = serve(
            harness_over(target, draft), drafter, law, expected, range(len(PROMPTS))
        )
        for index in (2, 4):
            num_drafted += serve(harness_over(target, draft), drafter, law, expected, [index])
        assert num_drafted > 20, drafter


TEXTS = tuple(map(chr, [*range(33, 127), 0xA1]))


def test_forced_tokens_change_no_answer_of_a_draft_with_rings(tmp_path: Path) -> None:
    """It reads them across the ends of its rings, and proposes what one with whole caches does."""
    forms = ("(abc[d-m]){1,6}", "([n-z]abcdefghij){1,2}", "([ab]c+){1,9}")
    constraints = GrammarConstraints(tokenizer(TEXTS), len(TEXTS) + 1, (len(TEXTS),))
    wide = WINDOW + 2 * MAX_EXTEND + MAX_GAMMA - 1
    engines = {
        columns: open_engine(
            load_bundle(
                write_rings_bundle(
                    tmp_path / f"{columns}",
                    columns=columns,
                    max_batch=MAX_BATCH,
                    max_extend=2 * MAX_EXTEND,
                )
            ),
            "target",
        )
        for columns in (0, wide)
    }
    found, counts = [], []
    for drafter, draft, max_forced in (
        ("none", 0, 0),
        ("model", 0, 8),
        ("model", wide, 8),
    ):
        harness = harness_over(engines[0], engines[draft], constraints)
        if not max_forced:
            harness.worker._factory = replace(harness.worker._factory, max_forced=0)
        for index, form in enumerate(forms):
            speculation = SpeculationParams(drafter=drafter, gamma=4, is_enabled=max_forced > 0)
            harness.submit(
                f"{index}", PROMPTS[index], max_tokens=2 * wide, grammar=regex(form),
                params=SamplingParams(temperature=0.0, end_token_ids=(len(TEXTS),)),
                speculation=speculation,
            )  # fmt: skip
        harness.run()
        harness.check_is_idle()
        found.append([harness.tokens(f"{index}") for index in range(len(forms))])
        reports = [harness.finished(f"{index}").report for index in range(len(forms))]
        assert all(report.off_reason is None for report in reports) == (max_forced > 0)
        counts.append([(one.num_forced, one.num_drafted, one.num_accepted) for one in reports])
    assert found[0] == found[1] == found[2]
    assert max(map(len, found[0])) > wide
    assert counts[1] == counts[2]
    assert all(sum(numbers) > 15 for numbers in zip(*counts[2], strict=True))


def fail_at(engine: Engine, monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Make the extends with these 0-based numbers leave another text in all their slots, and raise."""
    extend, calls = engine.extend, count()

    def failing(spans: Sequence[Span]) -> FloatArray:
        if next(calls) not in numbers:
            return extend(spans)
        with monkeypatch.context() as patch:
            patch.setattr(engine._kept, "commit", _fail)
            return extend(
                [
                    Span(slot=one.slot, start=0, tokens=(3,) * 9, num_logits=0, num_settled=3)
                    for one in spans
                ]
            )

    monkeypatch.setattr(engine, "extend", failing)


def _fail(*_: object) -> None:
    raise RuntimeError("planned")


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("pair", ["both", "rings"])
def test_calls_that_fail_half_way_change_no_answer(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, pair: str, which: str
) -> None:
    target, draft = (engines[name] for name in PAIRS[pair])
    expected = plain(target, GREEDY)
    fail_at(target if which == "target" else draft, monkeypatch, {5, 9, 14, 22})
    harness = harness_over(target, draft)
    for index, prompt in enumerate(PROMPTS):
        params = SpeculationParams(drafter="model", gamma=GAMMAS[index])
        harness.submit(f"{index}", prompt, seed=index, max_tokens=MAX_TOKENS, speculation=params)
    harness.run()
    harness.check_is_idle()
    assert [harness.tokens(f"{index}") for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("pair", ["both", "draft", "rings"])
def test_a_group_answers_as_its_completions_alone(engines: dict[str, Engine], pair: str) -> None:
    target, draft = (engines[name] for name in PAIRS[pair])
    prompt, options = (
        PROMPTS[2] + PROMPTS[0],
        {"temperature": 1.0, "mode": ExactnessMode.SEED_STABLE, "max_tokens": 15},
    )
    found = []
    for drafter in ("none", "model"):
        for size in (1, MAX_BATCH):
            harness = harness_over(target, draft)
            for first in range(0, MAX_BATCH, size):
                seed = sample_seed(7, first)
                harness.submit_group(
                    f"{first}", prompt, size, drafter=drafter, gamma=4, seed=seed, **options
                )
                harness.run()
            harness.check_is_idle()
            found.append(
                [
                    harness.tokens(f"{first}.{index}")
                    for first in range(0, MAX_BATCH, size)
                    for index in range(size)
                ]
            )
    assert len({str(answers) for answers in found}) == 1
    assert len({str(answer) for answer in found[0]}) > 1


@dataclass(slots=True)
class WithoutReuse(WrappedEngine):
    """An engine whose slots are said to take no start but 0."""

    def first_start(self, slot: int) -> int:
        return self.engine.limits.max_context + 1

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        return self.engine.extend(spans)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.engine.move_slot(source, destination, length)

    def read(self, sources: Sequence[Source]) -> None:
        raise AssertionError("there is no encoder")

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        raise AssertionError("there is no encoder")


def beams_of(engine: Engine) -> list[object]:
    harness = harness_over(engine)
    for index, prompt in enumerate(PROMPTS[:4]):
        harness.submit(
            f"{index}", prompt, max_tokens=9, beams=BeamParams(num_beams=4, num_results=4)
        )
    harness.run()
    harness.check_is_idle()
    return [
        [(one.tokens, one.log_prob) for one in harness.finished(f"{index}").beams]
        for index in range(4)
    ]


@pytest.mark.parametrize("kind", ["scan", "convolution"])
def test_beams_that_copy_slots_find_what_those_that_read_all_again_find(
    engines: dict[str, Engine], kind: str
) -> None:
    assert beams_of(engines[kind]) == beams_of(WithoutReuse(engines[kind]))


def test_beams_over_rings_find_what_those_over_whole_caches_find(
    engines: dict[str, Engine],
) -> None:
    """Columns differ, and so does rounding."""
    for found, expected in zip(
        *(beams_of(engines[kind]) for kind in ("rings", "whole")), strict=True
    ):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(
            *([score for _, score in one] for one in (found, expected)), atol=1e-4
        )


def test_what_nobody_settles_is_refused_and_read_again(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that forgets to settle its certain token fails now and then, and its answer is the same."""
    (expected, *_) = plain(engines["scan"], GREEDY)
    put_in(monkeypatch, verification, "num_settled=min(1, len(tokens))", "num_settled=0")
    harness = harness_over(engines["scan"])
    harness.submit("only", PROMPTS[0], max_tokens=MAX_TOKENS, is_enabled=False)
    harness.run()
    assert harness.tokens("only") == expected
    assert "9 tokens would be open, limit max_open = 8" in caplog.text


def test_beams_that_keep_what_was_settled_are_found_out(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a text shares less with its slot than is settled, the engine refuses it."""
    put_in(
        monkeypatch,
        beam_cache,
        "num_shared if num_shared >= self.engine.first_start(self.slots[member]) else 0",
        "num_shared",
    )
    engine = engines["scan"]
    cache = beam_cache.BeamCache(engine, (1, 2, 3), [0, 1])
    feed = partial(beam_cache.feed_all, engine, lengths={0: 0, 1: 0})
    feed(cache.place([(4, 5)]))
    with pytest.raises(EngineError, match="is before its 5 settled tokens"):
        feed(cache.place([(4, 6)]))


def test_a_text_that_shares_less_than_is_settled_is_read_again(engines: dict[str, Engine]) -> None:
    engine = engines["scan"]
    found = []
    for tails in ([(4, 5), (4, 6)], [(4, 6)]):
        cache = beam_cache.BeamCache(engine, (1, 2, 3), [0, 1])
        found += [
            beam_cache.feed_all(engine, cache.place([tail]), {0: 0, 1: 0})[0].copy()
            for tail in tails
        ]
    np.testing.assert_array_equal(found[1], found[2])
