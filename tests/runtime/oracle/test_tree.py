"""Trees: their shape, and the laws of the two walks, by enumeration."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from outrider.engines.base import EngineError
from outrider.runtime.core.tree import DraftTree, leading_chain, pruned, tried_chain
from outrider.runtime.oracle.tree_walks import (
    drawn_first,
    judge_candidates,
    match_walk,
    node_wise_walk,
)
from outrider.runtime.oracle.verification import completed, point_mass, sequence_probs

from tests.draft_trees import merge_chains, tokens_of
from tests.runtime.oracle.laws import F1_DRAFT, F1_TARGET, distance, random_row_of

EXACT = 1e-12


def coin_cells(tokens, rows, target, lenience=1.0):
    """(midpoint, volume) of every cell of one node's coins, cut where a coin's outcome changes."""
    cuts, left = [], np.array(target)
    for token, row in zip(tokens, rows, strict=True):
        cuts.append(min(1.0, left[token] / (lenience * row[token])) if row[token] > 0 else 0.0)
        positive = np.clip(left - row, 0.0, None)
        left = positive / positive.sum() if positive.sum() > EXACT else left
    cells = [[(low, high) for low, high in pairwise([0.0, cut, 1.0]) if high > low] for cut in cuts]
    for cell in product(*cells):
        yield (
            np.array([(low + high) / 2 for low, high in cell]),
            float(np.prod([high - low for low, high in cell])),
        )


def node_law(draw_candidates, target, lenience=1.0):
    """Law [V] of the token at one node: drafts x coins x the remaining row."""
    probs, kept_mass = np.zeros(len(target)), 0.0
    for tokens, rows, mass in draw_candidates:
        for coins, volume in coin_cells(tokens, rows, target, lenience):
            kept, remaining = judge_candidates(
                np.array(tokens, dtype=np.int64), rows, target, coins, lenience=lenience
            )
            if kept is None:
                probs += mass * volume * remaining
            else:
                probs[tokens[kept]] += mass * volume
                kept_mass += mass * volume
    return probs, kept_mass


def with_replacement_draws(draft, count):
    for tokens in product(range(len(draft)), repeat=count):
        yield tokens, np.array([draft] * count), float(np.prod([draft[t] for t in tokens]))


def drawn_first_draws(draft, count):
    """One that is drawn from what the likeliest leave, in front of these."""
    points = [int(token) for token in np.argsort(-draft, kind="stable")[: count - 1]]
    for token in (one for one in np.flatnonzero(draft) if one not in points):
        tokens = (int(token), *points)
        rows = drawn_first(draft, tokens)
        yield tokens, rows, float(rows[0, token])


def best_set_draws(draft, count, *, last_is_random):
    """The likeliest tokens as point masses; the last one drawn from the rest where wanted."""
    order = [int(token) for token in np.argsort(-draft, kind="stable")]
    fixed = order[: count - 1] if last_is_random else order[:count]
    rows = [point_mass(token, len(draft)) for token in fixed]
    if not last_is_random:
        yield tuple(fixed), np.array(rows), 1.0
        return
    rest = np.array(draft)
    rest[fixed] = 0.0
    rest /= rest.sum()
    for token in np.flatnonzero(rest):
        yield (*fixed, int(token)), np.array([*rows, rest]), float(rest[token])


# --- shape


def test_phrases_become_a_trie_with_the_first_chain_first():
    tree = merge_chains([(7, 8, 1, 2), (7, 8, 3, 4), (7, 9), (7, 8, 1, 5)])
    assert tree.tokens == (7, 8, 1, 2, 3, 4, 9, 5)
    assert tree.parents == (0, 1, 2, 3, 2, 5, 1, 3)
    assert tree.candidates[:4] == ((1, 1, 1, 1), (2, 2, 7, 2), (3, 5, 3), (4, 8))
    assert tokens_of(tree, (1, 2, 5, 6)) == (7, 8, 3, 4)


def test_a_chain_is_its_own_trie():
    tree = merge_chains([(4, 5, 6)])
    assert tree == DraftTree(tokens=(4, 5, 6), parents=(0, 1, 2), candidates=((1,), (2,), (3,), ()))


@pytest.mark.parametrize("chains", [[], [()], [(), ()]])
def test_no_draft_is_a_tree_of_the_root_alone(chains):
    assert merge_chains(chains) == DraftTree(tokens=(), parents=(), candidates=((),))


def test_broken_trees_are_refused():
    with pytest.raises(EngineError, match="the parent of token 1"):
        DraftTree(tokens=(5,), parents=(1,), candidates=((), ()))
    with pytest.raises(ValueError, match="offers of node 0"):
        DraftTree(tokens=(5,), parents=(0,), candidates=((), ()))
    with pytest.raises(ValueError, match="N \\+ 1 lists"):
        DraftTree(tokens=(5,), parents=(0,), candidates=((1,),))


# --- sample and match


def match_law(tree, target_row):
    """Exact law of a round: one draw at every node that is reached, none elsewhere."""
    probs = {}

    def walk(path_tokens, node, draws, mass):
        for token, share in enumerate(target_row(path_tokens)):
            drawn = draws.copy()
            drawn[node] = token
            path, following = match_walk(tree, drawn)
            if len(path) > len(path_tokens):
                walk((*path_tokens, token), path[-1], drawn, mass * share)
            else:
                run = (*tokens_of(tree, path), following)
                probs[run] = probs.get(run, 0.0) + mass * share

    undrawn = np.full(len(tree.tokens) + 1, -1, dtype=np.int64)
    walk((), 0, undrawn, 1.0)
    return probs


def first_token_law(probs, vocab_size):
    """[V] law of the first emitted token."""
    return [
        sum(mass for run, mass in probs.items() if run[0] == token) for token in range(vocab_size)
    ]


@pytest.mark.parametrize(
    "chains",
    [[], [(0,)], [(0, 1, 2)], [(0, 1), (0, 2), (1,)], [(2, 2), (1, 0), (0, 0), (1, 0)]],
)
def test_matching_any_tree_gives_the_target(chains):
    target = random_row_of(3, 3)
    probs = match_law(merge_chains(chains), target)
    assert distance(completed(probs, target, 4), sequence_probs(target, 4)) < EXACT


@pytest.mark.parametrize(
    ("chains", "target"),
    [
        # Drawing once per path for the node they share gives (.625, .375).
        ([(0,), (1,)], [0.5, 0.5]),
        # Drawing again where nothing matched gives P(A) = .84.
        ([(0,)], [0.6, 0.4]),
        # A draw per phrase (Ouroboros, equation 8 as printed) gives (.40, .48, .12).
        ([(0, 2), (1, 2)], [0.4, 0.4, 0.2]),
        # Three phrases that share their first token: P(A) = .784.
        ([(0, 0), (0, 1), (0, 2)], [0.4, 0.4, 0.2]),
    ],
)
def test_published_biases_are_not_here(chains, target):
    probs = match_law(merge_chains(chains), lambda prefix: np.array(target))
    assert first_token_law(probs, len(target)) == pytest.approx(target, abs=EXACT)


def test_the_longest_match_may_lie_on_any_branch():
    tree = merge_chains([(1, 2), (3, 4, 5)])
    draws = np.array([3, 0, 0, 4, 5, 9])
    assert match_walk(tree, draws) == ((3, 4, 5), 9)
    assert match_walk(tree, np.array([1, 7, 0, 0, 0, 0])) == ((1,), 7)
    assert match_walk(tree, np.array([8, 0, 0, 0, 0, 0])) == ((), 8)


# --- node-wise verification

F1_ACCEPTANCE = [
    # K, with replacement, drawn first, top-K set, top-(K - 1) and a random one behind them
    (1, 0.8, 0.8, 0.2, 0.8),
    (2, 0.9, 1.0, 0.6, 29 / 30),
    (3, 0.95, 1.0, 0.9, 29 / 30),
]


@pytest.mark.parametrize(("count", "repeated", "first", "top", "top_and_random"), F1_ACCEPTANCE)
def test_acceptance_of_the_four_token_pair(count, repeated, first, top, top_and_random):
    for draws, expected in (
        (with_replacement_draws(F1_DRAFT, count), repeated),
        (drawn_first_draws(F1_DRAFT, count), first),
        (best_set_draws(F1_DRAFT, count, last_is_random=False), top),
        (best_set_draws(F1_DRAFT, count, last_is_random=True), top_and_random),
    ):
        probs, kept = node_law(draws, F1_TARGET)
        assert kept == pytest.approx(expected, abs=EXACT)
        np.testing.assert_allclose(probs, F1_TARGET, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("count", "repeated", "first"), [(1, 0.5, 0.5), (2, 0.6, 0.6 + 1 / 3)])
def test_acceptance_of_a_peaked_draft(count, repeated, first):
    draft = np.array([0.1, 0.7, 0.1, 0.1])
    target = F1_TARGET
    for draws, expected in (
        (with_replacement_draws(draft, count), repeated),
        (drawn_first_draws(draft, count), first),
    ):
        probs, kept = node_law(draws, target)
        assert kept == pytest.approx(expected, abs=EXACT)
        np.testing.assert_allclose(probs, target, rtol=0, atol=EXACT)


def test_a_repeated_candidate_is_tested_again():
    """Skipping the second copy gives P(a) = .408."""
    probs, _ = node_law(with_replacement_draws(F1_DRAFT, 2), F1_TARGET)
    assert probs[0] == pytest.approx(0.4, abs=EXACT)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("draws", [with_replacement_draws, drawn_first_draws])
def test_random_pairs_give_the_target(seed, draws):
    target = random_row_of(seed, 4, num_zeros=seed % 3)(())
    draft = random_row_of(seed + 100, 4)(())
    for count in (1, 2, 3):
        probs, _ = node_law(draws(draft, count), target)
        np.testing.assert_allclose(probs, target, rtol=0, atol=EXACT)


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.2])
def test_lenience_keeps_every_token_below_its_bound(lenience):
    target = np.array([0.1, 0.1, 0.2, 0.6])
    for draws in (with_replacement_draws, drawn_first_draws):
        strict = node_law(draws(F1_DRAFT, 2), target)[1]
        probs, kept = node_law(draws(F1_DRAFT, 2), target, lenience)
        assert (probs <= target / lenience + EXACT).all()
        assert probs.sum() == pytest.approx(1.0, abs=EXACT)
        assert kept > strict


def test_the_coin_at_the_ratio_itself_rejects():
    kept, _ = judge_candidates(np.array([1]), F1_DRAFT[None], F1_TARGET, np.array([0.5]))
    assert kept is None
    kept, _ = judge_candidates(np.array([1]), F1_DRAFT[None], F1_TARGET, np.array([0.4999]))
    assert kept == 0
    target = np.array([0.0, 1.0, 0.0, 0.0])
    kept, _ = judge_candidates(np.array([0]), F1_DRAFT[None], target, np.array([0.0]))
    assert kept is None


def test_equal_rows_leave_the_target_behind():
    kept, remaining = judge_candidates(np.array([0]), F1_TARGET[None], F1_TARGET, np.array([1.0]))
    assert kept is None
    np.testing.assert_array_equal(remaining, F1_TARGET)


def tree_law(draft_row, target_row, branching, draw):
    """Exact law of a round over a two-level tree whose nodes draw ``branching`` candidates each."""
    probs = {}

    def levels(prefix, depth):
        """(chains below a prefix in drafting order, rows per offer, mass) for every outcome."""
        if depth == len(branching):
            yield {}, 1.0
            return
        for tokens, rows, mass in draw(draft_row(prefix), branching[depth]):
            # Equal siblings are one node: their subtree is drawn once.
            below = [levels((*prefix, token), depth + 1) for token in dict.fromkeys(tokens)]
            for parts in product(*(list(part) for part in below)):
                drawn = {prefix: (tokens, rows)}
                total = mass
                for found, share in parts:
                    drawn |= found
                    total *= share
                yield drawn, total

    for drawn, mass in levels((), 0):
        if mass == 0.0:
            continue
        tree, prefixes = tree_of(drawn)
        rows = [drawn[p][1] if p in drawn else np.zeros((0, 0)) for p in prefixes]
        targets = np.array([target_row(prefix) for prefix in prefixes])
        cells = [
            list(coin_cells(drawn[p][0], drawn[p][1], target_row(p)))
            if p in drawn
            else [(np.zeros(0), 1.0)]
            for p in prefixes
        ]
        for cell in product(*cells):
            volume = float(np.prod([size for _, size in cell]))
            path, remaining = node_wise_walk(tree, rows, targets, [coins for coins, _ in cell])
            for token in np.flatnonzero(remaining):
                run = (*tokens_of(tree, path), int(token))
                probs[run] = probs.get(run, 0.0) + mass * volume * float(remaining[token])
    return probs


def tree_of(drawn):
    """The tree of what was drawn behind each prefix, breadth first, and the prefix of each node."""
    prefixes, tokens, parents, candidates = [()], [], [], []
    for node, prefix in enumerate(prefixes):
        children = drawn[prefix][0] if prefix in drawn else ()
        places = {}
        for token in children:
            if token not in places:
                prefixes.append((*prefix, token))
                tokens.append(token)
                parents.append(node)
                places[token] = len(tokens)
        candidates.append(tuple(places[token] for token in children))
    return (
        DraftTree(tokens=tuple(tokens), parents=tuple(parents), candidates=tuple(candidates)),
        prefixes,
    )


@pytest.mark.parametrize(
    ("vocab_size", "branching", "draw"),
    [
        (3, (2, 1), with_replacement_draws),
        (2, (2, 2), with_replacement_draws),
        (3, (2, 1), drawn_first_draws),
        (2, (2, 2), drawn_first_draws),
        (4, (1, 1), with_replacement_draws),
    ],
)
def test_a_round_over_a_sampled_tree_has_the_targets_law(vocab_size, branching, draw):
    target, draft = random_row_of(11, vocab_size), random_row_of(12, vocab_size)
    probs = tree_law(draft, target, branching, draw)
    assert sum(probs.values()) == pytest.approx(1.0, abs=EXACT)
    length = len(branching) + 1
    assert distance(completed(probs, target, length), sequence_probs(target, length)) < EXACT
    assert max(map(len, probs)) == length


# --- what may be verified of a proposal


def test_pruning_keeps_what_can_be_reached():
    tokens, parents = (1, 9, 2, 3, 4, 5), (0, 0, 1, 2, 3, 1)
    whole = pruned(tokens, parents, max_depth=5, max_nodes=9, vocab_size=10)
    assert whole == (tokens, parents)
    assert pruned(tokens, parents, max_depth=5, max_nodes=9, vocab_size=9) == (
        (1, 2, 4, 5),
        (0, 1, 2, 1),
    )
    assert pruned(tokens, parents, max_depth=1, max_nodes=9, vocab_size=10) == ((1, 9), (0, 0))
    assert pruned(tokens, parents, max_depth=5, max_nodes=3, vocab_size=10) == (
        (1, 9, 2),
        (0, 0, 1),
    )
    for limit in ({"max_depth": 0, "max_nodes": 9}, {"max_depth": 5, "max_nodes": 0}):
        assert pruned(tokens, parents, vocab_size=10, **limit) == ((), ())


def test_broken_proposals_are_refused():
    with pytest.raises(EngineError, match="the parent of token 2"):
        pruned((1, 2), (0, 2), max_depth=5, max_nodes=9, vocab_size=10)
    with pytest.raises(ValueError, match="N parents"):
        pruned((1, 2), (0,), max_depth=5, max_nodes=9, vocab_size=10)


@pytest.mark.parametrize(
    ("path", "chain"),
    [((), (7,)), ((1,), (7, 8)), ((1, 2), (7, 8)), ((3,), (5, 6)), ((3, 4), (5, 6))],
)
def test_the_chain_that_was_tried_ends_with_its_first_rejected_child(path, chain):
    assert tried_chain((7, 8, 5, 6), (0, 1, 0, 3), path) == chain


def test_the_leading_chain_takes_the_first_child_everywhere() -> None:
    """Nodes 1 and 4 stand behind the root, 2 and 3 behind 1, 5 behind 4, 6 behind 2."""
    assert leading_chain((10, 20, 30, 40, 50, 60), (0, 1, 1, 0, 4, 2)) == (10, 20, 60)
    assert leading_chain((10, 20), (0, 1)) == (10, 20)
    assert leading_chain((), ()) == ()


def test_the_leading_chain_of_no_tree_is_refused() -> None:
    with pytest.raises(EngineError):
        leading_chain((1, 2), (0, 2))
    with pytest.raises(ValueError, match="N parents"):
        leading_chain((1, 2), (0,))
