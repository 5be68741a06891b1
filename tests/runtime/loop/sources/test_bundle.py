"""Requests with a source over an exported pair: the same tokens with and without speculation, and tools that ask it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.kv_cache import source_capacities
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_pair
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.calibration.calibrate import Budget, calibrate
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.params import Prompt, RequestSpec, SpeculationParams
from outrider.runtime.offline.alpha import measure_alphas, text_of
from outrider.runtime.offline.prompts import encode_prompts
from outrider.runtime.offline.rig import RigOptions, open_rig
from outrider.runtime.serving.tokenizer import open_codec
from outrider.runtime.verify.command import verify

from tests.runtime.pair import PairHarness, SilentDecoder

NAMES = ("model", "lookup", "suffix", "phrases", "ouroboros", "model/lookup", "tree", "lookahead")


@pytest.fixture(scope="module")
def opened(tiny_text2text_bundle: Path) -> Iterator[tuple[Bundle, Pair]]:
    bundle = load_bundle(tiny_text2text_bundle)
    pair = open_pair(bundle, max_batch=6, with_trees=True)
    yield bundle, pair
    pair.close()


def spec(index: int, speculation: SpeculationParams, temperature: float) -> RequestSpec:
    rng = np.random.default_rng((7, index))
    source = rng.integers(2, 500, size=int(rng.integers(1, 97))).tolist()
    return RequestSpec(
        internal_id=str(index),
        request_id=str(index),
        prompt_tokens=(0,) if index % 3 else (0, 5, 9),
        source_tokens=tuple(source),
        params=SamplingParams(temperature=temperature),
        seed=index,
        max_tokens=16,
        speculation=speculation,
    )


def served(
    opened: tuple[Bundle, Pair], names: Sequence[int], drafter: str, temperature: float
) -> dict[int, tuple[int, ...]]:
    """Answers to requests that arrive at random, six at a time."""
    bundle, pair = opened
    mode = ExactnessMode.SEED_STABLE
    params = SpeculationParams(drafter=drafter, gamma=3, mode=mode, is_enabled=drafter != "none")
    harness = PairHarness.over(pair, bundle, max_running=6, read_tokens=128)
    arrivals = np.random.default_rng(len(names))
    for name in names:
        harness.submit(spec(name, params, temperature))
        for _ in range(int(arrivals.integers(0, 3))):
            harness.worker.run_step()
    harness.run()
    return {name: harness.tokens(str(name)) for name in names}


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "shared noise"])
def alone(
    opened: tuple[Bundle, Pair], request: pytest.FixtureRequest
) -> tuple[float, dict[int, tuple[int, ...]]]:
    """Answers of requests alone, without speculation."""
    temperature = request.param
    return temperature, {n: served(opened, [n], "none", temperature)[n] for n in range(12)}


@pytest.mark.parametrize("drafter", NAMES)
def test_speculation_changes_no_token(
    opened: tuple[Bundle, Pair],
    alone: tuple[float, dict[int, tuple[int, ...]]],
    drafter: str,
) -> None:
    temperature, expected = alone
    assert served(opened, range(12), drafter, temperature) == expected


def test_when_all_have_left_their_sources_take_no_room(opened: tuple[Bundle, Pair]) -> None:
    """Of both models: the memory is that of the smallest size again."""
    bundle, pair = opened
    harness = PairHarness.over(pair, bundle, max_running=6)
    engines = [one for one in (pair.target, pair.draft) if isinstance(one, OnnxEngine)]
    assert len(engines) == 2
    grown = [0, 0]
    for name in range(20):
        harness.submit(spec(name, SpeculationParams(drafter="model", gamma=2), 0.0))
    while harness.worker.run_step():
        grown = [max(n, one.source_capacity) for n, one in zip(grown, engines, strict=True)]
    least = source_capacities(pair.target.limits)[0]
    assert min(grown) > least
    assert [one.source_capacity for one in engines] == [least, least]


def test_a_bundle_of_two_encoders_passes_the_proof(tiny_text2text_bundle: Path) -> None:
    report = verify(tiny_text2text_bundle, num_samples=60, false_alarm=1e-6, seed=3)
    assert {check.name.split(": ")[1].split(",")[0] for check in report.checks} >= {
        "draw", "round", "runs", "sequences", "pair",
    }  # fmt: skip
    failed = [check for check in report.checks if check.p_value < 1e-6 / len(report.checks)]
    assert not failed


def test_costs_of_an_exported_pair_have_its_reads(opened: tuple[Bundle, Pair]) -> None:
    _, pair = opened
    table = calibrate(
        target=pair.target, draft=pair.draft, sampler=pair.sampler, decoder=SilentDecoder(),
        max_gamma=2, budget=Budget(total_s=0.05, repeats=2),
    )  # fmt: skip
    assert table.read is not None and table.draft_read is not None
    assert table.read.tokens == (16, 64, 96)
    assert table.read.extend_s(1, 96, 0) >= table.read.extend_s(1, 16, 0)


def test_texts_of_a_file_are_sources(tiny_text2text_bundle: Path) -> None:
    bundle = load_bundle(tiny_text2text_bundle)
    codec = open_codec(bundle)
    (prompt,) = encode_prompts(
        ("the quick brown fox",), codec, max_tokens=8, manifest=bundle.manifest
    )
    assert prompt.tokens == (0,)
    assert prompt.source == codec.encode_source("the quick brown fox")
    assert prompt.is_quotable == codec.text2text.shares_vocabulary
    with pytest.raises(ConfigError, match=r"prompt 1: must have 1..96 tokens"):
        encode_prompts(("fox " * 100,), codec, max_tokens=8, manifest=bundle.manifest)


def test_a_rig_answers_sources_and_alpha_of_a_model_drafted_by_itself_is_one(
    tiny_text2text_bundle: Path,
) -> None:
    rig = open_rig(tiny_text2text_bundle, RigOptions(max_batch=2))
    prompts = [Prompt((0,), (5, 6, 7, 8, 1)), Prompt((0,), (9, 1))]
    params = SpeculationParams(drafter="model", gamma=2)
    answers, _ = rig.answer(prompts, SamplingParams(temperature=0.0), params, 6)
    plain, _ = rig.answer(
        prompts, SamplingParams(temperature=0.0), SpeculationParams(is_enabled=False), 6
    )
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    texts = [text_of(p, one.tokens, ()) for p, one in zip(prompts, plain, strict=True)]
    rows = [
        measure_alphas(rig.target, {"model": draft}, {}, texts, 1.0, (1.0,), lambda *step: None)[0]
        for draft in (rig.target, rig.draft)
    ]
    rig.close()
    assert [row.num_positions for row in rows] == [12, 12]
    assert rows[1].alpha < 1.0
    assert math.isclose(rows[0].alpha, 1.0, abs_tol=1e-6)
