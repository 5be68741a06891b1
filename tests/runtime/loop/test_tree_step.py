"""Trees through the whole step: the answers of plain decoding, audited caches, honest figures.

Most tests ask for trees where answers are promised bit for bit, which is where a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.engines.trees import chain_length
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import RequestFailed
from outrider.runtime.core.events import FinishReason
from outrider.runtime.drafters import registry
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Outcome,
)
from outrider.runtime.gamma.costs import ModelCosts
from outrider.runtime.gamma.tree_prices import node_cost
from outrider.runtime.serving import factory
from outrider.runtime.serving.settings import ServeOptions

from tests.draft_trees import merge_chains
from tests.runtime.gamma.test_controller import table
from tests.runtime.markov import PAIRS, Harness, limits

MAX_NODES = 12
TREES_ANYWHERE = DraftingConfig(trees_may_round_differently=True)


class BranchingDrafter:
    """Proposes a trie of random chains, one of them right about every other token of F3."""

    capabilities = DrafterCapabilities(proposes_trees=True, num_choices=1, wants_outcomes=True)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.outcomes: list[Outcome] = []
        self.rows: list[DraftRow] = []

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> BranchingDrafter:
        return cls(parts.vocab_size)

    def propose(self, rows: Sequence[DraftRow], slots: Sequence[int]) -> list[Draft]:
        self.rows.extend(rows[slot] for slot in slots)
        return [self.draft(rows[slot]) for slot in slots]

    def draft(self, row: DraftRow) -> Draft:
        history = row.sampling.history.tolist()
        rng = np.random.default_rng([len(history), *history[-2:]])
        chains = rng.integers(0, self.vocab_size, (5, max(1, row.gamma)))
        chains[3:] = (history[-1] + 1 + np.arange(chains.shape[1])) % self.vocab_size
        chains[4, 1:] = 0
        tree = merge_chains(chains.tolist())
        return Draft(tokens=tree.tokens, parents=tree.parents)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.extend(outcomes)

    def forget(self, key: str) -> None:
        pass


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REGISTRY, "branches", BranchingDrafter)


def tree_harness(pair: str, *, max_nodes: int = MAX_NODES, **settings: object) -> Harness:
    vocab_size, target_logits, _ = PAIRS[pair]
    bounds = replace(limits(vocab_size), max_tree_nodes=max_nodes)
    target = ScriptedEngine(target_logits, bounds)
    return Harness(pair, target=target, **{"drafting": TREES_ANYWHERE, **settings})


def drafter_of(harness: Harness) -> BranchingDrafter:
    found = harness.worker._parts.drafters["branches"]
    assert isinstance(found, BranchingDrafter)
    return found


def plain_answers(pair: str, count: int, **options: object) -> list[list[int]]:
    answers = []
    for index in range(count):
        harness = Harness(pair)
        harness.submit("only", (index, 1, 2), seed=index, is_enabled=False, **options)
        harness.run()
        answers.append(harness.tokens("only"))
    return answers


@pytest.mark.parametrize("pair", ["F3", "F4"])
@pytest.mark.parametrize(
    ("temperature", "mode"),
    [
        (0.0, ExactnessMode.MAX_ACCEPT),
        (1.0, ExactnessMode.SEED_STABLE),
        (1.0, ExactnessMode.MAX_ACCEPT),
    ],
)
def test_trees_never_change_a_token(pair: str, temperature: float, mode: ExactnessMode) -> None:
    """Beside chains and plain rows, arriving at random; caches are audited after every step."""
    options = {"temperature": temperature, "mode": mode, "max_tokens": 14}
    expected = plain_answers(pair, 4, **options)
    for gamma in range(6):
        harness = tree_harness(pair)
        wait = np.random.default_rng(gamma)
        others = ("branches", "branches", "lookup", "none")
        for index, drafter in enumerate(others):
            prompt = (index, 1, 2)
            harness.submit(str(index), prompt, seed=index, drafter=drafter, gamma=gamma, **options)
            for _ in range(int(wait.integers(0, 4))):
                harness.worker.run_step()
                harness.check_invariants()
        harness.run()
        harness.check_is_idle()
        assert [harness.tokens(str(index)) for index in range(4)] == expected, gamma
        if gamma and pair == "F3" and temperature == 0.0:
            assert harness.finished("0").report.num_accepted > 0


def test_what_trees_are_proposed_fits_the_engine_and_the_request() -> None:
    for max_nodes in (2, 5, MAX_NODES):
        harness = tree_harness("F3", max_nodes=max_nodes)
        harness.submit("a", drafter="branches", gamma=3, max_tokens=9)
        harness.run()
        drafter = drafter_of(harness)
        assert {row.max_nodes for row in drafter.rows} == {max_nodes - 1}
        fed = [len(outcome.draft_tokens) for outcome in drafter.outcomes]
        assert 0 < max(fed) <= max_nodes - 1
        assert harness.finished("a").report.num_drafted == sum(fed)


def test_an_engine_without_trees_verifies_the_leading_chain() -> None:
    harness = Harness("F3", drafting=TREES_ANYWHERE)
    harness.submit("a", drafter="branches", gamma=3, max_tokens=9)
    harness.run()
    assert harness.tokens("a") == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    drafter = drafter_of(harness)
    assert {row.max_nodes for row in drafter.rows} == {0}
    assert {(len(one.draft_tokens), one.parents) for one in drafter.outcomes} <= {
        (length, None) for length in (1, 2, 3)
    }
    assert harness.finished("a").report.num_drafted > 0


class RoundingEngine(ScriptedEngine):
    """Sums side branches in an order that turns their answer, as a real one does near ties."""

    num_trees = 0

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        logits = super().extend(spans)
        for row, span in enumerate(spans):
            if span.parents is not None:
                self.num_trees += 1
                logits[row, chain_length(span.parents) : len(span.tokens), 0] += 20.0
        return logits


@pytest.mark.parametrize("drafter", ["branches", "branches+lookup", "lookup+branches"])
@pytest.mark.parametrize(
    ("temperature", "mode"),
    [
        (0.0, ExactnessMode.MAX_ACCEPT),
        (0.0, ExactnessMode.LENIENT),
        (1.0, ExactnessMode.SEED_STABLE),
        (0.0, ExactnessMode.SEED_STABLE),
    ],
)
def test_answers_promised_bit_for_bit_see_no_side_branch(
    drafter: str, temperature: float, mode: ExactnessMode
) -> None:
    """Unless the server says they may: then this engine's rounding shows, so the test can fail."""
    options = {"temperature": temperature, "mode": mode, "max_tokens": 40}
    expected = plain_answers("F3", 3, **options)
    bounds = replace(limits(10), max_tree_nodes=MAX_NODES)
    for drafting in (DraftingConfig(), TREES_ANYWHERE):
        target = RoundingEngine(PAIRS["F3"][1], bounds)
        harness = Harness("F3", target=target, drafting=drafting)
        for index in range(3):
            prompt = (index, 1, 2)
            harness.submit(str(index), prompt, seed=index, drafter=drafter, gamma=4, **options)
        harness.run()
        is_allowed = drafting.trees_may_round_differently
        assert (target.num_trees > 0) is is_allowed
        found = [harness.tokens(str(index)) for index in range(3)]
        assert (found == expected) is not is_allowed
        assert harness.finished("0").report.num_drafted > 0


def test_sampled_answers_that_promise_a_law_alone_get_trees() -> None:
    target = RoundingEngine(PAIRS["F4"][1], replace(limits(4), max_tree_nodes=MAX_NODES))
    harness = Harness("F4", target=target)
    harness.submit("a", drafter="branches", gamma=4, temperature=1.0)
    harness.run()
    assert target.num_trees > 0


def test_a_drafter_learns_which_nodes_were_kept_and_what_the_target_says_at_each() -> None:
    harness = tree_harness("F3")
    harness.submit("a", (1, 2, 3), drafter="branches", gamma=2, max_tokens=8)
    harness.run()
    outcomes = drafter_of(harness).outcomes
    assert outcomes
    for outcome in outcomes:
        assert outcome.parents is not None
        assert outcome.num_accepted == len(outcome.path)
        history = outcome.row.sampling.history.tolist()
        kept = [outcome.draft_tokens[node - 1] for node in outcome.path]
        assert history[outcome.num_fed : outcome.num_fed + len(kept)] == kept
        root = history[outcome.num_fed - 1]
        assert outcome.choices == tuple(
            ((token + 1) % 10,) for token in (root, *outcome.draft_tokens)
        )


def test_figures_count_depths_tried_and_nodes_drafted() -> None:
    """Two branches of two: at each depth one child is right, so every trial succeeds."""

    class RightOnce(BranchingDrafter):
        def draft(self, row: DraftRow) -> Draft:
            last = int(row.sampling.history[-1])
            right = ((last + 1) % 10, (last + 2) % 10)
            tree = merge_chains([(last, last), right][: row.gamma])
            return Draft(tokens=tree.tokens, parents=tree.parents)

    harness = tree_harness("F3")
    harness.worker._parts.drafters._single["branches"] = RightOnce(10)
    harness.submit("a", (3,), drafter="branches", gamma=2, max_tokens=6)
    harness.run()
    report = harness.finished("a").report
    assert harness.tokens("a") == [4, 5, 6, 7, 8, 9]
    assert (report.num_steps, report.num_accepted, report.num_drafted) == (2, 4, 8)
    assert (report.alpha_hat, report.draft_utilization, report.tokens_per_step) == (1.0, 0.5, 3.0)


def test_a_stop_inside_a_path_ends_the_request_there() -> None:
    harness = tree_harness("F3")
    harness.submit("a", drafter="branches", gamma=4, max_tokens=20, end_tokens=(6,))
    harness.run()
    assert harness.tokens("a") == [4, 5, 6]
    assert harness.finished("a").reason is FinishReason.STOP_TOKEN
    harness.check_is_idle()


@pytest.mark.parametrize(
    "bad", [Draft(tokens=(1, 2), parents=(0, 2)), Draft(tokens=(1, 2), parents=(0,))]
)
def test_a_drafter_with_a_broken_tree_loses_its_rows_not_their_answers(bad: Draft) -> None:
    harness = tree_harness("F3")
    drafter_of(harness).draft = lambda row: bad  # type: ignore[method-assign]
    harness.submit("a", drafter="branches", gamma=3, max_tokens=6)
    harness.run()
    assert harness.tokens("a") == [4, 5, 6, 7, 8, 9]
    assert harness.finished("a").report.off_reason == "DEGRADED"


def test_a_path_that_cannot_be_kept_ends_its_own_request() -> None:
    class LosesOne(ScriptedEngine):
        has_lost = False

        def keep_path(self, slot: int, path: Sequence[int]) -> None:
            if not self.has_lost:
                self.has_lost = True
                raise EngineError("lost")
            super().keep_path(slot, path)

    bounds = replace(limits(10), max_tree_nodes=MAX_NODES)
    target = LosesOne(PAIRS["F3"][1], bounds)
    harness = Harness("F3", target=target, drafting=TREES_ANYWHERE)
    for name in "ab":
        harness.submit(name, drafter="branches", gamma=2, max_tokens=6)
    harness.run()
    assert isinstance(harness.error("a"), RequestFailed)
    assert harness.tokens("b") == [4, 5, 6, 7, 8, 9]
    harness.check_is_idle()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_on_onnx_runtime_answer_as_plain_decoding_does(
    tiny_bundle: Path, temperature: float
) -> None:
    bundle = load_bundle(tiny_bundle)
    prompts = [(5, 6, 7), (9, 8, 7, 6), (300, 2, 77)]
    options = {
        "temperature": temperature,
        "mode": ExactnessMode.SEED_STABLE,
        "max_tokens": 16,
        "gamma": 3,
    }
    answers = []
    for drafter in ("none", "branches"):
        target = open_engine(bundle, "target", max_batch=4, with_trees=True)
        harness = Harness(target=target, max_batch=4, has_draft=False, drafting=TREES_ANYWHERE)
        for index, prompt in enumerate(prompts):
            harness.submit(str(index), prompt, seed=index, drafter=drafter, **options)
        harness.run()
        answers.append([harness.tokens(str(index)) for index in range(3)])
    assert answers[0] == answers[1]


def test_the_server_loads_tree_graphs_where_its_drafter_proposes_trees(tiny_bundle: Path) -> None:
    """They hold the weights once more."""
    bundle = load_bundle(tiny_bundle)
    found = {}
    for name in ("model", "tree", "lookup+suffix:4", "model/phrases", "auto"):
        options = ServeOptions(config=ServerConfig(default_drafter=name))
        pair = factory.open_engines(bundle, options, 2)
        assert pair.draft is not None
        found[name] = pair.target.limits.max_tree_nodes, pair.draft.limits.max_tree_nodes
    trees, chains = (64, 64), (0, 0)
    assert [*found.values()] == [chains, trees, trees, trees, chains]


def test_gamma_of_trees_can_be_chosen_too() -> None:
    """A tree of more tokens than the greatest gamma counts as deep as it is."""
    expected = plain_answers("F3", 2, max_tokens=40)
    harness = tree_harness("F3", max_nodes=16, costs=table(c=0.01))
    for index in range(2):
        harness.submit(str(index), (index, 1, 2), seed=index, drafter="branches", max_tokens=40)
    harness.run()
    assert [harness.tokens(str(index)) for index in range(2)] == expected
    report = harness.finished("0").report
    assert max(len(one.draft_tokens) for one in drafter_of(harness).outcomes) > 8
    assert report.tokens_per_step is not None
    assert report.tokens_per_step > 1.2
    control = harness.worker.snapshot().control
    assert control is not None
    assert control.num_steps_on > 0


def test_trees_of_adaptive_requests_follow_what_a_node_costs_beside_the_others() -> None:
    """A fixed gamma keeps its trees: its drafts must not depend on its neighbours."""
    costs = replace(
        table(c=0.01),
        trees=ModelCosts(
            batches=(1, 5),
            tokens=(1, MAX_NODES),
            seconds=((1.0, 1.22), (1.0, 12.0)),
            capacity=128,
            position_s=0.0,
        ),
    )
    for batch, expected in ((1, 0.02), (5, 1.0)):
        harness = tree_harness("F3", costs=costs)
        for index in range(batch):
            gamma = {"gamma": 4} if index == 1 else {}
            harness.submit(str(index), (index, 1, 2), drafter="branches", max_tokens=40, **gamma)
        drafter = drafter_of(harness)
        # Until all decode and are drafted for: prompts are read one by one, and probes are steps without drafts.
        for _ in range(batch + 16):
            drafter.rows.clear()
            drafter.outcomes.clear()
            harness.worker.run_step()
            if len(drafter.rows) == batch:
                break
        assert len(drafter.rows) == batch
        for row in drafter.rows:
            if row.is_adaptive:
                assert row.node_cost == pytest.approx(expected)
                assert row.max_nodes == (MAX_NODES - 1 if batch == 1 else 0)
            else:
                alone = node_cost(costs, DraftingConfig().tree_nodes)
                assert (row.node_cost, row.max_nodes) == (alone, MAX_NODES - 1)
        of_adaptive = [one for one in drafter.outcomes if one.row.is_adaptive]
        assert all((one.parents is None) is (batch > 1) for one in of_adaptive)
