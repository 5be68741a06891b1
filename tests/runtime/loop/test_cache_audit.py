"""T30 on ONNX Runtime: after every step of a long mixed run both caches are those of the committed tokens."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_pair
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core import request as requests
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import GrammarKind, GrammarParams, SpeculationParams
from outrider.runtime.grammar.constraint import GrammarConstraints

from tests.conftest import VOCAB_SIZE
from tests.engines.onnx.test_trees import BRANCH_ATOL, cache_of
from tests.mutants import put_in
from tests.runtime.markov import Harness

END = 1
MAX_ACCEPT = ExactnessMode.MAX_ACCEPT
# Drafter, its parameters, temperature, mode, whether the answer has a form, and completions of one prompt.
REQUESTS = (
    ("model", {"gamma": 4}, 1.0, MAX_ACCEPT, False, 1),
    ("model", {"gamma": 5}, 1.0, MAX_ACCEPT, True, 1),
    ("ouroboros", {"gamma": 6, "window": 3, "phrase_length": 3}, 0.0, MAX_ACCEPT, False, 1),
    ("lookahead", {"gamma": 5, "window": 3, "phrase_length": 2}, 0.0, MAX_ACCEPT, False, 1),
    ("tree", {"gamma": 4, "branching": (3, 2)}, 1.0, MAX_ACCEPT, True, 1),
    ("suffix", {"gamma": 5}, 1.0, ExactnessMode.SEED_STABLE, False, 1),
    ("model", {"gamma": 4}, 1.0, MAX_ACCEPT, True, 3),
    ("suffix+model", {"gamma": 8}, 0.7, ExactnessMode.SEED_STABLE, False, 1),
    ("model/phrases", {"gamma": 5}, 1.0, MAX_ACCEPT, False, 1),
    ("model/phrases", {"gamma": 5}, 0.0, MAX_ACCEPT, True, 1),
    ("tree", {"gamma": 4, "branching": (3, 2)}, 1.0, MAX_ACCEPT, False, 2),
    ("tree+lookup", {"gamma": 3}, 1.5, ExactnessMode.LENIENT, False, 1),
    ("none", {}, 1.0, MAX_ACCEPT, True, 1),
    ("ouroboros", {"gamma": 6, "window": 3, "phrase_length": 3}, 1.0, MAX_ACCEPT, True, 1),
    ("phrases+ouroboros", {"gamma": 7}, 0.5, MAX_ACCEPT, False, 1),
)
FORM = GrammarParams(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "array",
            "minItems": 9,
            "items": {"enum": ["the quick fox", "a lazy dog", "a cat"]},
        }
    ),
    allows_whitespace=False,
)


def audit(engine: OnnxEngine, fresh: OnnxEngine, slot: int, text: tuple[int, ...]) -> None:
    """Everything before the pointer is what the text alone would have left there."""
    if text:
        fresh.extend([Span(slot=0, start=0, tokens=text, num_logits=0)])
        held, expected = (cache_of(one, at, len(text)) for one, at in ((engine, slot), (fresh, 0)))
        np.testing.assert_allclose(held, expected, rtol=0.0, atol=BRANCH_ATOL)


def fail_at(engine: OnnxEngine, *numbers: int) -> set[int]:
    """Make the extends with these 0-based numbers leave another text in all their slots, and raise.

    Returns those that have not failed yet.
    """
    extend, calls, left = engine.extend, count(), set(numbers)

    def failing(spans: list[Span]) -> FloatArray:
        if (number := next(calls)) not in numbers:
            return extend(spans)
        left.remove(number)
        extend([Span(slot=one.slot, start=0, tokens=(3,) * 32, num_logits=0) for one in spans])
        raise EngineError("planned")

    engine.extend = failing
    return left


def run_audited(folder: Path, *, failing: str = "") -> Harness:
    """Serve ``REQUESTS``, which arrive at random; one engine fails now and then."""
    bundle = load_bundle(folder)
    pair, clean = (open_pair(bundle, max_batch=3, with_trees=True) for _ in range(2))
    to_fail = fail_at(getattr(pair, failing), 9, 23, 40, 71) if failing else set()
    harness = Harness(
        target=pair.target,
        draft=pair.draft,
        max_batch=3,
        drafting=DraftingConfig(
            trees_may_round_differently=True, min_node_prob=0.02, min_prob=0.05
        ),
        constraints=GrammarConstraints(
            (folder / "tokenizer.json").read_bytes(), VOCAB_SIZE, (END,)
        ),
    )
    waiting = list(enumerate(REQUESTS))
    arrivals = np.random.default_rng(3)
    num_steps = 0
    while waiting or harness.live or harness.worker.snapshot().num_queued:
        if waiting and arrivals.random() < 0.4:
            number, (name, params, temperature, mode, has_form, num_samples) = waiting.pop(0)
            harness.submit_group(
                str(number), (5 + number, 9, 5 + number, 9), num_samples,
                max_tokens=40 + number, seed=number, temperature=temperature, tenant="one",
                end_tokens=(END,) if has_form else (), grammar=FORM if has_form else None,
                speculation=SpeculationParams(drafter=name, mode=mode, **params),
            )  # fmt: skip
        harness.worker.run_step()
        num_steps += 1
        for request in harness.live:
            assert request.slot is not None
            known = tuple(request.sequence.history.tolist())
            audit(pair.target, clean.target, request.slot, known[: request.cache.num_computed])
            audit(pair.draft, clean.draft, request.slot, known[: request.cache.draft_computed])
    assert num_steps > 30 and not to_fail
    harness.check_is_idle()
    return harness


@pytest.mark.parametrize("failing", ["", "target", "draft"])
def test_both_caches_are_those_of_the_committed_tokens_after_every_step(
    tiny_bundle: Path, failing: str
) -> None:
    harness = run_audited(tiny_bundle, failing=failing)
    reports = [harness.finished(name).report for name in harness.events]
    assert sum(report.num_accepted for report in reports) > 5
    assert sum(report.num_forced for report in reports) > 100
    reasons = {None, "DISABLED"} | ({"DEGRADED"} if failing == "draft" else set())
    assert {report.off_reason for report in reports} == reasons


def test_the_audit_sees_rejected_drafts_under_forced_tokens(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        "min(draft_computed, cache.num_computed)",
        "min(draft_computed, sequence.num_known - 1)",
    )
    put_in(monkeypatch, requests, old, new)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_audited(tiny_bundle)


def test_the_audit_sees_a_pointer_that_is_off_by_one(tiny_bundle: Path) -> None:
    pair, clean = (open_pair(load_bundle(tiny_bundle), max_batch=2) for _ in range(2))
    pair.target.extend([Span(slot=1, start=0, tokens=(5, 9, 7, 8), num_logits=0)])
    audit(pair.target, clean.target, 1, (5, 9, 7, 8))
    with pytest.raises(AssertionError):
        audit(pair.target, clean.target, 1, (5, 9, 8))
