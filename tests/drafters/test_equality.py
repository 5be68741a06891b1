"""T28 and T29: every drafter says what plain decoding says, token for token, and none is idle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engines.laws import ExactnessMode
from engines.scripted import ScriptedEngine
from runtime.core.drafting import DraftingConfig
from runtime.core.params import SpeculationParams
from runtime.drafters import REGISTRY
from runtime.drafters.suffix_array import write_datastore
from tests.runtime.markov import PAIRS, Harness, limits

PROMPTS = ((1, 2, 3), (3,), (0, 1, 2, 3, 0, 1, 2, 3, 1), (2, 2), (1, 0, 3, 2, 1, 0, 3))
COMPOSED = (
    "model/lookup",
    "model/phrases",
    "model/recycling",
    "model/suffix+ngram",
    "lookup+datastore+model",
)
NAMES = (*(name for name in REGISTRY if name != "none"), *COMPOSED)


@pytest.fixture(scope="module", params=["F3", "F4"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A pair of scripted models, and settings with a datastore of its vocabulary."""
    folder = tmp_path_factory.mktemp("corpus") / request.param
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 4, 60).tolist(), list(range(4)) * 3]
    write_datastore(texts, folder, vocab_size=PAIRS[request.param][0])
    # A low threshold makes drafts long and often wrong.
    return request.param, DraftingConfig(
        datastore=str(folder), min_prob=0.02, suffix_factor=4.0, trees_may_round_differently=True
    )


@cache
def plain(pair: str, temperature: float) -> list[list[int]]:
    found = []
    for index, prompt in enumerate(PROMPTS):
        harness = Harness(pair)
        harness.submit(
            "only",
            prompt,
            seed=index,
            max_tokens=10 + index,
            is_enabled=False,
            temperature=temperature,
            mode=ExactnessMode.SEED_STABLE,
        )
        harness.run()
        found.append(harness.tokens("only"))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", NAMES)
def test_no_drafter_changes_a_token(
    pair: tuple[str, DraftingConfig], drafter: str, temperature: float
) -> None:
    """Every gamma and batch, random arrivals, history shared by all requests of one server."""
    name, drafting = pair
    expected = plain(name, temperature)
    # A reference that the answers quote in part.
    reference = (*expected[4][:7], 2, 2, 1, *expected[2][2:9], 0, 3)
    vocab_size, target_logits, draft_logits = PAIRS[name]
    # One pair on an engine that verifies trees, the other on one of chains.
    bounds = replace(limits(vocab_size), max_tree_nodes=16 if name == "F4" else 0)
    of_draft = replace(bounds, max_tree_nodes=16 if drafter == "tree" else 0)
    harness = Harness(
        name,
        target=ScriptedEngine(target_logits, bounds),
        draft=ScriptedEngine(draft_logits, of_draft),
        drafting=drafting,
    )
    num_drafted = num_accepted = 0
    for gamma in range(9):
        params = SpeculationParams(
            drafter=drafter,
            gamma=gamma,
            mode=ExactnessMode.SEED_STABLE,
            reference_tokens=reference,
        )
        for batch in range(1, 6):
            arrivals = np.random.default_rng(gamma * 9 + batch)
            for index in range(batch):
                label = f"{gamma}-{batch}-{index}"
                harness.submit(
                    label,
                    PROMPTS[index],
                    seed=index,
                    max_tokens=10 + index,
                    temperature=temperature,
                    speculation=params,
                )
                for _ in range(int(arrivals.integers(0, 4))):
                    harness.worker.run_step()
                    harness.check_invariants()
            harness.run()
            for index in range(batch):
                label = f"{gamma}-{batch}-{index}"
                assert harness.tokens(label) == expected[index], (gamma, batch, index)
                report = harness.finished(label).report
                assert report.off_reason == ("DISABLED" if gamma == 0 else None)
                num_drafted += report.num_drafted
                num_accepted += report.num_accepted
    harness.check_is_idle()
    assert num_drafted > 100, "a drafter that never drafts proves nothing"
    assert num_accepted > 0
    # Where the target is all but certain, a drafter may well be right every time.
    assert num_accepted < num_drafted or temperature == 0.0 or name == "F3"
    for one in harness.worker._parts.drafters.members(drafter):
        assert not getattr(one, "_states", None)
