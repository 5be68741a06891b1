"""The tests of token masks can fail: each mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.sampling import adjust, block_judge, candidates, cpu_sampler, tree_judge
from outrider.runtime.oracle import sampling

import tests.engines.sampling.masks.test_laws as tests
from tests.mutants import assert_caught

AT = "masks[num_drafted if node is None else node]"
MUTANTS = {
    "mask of the position before": (adjust, AT, "masks[max(num_drafted - 1, 0)]", "chains"),
    "mask of the position after": (
        adjust,
        AT,
        "masks[min(num_drafted + 1, len(masks) - 1)]",
        "chains",
    ),
    "mask of the root everywhere": (adjust, AT, "masks[0]", "chains"),
    "mask by depth instead of node": (adjust, AT, "masks[num_drafted]", "trees"),
    "mask of another node": (
        candidates,
        "len(path), node=node)",
        "len(path), node=max(node - 1, 0))",
        "trees",
    ),
    "children by depth instead of column": (
        candidates,
        "len(path), node=point.column)",
        "len(path))",
        "columns",
    ),
    "mask of another node of a matched tree": (
        tree_judge,
        "masks[self.node : self.node + 1]",
        "masks[len(self.path) : len(self.path) + 1]",
        "matched trees",
    ),
    "mask after the truncation": (
        adjust,
        "        ids = truncation.ranked_greatest(logits, params.top_k)\n",
        "        ids = truncation.ranked_greatest(np.nan_to_num(logits, neginf=1.0), params.top_k)\n",
        "truncated",
    ),
    "no mask beside processors": (
        adjust,
        "    if mask is None:\n        processed =",
        "    if True:\n        processed =",
        "chains",
    ),
    "no mask without processors": (
        adjust,
        "        if mask is None:\n            return logits\n",
        "        if True:\n            return logits\n",
        "chains",
    ),
    "q unmasked in the residual": (
        cpu_sampler,
        "logits_at(logits, row, num_drafted), row.params, kept.rows[num_drafted]\n        )\n",
        "logits_at(logits, row, num_drafted), row.params, kept.rows[num_drafted]\n        )\n"
        "        drawn = probs and probs.draw(self._uniform(row, Purpose.DRAFT, position))\n"
        "        if drawn is not None:\n"
        "            kept.keep(num_drafted, adjusted_token_probs(logits, row.params, "
        "kept.rows[num_drafted]))\n"
        "            return drawn\n",
        "ratio",
    ),
    "masked rows drafted whole": (
        cpu_sampler,
        "if self._is_compiled and row.params.is_dense and row.masks is None:",
        "if self._is_compiled and row.params.is_dense:",
        "chains",
    ),
    "masked rows judged whole": (
        cpu_sampler,
        "is_compiled = self._is_compiled and row.params.is_dense and row.masks is None",
        "is_compiled = self._is_compiled and row.params.is_dense",
        "chains",
    ),
    "the end banned under a mask that leaves no other": (
        adjust,
        "        if mask is None:\n            processed[ends]",
        "        if True:\n            processed[ends]",
        "ends",
    ),
    "a conflict behind a token that may be rejected ends the block": (
        block_judge,
        "            if not draft.is_finite_at(index):\n",
        "            if index > 0:\n                return Verdict(num_accepted=0, next_token=None, "
        "has_conflict=True)\n            if not draft.is_finite_at(index):\n",
        "block conflicts",
    ),
    "the run before a conflict is kept by its weight alone": (
        block_judge,
        "            self.excesses.append(self.last)\n        self.of_runs",
        "            self.excesses.append(1.0)\n        self.of_runs",
        "block conflicts",
    ),
    "conflicts are rows that are not finite": (
        cpu_sampler,
        "has_conflict=greatest_token(logits) is not None",
        "has_conflict=False",
        "plain conflicts",
    ),
    "rows that are not finite are conflicts": (
        cpu_sampler,
        "has_conflict=greatest_token(logits) is not None",
        "has_conflict=True",
        "plain conflicts",
    ),
    "oracle: bits from the other end": (
        sampling,
        ">> token % 32 & 1",
        ">> (31 - token % 32) & 1",
        "ratio",
    ),
    "oracle: the end banned all the same": (
        sampling,
        "scores = unended if has_others or mask is None else scores",
        "scores = unended",
        "oracle's ends",
    ),
}
KILLERS = {
    "chains": tests.check_chains,
    "trees": lambda: tests.check_trees(tests.MAX_ACCEPT),
    "matched trees": lambda: tests.check_trees("point masses"),
    "columns": tests.test_children_are_drawn_under_the_mask_of_their_column,
    "truncated": lambda: tests.test_a_mask_comes_before_everything_else({"top_k": 2}),
    "ratio": lambda: tests.test_a_mask_comes_before_everything_else({"temperature": 0.5}),
    "ends": lambda: tests.test_an_end_that_the_mask_leaves_alone_is_not_banned(
        tests.process_logits
    ),
    "oracle's ends": lambda: tests.test_an_end_that_the_mask_leaves_alone_is_not_banned(
        tests.processed_scores
    ),
    "block conflicts": lambda: tests.test_a_conflict_has_the_chance_of_plain_decoding(True),
    "plain conflicts": lambda: tests.test_a_conflict_is_told_from_logits_that_are_not_finite(
        "plain"
    ),
}
ERRORS = (AssertionError, IndexError, RuntimeWarning, ValueError)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_masks_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], ERRORS)
