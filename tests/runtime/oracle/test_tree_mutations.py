"""The tests of trees can fail: each known mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.runtime.core import tree
from outrider.runtime.oracle import tree_walks

import tests.runtime.oracle.test_tree as tree_tests
from tests.mutants import assert_caught

MUTANTS = {
    "<= for <": (
        "* proposed[token] < current[token]",
        "* proposed[token] <= current[token]",
        lambda: tree_tests.test_the_coin_at_the_ratio_itself_rejects(),
    ),
    "residual not normalised": (
        "residual / mass if",
        "residual if",
        lambda: tree_tests.test_acceptance_of_the_four_token_pair(2, 0.9, 1.0, 0.6, 29 / 30),
    ),
    "residual not updated": (
        "current = residual / mass if mass > SMALLEST_RESIDUAL else current",
        "current = target_row",
        lambda: tree_tests.test_acceptance_of_the_four_token_pair(2, 0.9, 1.0, 0.6, 29 / 30),
    ),
    "residual of the whole target row": (
        "np.maximum(current - proposed, 0.0)",
        "np.maximum(target_row - proposed, 0.0)",
        lambda: tree_tests.test_random_pairs_give_the_target(1, tree_tests.with_replacement_draws),
    ),
    "candidates tested against the target row": (
        "* proposed[token] < current[token]",
        "* proposed[token] < target_row[token]",
        lambda: tree_tests.test_random_pairs_give_the_target(0, tree_tests.with_replacement_draws),
    ),
    "first law for all candidates": (
        "proposed = candidate_probs[index]",
        "proposed = candidate_probs[0]",
        lambda: tree_tests.test_random_pairs_give_the_target(3, tree_tests.drawn_first_draws),
    ),
    "one coin for all candidates": (
        "uniforms[index] *",
        "uniforms[0] *",
        lambda: tree_tests.test_acceptance_of_the_four_token_pair(2, 0.9, 1.0, 0.6, 29 / 30),
    ),
    "accept test in float16": (
        "uniforms[index] * lenience * proposed[token] < current[token]",
        "np.float16(uniforms[index] * proposed[token]) < np.float16(current[token])",
        lambda: tree_tests.test_the_coin_at_the_ratio_itself_rejects(),
    ),
    "repeated candidates skipped": (
        "    for index, token in enumerate(tokens):\n        proposed",
        "    for index, token in enumerate(tokens):\n"
        "        if token in tokens[:index]:\n            continue\n        proposed",
        lambda: tree_tests.test_a_repeated_candidate_is_tested_again(),
    ),
    "no law is left where rows are equal": (
        "if mass > SMALLEST_RESIDUAL else current",
        "if mass > SMALLEST_RESIDUAL else residual",
        lambda: tree_tests.test_equal_rows_leave_the_target_behind(),
    ),
    "target row of the parent": (
        "            target_probs[node],",
        "            target_probs[max(node - 1, 0)],",
        lambda: tree_tests.test_a_round_over_a_sampled_tree_has_the_targets_law(
            3, (2, 1), tree_tests.with_replacement_draws
        ),
    ),
    "walk goes on past a rejection": (
        "        if kept is None:\n            return tuple(path), remaining",
        "        if kept is None and not candidates:\n            return tuple(path), remaining\n"
        "        kept = kept or 0",
        lambda: tree_tests.test_a_round_over_a_sampled_tree_has_the_targets_law(
            3, (2, 1), tree_tests.with_replacement_draws
        ),
    ),
    "the drawn one's row keeps the others": (
        "rows[0, list(tokens[1:])] = 0.0",
        "rows[0, list(tokens[1:])] *= 0.5",
        lambda: tree_tests.test_random_pairs_give_the_target(0, tree_tests.drawn_first_draws),
    ),
    "the drawn one's row not normalised": (
        "    rows[0] /= rows[0].sum()\n",
        "",
        lambda: tree_tests.test_acceptance_of_the_four_token_pair(2, 0.9, 1.0, 0.6, 29 / 30),
    ),
    "a draw that matches nothing is not emitted": (
        "            return tuple(path), drawn",
        "            return tuple(path), int(target_tokens[0])",
        lambda: tree_tests.test_the_longest_match_may_lie_on_any_branch(),
    ),
    "the first child is always followed": (
        "[child for child in tree.candidates[node] if tree.tokens[child - 1] == drawn]",
        "list(tree.candidates[node])",
        lambda: tree_tests.test_matching_any_tree_gives_the_target([(0, 1), (0, 2), (1,)]),
    ),
    "the draw of the parent is used again": (
        "        node = agreeing[0]\n        path.append(node)",
        "        path.append(agreeing[0])\n        target_tokens[agreeing[0]] = drawn\n"
        "        node = agreeing[0]",
        lambda: tree_tests.test_the_longest_match_may_lie_on_any_branch(),
    ),
    "chains are not merged": (
        "child = self._children.get((parent, token))",
        "child = None",
        lambda: tree_tests.test_phrases_become_a_trie_with_the_first_chain_first(),
    ),
}


OF_SHAPES = ("chains are not merged",)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_walk_is_caught(monkeypatch, name):
    old, new, check = MUTANTS[name]
    module = tree if name in OF_SHAPES else tree_walks
    assert_caught(monkeypatch, module, old, new, check)
