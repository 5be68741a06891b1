"""T28 and T29: every drafter says what plain decoding says, token for token, and none is idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig, parse_drafter
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.registry import REGISTRY
from outrider.runtime.drafters.text.suffix_array import write_datastore

from tests.runtime.markov import MAX_GAMMA, PAIRS, Harness, limits

PROMPTS = ((1, 2, 3), (3,), (0, 1, 2, 3, 0, 1, 2, 3, 1), (2, 2), (1, 0, 3, 2, 1, 0, 3))
COMPOSED = (
    "model/lookup",
    "model/phrases",
    "model/suffix+lookup",
    "suffix:6+model:2",
    "lookup+datastore+model",
    "tree+suffix",
    "suffix+ouroboros",
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


GREEDY = (0.0, ExactnessMode.MAX_ACCEPT)
SHARED_NOISE = (1.0, ExactnessMode.SEED_STABLE)
MATCHED = (1.0, ExactnessMode.MAX_ACCEPT)
"""Point masses are matched with the target's own draws, so that a seed's answer is that of plain decoding."""


def draws_from_laws(name: str) -> bool:
    """Whether a drafter's tokens may be judged by ratio: then answers are equal in law alone."""
    names = [name for part in parse_drafter(name) for name in (part.name, part.inner) if name]
    return any(REGISTRY[name].capabilities.is_sampled for name in names)


@cache
def plain(pair: str, temperature: float, mode: ExactnessMode) -> list[list[int]]:
    found = []
    for index, prompt in enumerate(PROMPTS):
        harness = Harness(pair)
        harness.submit(
            "only",
            prompt,
            seed=index,
            max_tokens=11 + index,
            is_enabled=False,
            temperature=temperature,
            mode=mode,
        )
        harness.run()
        found.append(harness.tokens("only"))
    return found


@pytest.mark.parametrize("probs", [GREEDY, SHARED_NOISE], ids=["greedy", "shared noise"])
@pytest.mark.parametrize("drafter", NAMES)
def test_no_drafter_changes_a_token(
    pair: tuple[str, DraftingConfig], drafter: str, probs: tuple[float, ExactnessMode]
) -> None:
    """Every gamma and batch, random arrivals, history shared by all requests of one server."""
    check_equality(pair, drafter, probs, gammas=range(9), batches=range(1, 6))


@pytest.mark.parametrize("drafter", [name for name in NAMES if not draws_from_laws(name)])
def test_point_masses_change_no_sampled_token(
    pair: tuple[str, DraftingConfig], drafter: str
) -> None:
    """T29 in mode max_accept: alone and five at a time."""
    check_equality(pair, drafter, MATCHED, gammas=(1, 4, 8), batches=(1, 5))


def check_equality(
    pair: tuple[str, DraftingConfig],
    drafter: str,
    way: tuple[float, ExactnessMode],
    *,
    gammas: Sequence[int],
    batches: Sequence[int],
) -> None:
    """Requests that arrive at random get the very tokens of plain decoding; caches are audited at every step."""
    (name, drafting), (temperature, mode) = pair, way
    expected = plain(name, temperature, mode)
    # A reference that the answers quote in part.
    reference = (*expected[4][:7], 2, 2, 1, *expected[2][2:9], 0, 3)
    vocab_size, target_logits, draft_logits = PAIRS[name]
    # One pair on an engine that verifies trees, the other on one of chains, whose slots keep states.
    bounds = replace(limits(vocab_size), max_open=MAX_GAMMA)
    if name == "F4":
        bounds = replace(bounds, max_tree_nodes=16, max_open=None)
    of_draft = replace(bounds, max_tree_nodes=0, max_open=MAX_GAMMA)
    if "tree" in drafter:
        of_draft = replace(bounds, max_tree_nodes=16, max_open=None)
    harness = Harness(
        name,
        target=ScriptedEngine(target_logits, bounds),
        draft=ScriptedEngine(draft_logits, of_draft),
        drafting=drafting,
    )
    num_drafted = num_accepted = 0
    for gamma in gammas:
        params = SpeculationParams(
            drafter=drafter,
            gamma=gamma,
            mode=mode,
            reference_tokens=reference,
        )
        for batch in batches:
            arrivals = np.random.default_rng(gamma * 9 + batch)
            for index in range(batch):
                label = f"{gamma}-{batch}-{index}"
                harness.submit(
                    label,
                    PROMPTS[index],
                    seed=index,
                    max_tokens=11 + index,
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
    # By every request at least once, on average.
    num_requests = sum(1 for gamma in gammas if gamma) * sum(batches)
    assert num_drafted >= num_requests, "a drafter that never drafts proves nothing"
    assert num_accepted > 0
    # Where the target is all but certain, a drafter may well be right every time.
    assert num_accepted < num_drafted or temperature == 0.0 or name == "F3"
    for one in harness.worker._parts.drafters.members(drafter):
        assert not getattr(one, "_states", None)
