"""The tests of beam search can fail: each mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.runtime.loop.beams import beam

import tests.runtime.loop.beams.test_beam as tests_of_beams
from tests.mutants import assert_caught

MUTANTS = {
    "a step too few ranked": (
        "return rules.num_beams + len(live) * len(rules.end_tokens)",
        "return rules.num_beams",
        "search",
    ),
    "every ending finishes": ("elif rank < width:", "else:", "ending"),
    "endings live on": (
        "not in rules.end_tokens:\n            live",
        "is not None:\n            live",
        "search",
    ),
    "the last step forgets the living": ("finished.extend(live)", "pass", "search"),
    "scores without length": (
        "log_prob / (length + self.num_forced) ** self.length_penalty",
        "log_prob",
        "search",
    ),
    "forced tokens have no length": ("(length + self.num_forced)", "length", "forced"),
    "too many kept": ("[: rules.num_beams])", ")", "search"),
    "bound by the present length": (
        "rules.max_tokens if rules.length_penalty > 0.0 else",
        "length if rules.length_penalty > 0.0 else",
        "search",
    ),
    "bound by the longest for short answers": (
        "rules.max_tokens if rules.length_penalty > 0.0 else",
        "rules.max_tokens if True else",
        "short",
    ),
    "an equal later one wins": (
        "by_score = sorted(finished,",
        "by_score = sorted(finished[::-1],",
        "equal",
    ),
    "an equal bound goes on": ("return bound <= worst", "return bound < worst - 1e9", "passes"),
    "always exhaustive": ("if rules.is_exhaustive:", "if True:", "present"),
    "never exhaustive": ("if rules.is_exhaustive:", "if False:", "present"),
    "early stops ignored": ("if rules.stops_early:", "if False:", "search"),
    "ties by token": ("(tokens, ranks, -sums)", "(ranks, tokens, -sums)", "ties"),
    "ties by rank alone": ("(tokens, ranks, -sums)", "(-tokens, ranks, -sums)", "ties"),
    "impossible continuations": ("[sums[order] > -np.inf]", "", "over"),
    "sums begin anew": ("one.log_prob + row", "row", "search"),
    "rows too short": ("self.num_beams + len(self.end_tokens)", "self.num_beams - 1", "search"),
}
KILLERS = {
    "search": lambda: tests_of_beams.test_the_search_is_the_independent_ones("random", 0),
    "ending": tests_of_beams.test_an_end_below_the_beams_is_not_finished,
    "equal": tests_of_beams.test_a_finished_hypothesis_is_beaten_only_by_more,
    "passes": tests_of_beams.test_a_settled_search_takes_no_further_pass,
    "short": tests_of_beams.test_where_short_answers_score_higher_the_next_token_may_still_win,
    "ties": tests_of_beams.test_of_equal_sums_the_higher_hypothesis_and_then_the_lower_token_ranks_first,
    "present": tests_of_beams.test_a_search_that_is_not_exhaustive_looks_at_the_present_length_only,
    "over": tests_of_beams.test_what_cannot_be_continued_is_over,
    "forced": lambda: tests_of_beams.test_forced_tokens_count_in_the_length_as_if_they_were_drawn(
        "random"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(monkeypatch, name):
    old, new, killer = MUTANTS[name]
    errors = (AssertionError, ValueError, IndexError)
    assert_caught(monkeypatch, beam, old, new, KILLERS[killer], errors)
