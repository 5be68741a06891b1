"""T30 on ONNX Runtime: after every step of a long mixed run both caches are those of the committed tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_pair
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import SpeculationParams

from tests.engines.onnx.test_trees import BRANCH_ATOL, cache_of
from tests.runtime.markov import Harness, spec

REQUESTS = (
    ("model", {"gamma": 4}, 1.0, ExactnessMode.MAX_ACCEPT),
    ("ouroboros", {"gamma": 6, "window": 3, "phrase_length": 3}, 0.0, ExactnessMode.MAX_ACCEPT),
    ("lookahead", {"gamma": 5, "window": 3, "phrase_length": 2}, 0.0, ExactnessMode.MAX_ACCEPT),
    ("recycling", {"gamma": 5}, 1.0, ExactnessMode.SEED_STABLE),
    ("suffix+model", {"gamma": 8}, 0.7, ExactnessMode.SEED_STABLE),
    ("model/phrases", {"gamma": 5}, 1.0, ExactnessMode.MAX_ACCEPT),
    ("tree", {"gamma": 4, "branching": (3, 2)}, 1.0, ExactnessMode.MAX_ACCEPT),
    ("tree+lookup", {"gamma": 3}, 1.5, ExactnessMode.LENIENT),
    ("none", {}, 1.0, ExactnessMode.MAX_ACCEPT),
    ("phrases+ouroboros", {"gamma": 7}, 0.5, ExactnessMode.MAX_ACCEPT),
)


def audit(engine: OnnxEngine, fresh: OnnxEngine, slot: int, text: tuple[int, ...]) -> None:
    """Everything before the pointer is what the text alone would have left there."""
    if text:
        fresh.extend([Span(slot=0, start=0, tokens=text, num_logits=0)])
        held, expected = (cache_of(one, at, len(text)) for one, at in ((engine, slot), (fresh, 0)))
        np.testing.assert_allclose(held, expected, rtol=0.0, atol=BRANCH_ATOL)


def test_both_caches_are_those_of_the_committed_tokens_after_every_step(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    pair, clean = (open_pair(bundle, max_batch=3, with_trees=True) for _ in range(2))
    drafting = DraftingConfig(trees_may_round_differently=True, min_node_prob=0.02, min_prob=0.05)
    harness = Harness(target=pair.target, draft=pair.draft, max_batch=3, drafting=drafting)
    waiting = [
        spec(
            str(number), (5 + number, 9, 5 + number, 9), max_tokens=24 + number, seed=number,
            temperature=temperature,
            speculation=SpeculationParams(drafter=name, mode=mode, **params),
        )
        for number, (name, params, temperature, mode) in enumerate(REQUESTS)
    ]  # fmt: skip
    arrivals = np.random.default_rng(3)
    num_steps = num_kept = 0
    while waiting or harness.live:
        if waiting and arrivals.random() < 0.4:
            request = waiting.pop(0)
            events = harness.events[request.request_id] = []
            harness.worker.submit(replace(request, tenant="one"), events.append)
        harness.worker.run_step()
        num_steps += 1
        for request in harness.live:
            assert request.slot is not None
            known = tuple(request.history.tolist())
            audit(pair.target, clean.target, request.slot, known[: request.num_computed])
            audit(pair.draft, clean.draft, request.slot, known[: request.draft_computed])
    for name in harness.events:
        report = harness.finished(name).report
        assert report.off_reason in (None, "DISABLED")
        num_kept += report.num_accepted
    assert num_steps > 30
    assert num_kept > 5
    harness.check_is_idle()


def test_the_audit_sees_a_pointer_that_is_off_by_one(tiny_bundle: Path) -> None:
    pair, clean = (open_pair(load_bundle(tiny_bundle), max_batch=2) for _ in range(2))
    pair.target.extend([Span(slot=1, start=0, tokens=(5, 9, 7, 8), num_logits=0)])
    audit(pair.target, clean.target, 1, (5, 9, 7, 8))
    with pytest.raises(AssertionError):
        audit(pair.target, clean.target, 1, (5, 9, 8))
