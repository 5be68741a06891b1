"""The tests of sampled trees can fail: each known mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.sampling import adjust, candidates, cpu_sampler, noise, tree_judge

import tests.engines.sampling.test_candidates as tests
from tests.mutants import assert_caught

MUTANTS = {
    "<= for <": (
        candidates,
        "if judged.is_kept:\n                return child",
        "if probs.weight(token) == 0.0 == coin or judged.is_kept:\n                return child",
        "impossible",
    ),
    "the drawn one tested with the whole draft row": (
        candidates,
        "without(tree.draft_at(path), tokens[1:], self._draft)",
        "tree.draft_at(path)",
        "target",
    ),
    "the likeliest tested with the draft row": (
        candidates,
        "point_mass(token)\n                if index",
        "tree.draft_at(path)\n                if index",
        "other_tokens",
    ),
    "the likeliest chosen behind the draw": (
        candidates,
        "    left = without(probs, points, scratch)\n    return (left.draw(uniform), *points)",
        "    drawn = probs.draw(uniform)\n"
        "    points = likeliest(without(probs, (drawn,), scratch.copy()), count - 1, scratch)\n"
        "    left = without(probs, points, scratch)\n    return (drawn, *points)",
        "target",
    ),
    "a draw among the likeliest too": (
        candidates,
        "return (left.draw(uniform), *points)",
        "return tuple(dict.fromkeys((probs.draw(uniform), *points)))",
        "target",
    ),
    "candidates sorted by the target": (
        candidates,
        "children = tree.candidates[node]",
        "children = sorted(tree.candidates[node], key=lambda c: -probs.weight(tree.tokens[c - 1]))",
        "target",
    ),
    "one coin for all siblings": (
        candidates,
        "tree.coin(len(path), index)\n",
        "tree.coin(len(path), 0)\n",
        "addresses",
    ),
    "all nodes drafted with the root's numbers": (
        candidates,
        "Purpose.CANDIDATE, len(path), point.node, 0",
        "Purpose.CANDIDATE, len(path), 0, 0",
        "addresses",
    ),
    "coins are the numbers of the candidates": (
        candidates,
        "Purpose.CANDIDATE_COIN, depth",
        "Purpose.CANDIDATE, depth",
        "addresses",
    ),
    "noise of another round": (
        candidates,
        "round_start=start,\n",
        "round_start=0,\n",
        "addresses",
    ),
    "node left out of the address": (
        noise,
        "(group, position, round_start + 1, node)",
        "(group, position, round_start + 1, 0)",
        "numbers",
    ),
    "fifth sibling has the first one's number": (
        noise,
        "counter = (group, position",
        "counter = (0, position",
        "numbers",
    ),
    "residual not updated": (
        candidates,
        "            probs = judged.left\n",
        "",
        "acceptance",
    ),
    "what is left lies where the next is written": (
        candidates,
        "self._left, self._next = self._next, self._left",
        "pass",
        "three",
    ),
    "the likeliest are not taken out": (
        candidates,
        "left[list(tokens)] = 0.0",
        "left[list(tokens)] *= 0.5",
        "distinct_draws",
    ),
    "taken out of truncated laws by place": (
        candidates,
        "np.isin(probs.ids, tokens)",
        "np.isin(np.arange(len(probs.ids)), tokens)",
        "truncated",
    ),
    "drawing from nothing": (candidates, "if left.total() > 0.0 else points", "", "exhausted"),
    "the likeliest may be impossible": (
        candidates,
        "[token := int(left.argmax())] > 0.0",
        "[token := int(left.argmax())] > -1.0",
        "exhausted",
    ),
    "the last token is of the target": (
        candidates,
        "kept, probs, num_empty = self._test(tree, node, tokens, probs)",
        "kept, _, num_empty = self._test(tree, node, tokens, probs)",
        "other_tokens",
    ),
    "law of the parent": (
        candidates,
        "tree.draft_at(path), tokens[1:]",
        "tree.draft_at(path[:-1]), tokens[1:]",
        "deep",
    ),
    "target row of the parent": (
        candidates,
        "logits_at(logits[node], here",
        "logits_at(logits[max(node - 1, 0)], here",
        "deep",
    ),
    "penalties of the whole tree": (
        candidates,
        "here = replace(row, draft_tokens=path)",
        "here = row",
        "penalties",
    ),
    "penalties behind by one token": (
        adjust,
        "row.draft_tokens[:num_drafted]",
        "row.draft_tokens[: max(num_drafted - 1, 0)]",
        "penalties",
    ),
    "lenience left out": (candidates, "tree.lenience,", "1.0,", "lenient"),
    "log-probabilities of a tree by depth": (
        cpu_sampler,
        "if row.candidates is None else verdict.path",
        "",
        "logprobs",
    ),
    "trees matched after all": (
        tree_judge,
        "row.candidates is not None\n",
        "False\n",
        "acceptance",
    ),
}
KILLERS = {
    "impossible": tests.test_a_coin_of_zero_does_not_keep_an_impossible_candidate,
    "target": tests.test_the_four_token_pair_gives_the_target,
    "distinct_draws": lambda: tests.test_one_candidate_is_drawn_from_what_the_likeliest_leave(2),
    "acceptance": lambda: tests.test_no_candidates_of_a_node_are_kept_more_often(3, 2),
    "other_tokens": lambda: tests.test_a_target_of_other_tokens_keeps_its_law(2),
    "three": lambda: tests.test_a_target_of_other_tokens_keeps_its_law(3),
    "addresses": tests.test_every_candidate_and_coin_has_an_address_of_its_own,
    "numbers": tests.test_numbers_of_siblings_differ_in_every_part_of_their_address,
    "exhausted": lambda: tests.test_no_more_is_drawn_than_there_is([0.0, 0.0, 0.7, 0.3], 0),
    "truncated": lambda: tests.test_no_more_is_drawn_than_there_is([0.1, 0.2, 0.3, 0.4], 2),
    "penalties": tests.test_penalties_and_temperature_follow_each_nodes_own_path,
    "deep": tests.test_a_tree_gives_the_target,
    "logprobs": tests.test_logprobs_of_a_tree_are_those_of_its_nodes_and_not_of_their_depth,
    "lenient": tests.test_no_token_of_a_lenient_tree_exceeds_its_bound,
}
ERRORS = (AssertionError, IndexError, RuntimeWarning, KeyError)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_sampled_trees_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], ERRORS)
