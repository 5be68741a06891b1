"""The tests of constraints can fail: each known mistake is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.runtime.core import request, scheduler, sequence
from outrider.runtime.core.errors import RequestError
from outrider.runtime.drafters.model import model, tree
from outrider.runtime.grammar import constraint
from outrider.runtime.loop import drafting, step, verification

import tests.runtime.core.test_scheduler as scheduler_tests
import tests.runtime.grammar.test_answers as answer_tests
import tests.runtime.grammar.test_constraint as form_tests
from tests.mutants import assert_caught


def answers_equal(drafter: str) -> None:
    answer_tests.check_answers(drafter, answer_tests.GREEDY, answer_tests.NO_DATASTORE)


KILLERS = {
    "masks_of_drafts": lambda: [
        form_tests.test_masks_are_those_of_a_fresh_form_after_any_drafts(text)
        for text in form_tests.GRAMMARS
    ],
    "followed_masks": form_tests.test_what_a_drafter_follows_is_what_its_draft_is_judged_by,
    "end_tokens": form_tests.test_an_end_token_in_a_draft_takes_nothing_of_the_text_back,
    "several_ends": form_tests.test_one_of_several_end_tokens_is_a_choice_and_not_forced,
    "whole_drafts": answer_tests.test_a_draft_that_follows_the_form_is_not_cut,
    "answers_of_model": lambda: answers_equal("model"),
    "answers_of_lookup": lambda: answers_equal("lookup"),
    "columns": form_tests.test_the_masks_of_a_trees_level_lie_in_the_columns_of_its_nodes,
    "tree_answers": answer_tests.test_trees_stand_behind_what_was_forced,
    "stop_strings": lambda: answer_tests.test_a_stop_string_ends_a_forced_run("ca", "ab"),
    "conflict": lambda: answer_tests.test_what_a_form_forces_against_the_request_is_a_conflict(
        {"bad_words": ((3, 2),)}
    ),
    "counted_apart": answer_tests.test_a_forced_run_takes_one_pass_and_is_told_apart,
    "planned": scheduler_tests.test_forced_tokens_are_fed_with_the_token_before_them,
    "drafts_cache": lambda: (
        answer_tests.test_no_rejected_draft_stays_in_the_drafts_cache_under_forced_tokens("model")
    ),
    "room": answer_tests.test_a_span_has_room_for_what_is_forced_and_drafted,
}

MUTATIONS = {
    "a draft is not rolled back": (
        constraint, "self._matcher.rollback(len(path) - num_common)", "pass", "masks_of_drafts",
    ),
    "a mask of another draft is kept": (
        constraint, "self._num_filled = min(self._num_filled, num_common + 1)", "pass", "masks_of_drafts",
    ),
    "masks are shifted by one": (
        constraint, "row = self._rows[place]", "row = self._rows[place - 1]", "masks_of_drafts",
    ),
    "an end token is consumed": (
        constraint, "if token in self._end_ids or not self._allows", "if not self._allows", "end_tokens",
    ),
    "one of several end tokens is forced": (
        constraint, "tuple(self._end_ids) if len(self._end_ids) == 1 else ()",
        "tuple(sorted(self._end_ids))[:1]", "several_ends",
    ),
    "what follows an end token is masked": (
        constraint, "self._rows[num_fitting + 1 : 1 + len(tokens)] = _ANY", "pass", "masks_of_drafts",
    ),
    "a drafter's masks stand still": (
        model,
        "row.constraint.follow(drafted)",
        "pass",
        "whole_drafts",
    ),
    "columns of a tree are mixed up": (
        tree, "masks[list(columns)] = rows", "masks[list(columns)] = rows[::-1]", "columns",
    ),
    "a draft is not judged by masks": (
        drafting, "else request.constraint.masks(draft.tokens, draft.parents)", "else None",
        "answers_of_lookup",
    ),
    "what was accepted is not committed": (
        request, "        constraint.commit(run)\n", "        constraint.commit(run[-1:])\n", "answers_of_model",
    ),
    "a rejected draft stays in the draft's cache under forced tokens": (
        request, "min(draft_computed, cache.num_computed)",
        "min(draft_computed, sequence.num_known - 1)", "drafts_cache",
    ),
    "what is forced is not committed": (
        request, "                constraint.commit(tokens)\n", "                pass\n", "counted_apart",
    ),
    "forced tokens are never fed": (
        verification, "behind_forced(span, request) if sequence.num_pending and tokens else span", "span",
        "answers_of_model",
    ),
    "a tree stands behind the first forced token": (
        verification, "*(num_pending + parent for parent in parents)", "*parents", "tree_answers",
    ),
    "a tree's path is kept in the wrong place": (
        step, "path = [num_pending + node for node in verdict.path]", "path = [*verdict.path]",
        "tree_answers",
    ),
    "forced tokens count as missing": (
        scheduler, "sequence.num_known - sequence.num_pending - num_fed != 1",
        "sequence.num_known - num_fed != 1", "planned",
    ),
    "a stop string leaves what is behind it": (
        sequence, "self.num_known -= num_tokens", "pass", "stop_strings",
    ),
    "a form forces what the request bans": (
        request, "if token in banned or", "if", "conflict",
    ),
    "forced tokens count as a pass's": (
        request, "self.stats.num_forced += len(forced)", "pass", "counted_apart",
    ),
    "a tree takes the place of forced tokens": (
        drafting, "max_nodes = max_nodes and max(0, max_nodes - request.sequence.num_pending)", "pass",
        "tree_answers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_with_forms_is_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, killer = MUTATIONS[mutation]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], (AssertionError, RequestError))
