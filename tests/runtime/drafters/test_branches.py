"""Trees of drafters without a model: T40's hand examples as trees, budgets, and what rows get them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.trees import check_parents, tree_layout
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tree import leading_chain, preorder
from outrider.runtime.drafters.base import LEAST_NODE_PROB, Draft, DrafterParts, least_prob
from outrider.runtime.drafters.branches import Budget, as_draft, grow
from outrider.runtime.drafters.text.datastore import DatastoreDrafter
from outrider.runtime.drafters.text.suffix import SuffixDrafter
from outrider.runtime.drafters.text.suffix_array import Datastore, write_datastore
from outrider.runtime.gamma.tree_prices import node_cost

from tests.runtime.drafters.rows import row
from tests.runtime.gamma.test_controller import table

LAW = {0: [(1, 0.6, 1), (2, 0.4, 2)], 1: [(3, 1.0, 3), (4, 0.0, 4)], 2: [(5, 0.5, 5)]}


def parts(**settings: object) -> DrafterParts:
    sampler = CpuSampler(max_batch=1, max_gamma=8, vocab_size=10)
    config = DraftingConfig(**settings)
    return DrafterParts(draft=None, sampler=sampler, vocab_size=10, chunk=8, config=config)


def tree(drafter, history, *, max_nodes: int = 8, **options: object) -> Draft:
    (found,) = drafter.propose([replace(row(history, **options), max_nodes=max_nodes)], [0])
    return found


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Every path from the root's child down to a node."""
    parents = draft.parents or tuple(range(len(draft.tokens)))
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


@pytest.mark.parametrize(
    ("budget", "ends", "tokens", "parents"),
    [
        # A certain child stands behind its parent, of the same probability, and before the others.
        ((4, 2, 0.1), (), (1, 3), (0, 1)),
        ((4, 3, 0.1), (), (1, 3, 2), (0, 1, 0)),
        ((4, 9, 0.1), (), (1, 3, 2, 5), (0, 1, 0, 3)),
        ((4, 9, 0.3), (), (1, 3, 2), (0, 1, 0)),
        ((1, 9, 0.1), (), (1, 2), (0, 0)),
        ((4, 9, 0.1), (1,), (1, 2, 5), (0, 0, 2)),
        ((4, 9, 0.7), (), (), ()),
    ],
)
def test_the_likeliest_nodes_are_taken_within_the_budget(budget, ends, tokens, parents) -> None:
    depth, nodes, prob = budget
    limits = Budget(max_depth=depth, max_nodes=nodes, min_prob=prob)
    assert grow(0, lambda at: LAW.get(at, []), limits, ends) == (tokens, parents)


@given(st.integers(1, 4), st.integers(0, 30), st.floats(0.01, 0.9), st.integers(0, 50))
def test_a_grown_tree_keeps_parents_before_children(depth, nodes, prob, seed) -> None:
    def followers(place: int) -> list[tuple[int, float, int]]:
        shares = [0.5, 0.3, 0.1][: 1 + (place * 7 + seed) % 3]
        return [(i, share, place * 3 + i + 1) for i, share in enumerate(shares)]

    budget = Budget(max_depth=depth, max_nodes=nodes, min_prob=prob)
    tokens, parents = grow(0, followers, budget)
    check_parents(parents)
    assert len(tokens) <= nodes
    assert not tokens or tree_layout(parents).depths.max() <= depth
    # Numbered depth first, so the path of first children needs no moving.
    chain = leading_chain(tokens, parents)
    assert tokens[: len(chain)] == chain
    assert preorder(tokens, parents) == (tokens, parents)


def test_a_tree_without_branches_is_a_chain() -> None:
    assert as_draft((1, 2), (0, 1)) == Draft(tokens=(1, 2))
    assert as_draft((1, 2), (0, 0)).parents == (0, 0)
    assert as_draft((), ()) == Draft(tokens=())


def test_what_a_node_costs_decides_which_are_worth_it() -> None:
    assert least_prob(0.25) == 0.25
    assert least_prob(0.0) == LEAST_NODE_PROB
    assert least_prob(7.0) == 1.0
    cheap, dear = (node_cost(table(c=0.1, slope=slope), 8) for slope in (0.01, 0.3))
    assert 0.0 < cheap < dear
    for name in ("min_node_prob", "tree_nodes"):
        with pytest.raises(ConfigError, match=name):
            DraftingConfig(**{name: 0})


# --- datastore (REST)


def rest(tmp_path: Path, **settings: object) -> DatastoreDrafter:
    write_datastore([[1, 2, 3, 1, 2, 4, 1, 2, 3]], tmp_path / "store", vocab_size=10)
    store = Datastore.open(tmp_path / "store", vocab_size=10)
    return DatastoreDrafter(DraftingConfig(**settings), store)


def test_the_hand_example_of_retrieval_as_a_tree(tmp_path: Path) -> None:
    drafter = rest(tmp_path)
    # Weights: 3 twice, 3 1, 4 and 4 1 once each; of equal weights the shallower one first.
    assert paths(tree(drafter, [7, 1, 2], gamma=2, max_nodes=3)) == {(3,), (4,), (3, 1)}
    whole = tree(drafter, [7, 1, 2], gamma=2, key="b")
    assert (whole.tokens, whole.parents) == ((3, 1, 4, 1), (0, 1, 0, 3))
    assert tree(drafter, [9, 9], key="c") == Draft(tokens=())
    assert paths(tree(drafter, [7, 1, 2], gamma=2, key="d", end_tokens=(3,))) == {
        (3,),
        (4,),
        (4, 1),
    }


def test_rows_that_take_no_trees_get_the_heaviest_chain(tmp_path: Path) -> None:
    drafter = rest(tmp_path)
    assert tree(drafter, [7, 1, 2], gamma=2, max_nodes=0) == Draft(tokens=(3, 1))
    assert drafter.guess(row([7, 1, 2], gamma=2, key="b"), (), 2) == (3, 1)


def test_the_servers_budget_bounds_the_rows(tmp_path: Path) -> None:
    drafter = rest(tmp_path, tree_nodes=2)
    assert paths(tree(drafter, [7, 1, 2], gamma=2, max_nodes=9)) == {(3,), (4,)}


def test_what_a_node_costs_in_this_step_decides_which_are_worth_it(tmp_path: Path) -> None:
    """The continuations have chances 2/3 and 1/3."""
    drafter = rest(tmp_path, min_node_prob=0.01)

    def proposed(node_cost: float | None, key: str) -> set[tuple[int, ...]]:
        one = row([7, 1, 2], gamma=1, key=key)
        (found,) = drafter.propose([replace(one, max_nodes=8, node_cost=node_cost)], [0])
        return paths(found)

    assert proposed(None, "a") == proposed(0.3, "b") == {(3,), (4,)}
    assert proposed(0.4, "c") == {(3,)}
    assert proposed(0.7, "d") == set()
    assert proposed(2.0, "e") == set()


# --- suffix decoding


def test_a_suffix_tree_holds_what_else_followed_the_match() -> None:
    drafter = SuffixDrafter(
        DraftingConfig(suffix_factor=2.0, min_prob=0.9, max_history_tokens=99, min_node_prob=0.2)
    )
    history = drafter._histories.of("s")
    for answer in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]):
        history.add(answer)
    # 3 is certain; 4 and 5 share it two to one. A chain stops before them.
    assert tree(drafter, [9, 1, 2], scope="s", max_nodes=0) == Draft(tokens=(3,), expected=1.0)
    found = tree(drafter, [9, 1, 2], scope="s", key="b")
    assert (found.tokens, found.parents) == ((3, 4, 5), (0, 1, 1))
    assert tree(drafter, [9, 9, 8], scope="s", key="c").tokens == ()
    # The request's own text: 6 followed 1 2 twice, 7 once, its own end is no occurrence.
    own = tree(drafter, [1, 2, 6, 1, 2, 6, 1, 2, 7, 1, 2], gamma=1, key="d")
    assert own.tokens == (6, 7)
