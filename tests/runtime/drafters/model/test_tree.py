"""Trees of sampled candidates: their shapes, the law of answers, and how they are asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import Engine
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.trees import tree_layout
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig, parse_settings
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.core.tree import DraftTree
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.registry import build_drafters
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import sequence_probs

from tests.engines.sampling.test_candidates import walked
from tests.runtime.drafters.rows import row as row_of
from tests.runtime.gamma.test_controller import table
from tests.runtime.markov import Harness, LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

V = 12
LAW = SamplingParams()


class Counting:
    """An engine that counts its passes and keeps its spans."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[list[object]] = []
        self.limits, self.is_row_invariant = engine.limits, engine.is_row_invariant
        self.packs_rows = engine.packs_rows

    def extend(self, spans):
        self.calls.append(list(spans))
        return self.engine.extend(spans)


def flat(_: tuple[int, ...]) -> np.ndarray:
    return np.zeros(V, dtype=np.float32)


def drafter_over(logits=flat, *, max_nodes=64, **config):
    bounds = replace(limits(V), max_tree_nodes=max_nodes)
    engine = Counting(ScriptedEngine(logits, bounds))
    sampler = CpuSampler(max_batch=bounds.max_batch, max_gamma=8, vocab_size=V)
    parts = DrafterParts(
        draft=engine, sampler=sampler, vocab_size=V, chunk=16, config=DraftingConfig(**config)
    )
    return build_drafters(parts)["tree"], engine


def a_row(*, max_nodes=60, gamma=3, params=LAW, mode=ExactnessMode.MAX_ACCEPT, **changes):
    row = row_of((3, 1, 4), gamma=gamma, **changes)
    return replace(
        row, max_nodes=max_nodes, sampling=replace(row.sampling, params=params, mode=mode, seed=9)
    )


def shape_of(draft) -> list[int]:
    """Distinct nodes per depth."""
    tree = DraftTree(tokens=draft.tokens, parents=draft.parents, candidates=draft.candidates)
    return np.bincount(tree_layout(tree.parents).depths)[1:].tolist()


# --- shapes


def test_a_tree_branches_as_configured_and_goes_on_as_chains() -> None:
    drafter, engine = drafter_over(branching=(3, 2))
    (draft,) = drafter.propose([a_row()], [0])
    assert shape_of(draft) == [3, 6, 6]
    assert draft.is_sampled
    assert len(engine.calls) == 3
    assert [len(call[0].tokens) for call in engine.calls] == [3, 4, 10]
    # The path of first children stands first, and was fed but for its last token.
    assert draft.parents[:3] == (0, 1, 2)
    assert draft.num_computed == 3 + 2


def test_a_request_may_ask_for_another_shape() -> None:
    drafter, _ = drafter_over(branching=(3, 2))
    (draft,) = drafter.propose([a_row(branching=(2, 1, 2))], [0])
    assert shape_of(draft) == [2, 2, 4]


@pytest.mark.parametrize(("budget", "expected"), [(2, [2]), (5, [3, 2]), (8, [3, 5])])
def test_the_budget_of_nodes_is_never_exceeded(budget: int, expected: list[int]) -> None:
    of_row, _ = drafter_over(branching=(3, 2))
    of_server, _ = drafter_over(branching=(3, 2), tree_nodes=budget)
    of_draft, _ = drafter_over(branching=(3, 2), max_nodes=budget + 1)
    for drafter, row in (
        (of_row, a_row(max_nodes=budget)), (of_server, a_row()), (of_draft, a_row()),
    ):  # fmt: skip
        (draft,) = drafter.propose([row], [0])
        assert shape_of(draft) == expected


def test_no_sibling_is_offered_twice() -> None:
    def two(_: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(V) < 2, 0.0, -np.inf).astype(np.float32)

    drafter, _ = drafter_over(two, branching=(6,))
    (draft,) = drafter.propose([a_row(gamma=1)], [0])
    assert sorted(draft.tokens) == [0, 1]
    assert draft.candidates[0] == (1, 2)


def test_nothing_follows_an_end_token() -> None:
    drafter, _ = drafter_over(branching=(6,))
    params = replace(LAW, end_token_ids=(5, 6), allowed_token_ids=(3, 4, 5, 6, 7, 8))
    (draft,) = drafter.propose([a_row(gamma=2, params=params)], [0])
    ends = [node for node, token in enumerate(draft.tokens, 1) if token in (5, 6)]
    assert all(draft.candidates[node] == () for node in ends if draft.parents[node - 1] == 0)
    assert shape_of(draft) == [6, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"params": SamplingParams(temperature=0.0)},
        {"mode": ExactnessMode.SEED_STABLE},
        {"max_nodes": 0},
        {"branching": (1, 1)},
    ],
)
def test_other_rows_get_the_models_chain(changes: dict[str, object]) -> None:
    drafter, _ = drafter_over(branching=(3, 2))
    (draft,) = drafter.propose([a_row(**changes)], [0])
    assert (draft.parents, draft.candidates, len(draft.tokens)) == (None, None, 3)


def test_rows_verified_as_blocks_get_the_models_chain() -> None:
    drafter, _ = drafter_over()
    row = a_row()
    row = replace(row, sampling=replace(row.sampling, verifies_block=True))
    (draft,) = drafter.propose([row], [0])
    assert draft.parents is None and draft.is_sampled


def test_a_row_drafts_alike_alone_and_beside_others() -> None:
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(prefix).normal(size=V).astype(np.float32)

    def rows(count: int) -> list:
        kinds = [{}, {"mode": ExactnessMode.SEED_STABLE}, {"branching": (4,), "gamma": 5}]
        made = [a_row(**kind) for kind in kinds[:count]]
        return [
            replace(one, sampling=replace(one.sampling, slot=i, index=i))
            for i, one in enumerate(made)
        ]

    together = drafter_over(logits)[0].propose(rows(3), [0, 1, 2])
    assert together[0] == drafter_over(logits)[0].propose(rows(1), [0])[0]
    assert together[2] == drafter_over(logits)[0].propose(rows(3), [2])[0]
    assert [draft.parents is None for draft in together] == [False, True, False]


# --- laws


TABLE = np.array([[0.0, 0.6, 0.4], [0.25, 0.0, 0.75], [0.55, 0.45, 0.0]])
DRAFT = np.array([[0.6, 0.4, 0.0], [0.0, 0.3, 0.7], [0.5, 0.0, 0.5]])
NUM_TOKENS = 2


def logits_from(table: np.ndarray):
    with np.errstate(divide="ignore"):
        logits = np.log(table).astype(np.float32)
    return lambda prefix: logits[prefix[-1]]


def answer(noise, params: SpeculationParams) -> tuple[int, ...]:
    bounds = replace(limits(3), max_tree_nodes=8, max_batch=1)
    worker = Worker(
        ServedEngines(
            target=ScriptedEngine(logits_from(TABLE), bounds),
            draft=ScriptedEngine(logits_from(DRAFT), bounds),
            sampler=CpuSampler(max_batch=1, max_gamma=8, vocab_size=3, noise=noise),
            max_gamma=8,
        ),
        config=ServerConfig(prefill_chunk=16),
        decoder=LetterDecoder(),
    )
    events: list[object] = []
    worker.submit(
        spec("a", (0, 1), max_tokens=NUM_TOKENS, temperature=1.0, speculation=params), events.append
    )
    while worker.run_step():
        pass
    return tuple(t.token for e in events if isinstance(e, Progressed) for t in e.tokens)


def test_answers_have_the_targets_law() -> None:
    params = SpeculationParams(drafter="tree", gamma=1, branching=(2,))
    found = walked(lambda noise: answer(noise, params))
    expected = sequence_probs(lambda prefix: TABLE[prefix[-1] if prefix else 1], NUM_TOKENS)
    assert distance(found, expected) < 1e-6


def served(mode: ExactnessMode, *, drafter: str = "tree", max_nodes: int = 32, **changes: float):
    bounds = replace(limits(V), max_tree_nodes=max_nodes)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([*prefix[-2:]]).normal(size=V).astype(np.float32)

    harness = Harness(
        target=ScriptedEngine(logits, bounds), draft=ScriptedEngine(logits, bounds), max_batch=3
    )
    params = SpeculationParams(
        drafter=drafter,
        gamma=4,
        mode=mode,
        branching=(2,),
        lenience=0.5 if mode is ExactnessMode.LENIENT else 1.0,
    )
    requests = [
        replace(
            one := spec(str(n), (n, 5), max_tokens=31, temperature=1.0, seed=n, speculation=params),
            params=replace(one.params, **changes),
        )
        for n in range(3)
    ]
    for request in requests:
        harness.events[request.request_id] = []
        harness.worker.submit(request, harness.events[request.request_id].append)
    harness.run()
    return harness, [harness.tokens(request.request_id) for request in requests], requests


@pytest.mark.parametrize("probs", [{}, {"top_k": 4, "presence_penalty": 0.7}, {"top_p": 0.8}])
def test_a_draft_that_is_the_target_is_kept_whole(probs: dict[str, float]) -> None:  # T37
    """Each first candidate has the target's own law, so its coin keeps it, penalties of its path included."""
    harness, _, requests = served(ExactnessMode.MAX_ACCEPT, **probs)
    for request in requests:
        report = harness.finished(request.request_id).report
        assert report.tokens_per_step == pytest.approx(5.0)


@pytest.mark.parametrize("mode", [ExactnessMode.SEED_STABLE])
def test_seed_stable_answers_are_those_of_plain_decoding(mode: ExactnessMode) -> None:
    _, drafted, _ = served(mode)
    assert drafted == served(mode, drafter="none")[1]


def test_gamma_of_sampled_trees_can_be_chosen_too() -> None:
    bounds = replace(limits(V), max_tree_nodes=32)
    engines = [
        ScriptedEngine(lambda prefix: 3.0 * np.eye(V, dtype=np.float32)[prefix[-1]], bounds)
        for _ in range(2)
    ]
    harness = Harness(target=engines[0], draft=engines[1], costs=table(c=0.01))
    for index in range(2):
        harness.submit(
            str(index), (index, 1), seed=index, drafter="tree", max_tokens=40, temperature=1.0
        )
    harness.run()
    for index in range(2):
        report = harness.finished(str(index)).report
        assert len(harness.tokens(str(index))) == 40
        assert report.off_reason is None
        assert report.num_accepted > 10


# --- asked for


def test_a_draft_model_without_trees_does_not_offer_it() -> None:
    bounds = limits(V)
    parts = DrafterParts(
        draft=ScriptedEngine(flat, bounds),
        sampler=CpuSampler(max_batch=1, max_gamma=8, vocab_size=V),
        vocab_size=V,
        chunk=16,
    )
    assert "tree" not in build_drafters(parts)
    assert build_drafters(parts).usable("tree+lookup") == "lookup"


def test_the_shape_is_set_as_numbers_with_commas() -> None:
    found = parse_settings(["branching=4,2,1"])
    assert DraftingConfig(**found).branching == (4, 2, 1)
    with pytest.raises(ConfigError, match="branching"):
        parse_settings(["branching=4,x"])
    for wrong in ((), (0,), (17,), (1,) * 17):
        with pytest.raises(ConfigError, match="branching"):
            DraftingConfig(branching=wrong)
