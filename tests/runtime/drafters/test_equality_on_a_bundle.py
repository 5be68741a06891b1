"""T28 and T29 on ONNX Runtime: every drafter, in mixed batches with random arrivals, says what plain decoding says.

``scripts.check_equality`` does the same at length on any bundle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.text.suffix_array import write_datastore

from tests.runtime.drafters.test_equality import (
    GREEDY,
    MATCHED,
    NAMES,
    SHARED_NOISE,
    draws_from_laws,
)
from tests.runtime.markov import Harness

MAX_BATCH = 3
# Chunks of four leave one token of the second and third, and their first tokens are drafted too.
PROMPTS = ((5, 9, 5, 9), (2, 8, 2, 8, 2), (30, 31, 32) * 3, (4,), (9, 5, 9, 5, 7, 7))
GAMMAS = (1, 8, 3, 5, 2)
MAX_TOKENS = 14

Law = tuple[float, ExactnessMode]


@pytest.fixture(scope="module")
def pair(tiny_bundle: Path) -> Iterator[Pair]:
    opened = open_pair(load_bundle(tiny_bundle), max_batch=MAX_BATCH, with_trees=True)
    yield opened
    opened.close()


def harness_over(pair: Pair, drafting: DraftingConfig | None = None) -> Harness:
    return Harness(
        target=pair.target,
        draft=pair.draft,
        max_batch=MAX_BATCH,
        drafting=drafting or DraftingConfig(),
    )


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[Law, list[list[int]]]:
    """Answers of plain decoding, one request at a time."""
    found: dict[Law, list[list[int]]] = {}
    for temperature, mode in (GREEDY, SHARED_NOISE, MATCHED):
        answers = []
        for index, prompt in enumerate(PROMPTS):
            harness = harness_over(pair)
            options = {"temperature": temperature, "mode": mode, "max_tokens": MAX_TOKENS}
            harness.submit("only", prompt, seed=index, is_enabled=False, **options)
            harness.run()
            answers.append(harness.tokens("only"))
        found[temperature, mode] = answers
    return found


@pytest.fixture(scope="module")
def drafting(
    pair: Pair, plain: dict[Law, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> DraftingConfig:
    """A datastore that knows parts of the answers, and low thresholds: drafts are long and often wrong."""
    folder = tmp_path_factory.mktemp("corpus") / "store"
    texts = [answer[:9] for answers in plain.values() for answer in answers]
    write_datastore(texts, folder, vocab_size=pair.target.limits.vocab_size)
    return DraftingConfig(
        datastore=str(folder), min_prob=0.02, suffix_factor=4.0, lookup_min_ngram=1
    )


def laws_of(drafter: str) -> list[Law]:
    return [GREEDY, SHARED_NOISE, *([] if draws_from_laws(drafter) else [MATCHED])]


@pytest.mark.parametrize("drafter", NAMES)
def test_no_drafter_changes_a_token_of_a_real_model(
    drafter: str, pair: Pair, plain: dict[Law, list[list[int]]], drafting: DraftingConfig
) -> None:
    harness, arrivals = harness_over(pair, drafting), np.random.default_rng(4)
    expected: dict[str, list[int]] = {}
    for temperature, mode in laws_of(drafter):
        answers = plain[temperature, mode]
        for index, (prompt, gamma) in enumerate(zip(PROMPTS, GAMMAS, strict=True)):
            label = f"{temperature}-{mode}-{index}"
            expected[label] = answers[index]
            params = SpeculationParams(
                drafter=drafter,
                gamma=gamma,
                mode=mode,
                reference_tokens=(*answers[index][:6], 7, *answers[index][4:]),
            )
            options = {"temperature": temperature, "max_tokens": MAX_TOKENS, "speculation": params}
            harness.submit(label, prompt, seed=index, **options)
            for _ in range(int(arrivals.integers(0, 4))):
                harness.worker.run_step()
    harness.run()
    harness.check_is_idle()
    assert {label: harness.tokens(label) for label in expected} == expected
    reports = [harness.finished(label).report for label in expected]
    assert {report.off_reason for report in reports} == {None}
    assert sum(report.num_drafted for report in reports) > 10
