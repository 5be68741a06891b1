"""The tests of drafts in a beam search can fail: each mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.runtime.oracle import beam_drafts

import tests.runtime.oracle.test_beam_drafts as tests
from tests.mutants import assert_caught

MUTANTS = {
    "a step without all rows": ("all(tokens in texts", "any(tokens in texts", "draft"),
    "the draft decides what lives": (
        "live = best_beams(live, target_row, num_beams)",
        "live = best_beams(live, target_row, num_beams + 1)",
        "draft",
    ),
    "the draft without its own sums": (
        "beams = best_beams(beams, draft_row, width)",
        "beams = best_beams(beams[:1], draft_row, width)",
        "saves",
    ),
    "the live beams' texts left out": (
        "texts = [tokens for tokens, _ in beams]",
        "texts = []",
        "draft",
    ),
    "sums begin anew": ("-(total + float(row[token]))", "-float(row[token])", "draft"),
    "ties by token": (
        "float(row[token])), rank, token)",
        "float(row[token])), token, rank)",
        "tied",
    ),
    "impossible continuations": ("if row[token] > -np.inf", "if True", "zeros"),
    "a step too few": ("num_steps < max_steps", "num_steps < max_steps - 1", "saves"),
}
KILLERS = {
    "draft": lambda: tests.test_a_draft_changes_nothing("random", "other"),
    "tied": lambda: tests.test_a_draft_changes_nothing("tied", "tied"),
    "zeros": lambda: tests.test_a_draft_changes_nothing("zeros", "other"),
    "saves": lambda: tests.test_a_draft_like_the_target_saves_passes(2, 2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(monkeypatch, name):
    old, new, killer = MUTANTS[name]
    errors = (AssertionError, ValueError, IndexError)
    assert_caught(monkeypatch, beam_drafts, old, new, KILLERS[killer], errors)
