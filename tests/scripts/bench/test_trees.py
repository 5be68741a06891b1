"""The benchmark of sampled trees: its ways of drawing and judging, and its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.model.tree import TreeDrafter
from outrider.runtime.offline.timers import TimedSampler

from scripts.bench.trees import MATCHED, REPEATED, MatchedTree, RepeatedTree, Tally, Way, ways_of
from tests.runtime.drafters.rows import row as row_of
from tests.runtime.markov import limits


def drafted(kind: type[TreeDrafter]):
    engine = ScriptedEngine(
        lambda _: np.zeros(3, dtype=np.float32), replace(limits(3), max_tree_nodes=16)
    )
    sampler = TimedSampler(CpuSampler(max_batch=1, max_gamma=8, vocab_size=3))
    config = DraftingConfig(branching=(9,))
    parts = DrafterParts(draft=engine, sampler=sampler, vocab_size=3, chunk=8, config=config)
    row = row_of((1, 2), gamma=1)
    row = replace(row, max_nodes=15, sampling=replace(row.sampling, params=SamplingParams()))
    (draft,) = kind.from_parts(parts).propose([row], [0])
    assert sampler.total_s > 0.0
    return draft


def test_the_rules_differ_in_what_they_say_of_their_candidates() -> None:
    distinct, repeated, matched = map(drafted, (TreeDrafter, RepeatedTree, MatchedTree))
    assert sorted(distinct.tokens) == [0, 1, 2] and len(distinct.candidates[0]) == 3
    assert len(repeated.candidates[0]) == 9 and not repeated.is_without_replacement
    assert (matched.tokens, matched.parents) == (distinct.tokens, distinct.parents)
    assert matched.candidates is None and not matched.is_sampled


def test_every_shape_is_run_under_every_rule_beside_the_chain() -> None:
    ways = ways_of([2], [(2,), (3, 2)])
    assert ways[0] == Way("model", 2)
    assert {way.drafter for way in ways if way.branching == (3, 2)} == {"tree", REPEATED, MATCHED}
    assert len(ways) == 7


def test_figures_are_of_all_rounds() -> None:
    tally = Tally(speeds=[10.0, 30.0, 20.0], num_emitted=30, num_passes=20, num_drafted=60)
    assert tally.figures() == pytest.approx(
        {"tokens_per_pass": 1.5, "nodes_per_pass": 3.0, "tokens_per_s": 20.0}
    )
