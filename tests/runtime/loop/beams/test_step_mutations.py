"""The tests of served beam searches can fail: each known mistake is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.base import EngineError
from outrider.engines.sampling import continuations
from outrider.runtime.core import scheduler
from outrider.runtime.core.lifecycle import IllegalTransition
from outrider.runtime.loop import rows
from outrider.runtime.loop.beams import cache as beam_cache
from outrider.runtime.loop.beams import search
from outrider.runtime.loop.beams import step as beams

import tests.runtime.core.test_scheduler as scheduler_tests
import tests.runtime.loop.beams.test_cache as cache_tests
import tests.runtime.loop.beams.test_step as beam_tests
from tests.engines.sampling import test_continuations as row_tests
from tests.mutants import assert_caught


def crowded() -> None:
    beam_tests.test_searches_and_drawn_answers_share_a_server_and_change_nothing_of_each_other()


KILLERS = {
    "crowded": crowded,
    "moves": beam_tests.test_a_search_is_told_from_its_neighbours_when_rows_move,
    "text": beam_tests.test_the_best_results_come_with_text_scores_and_counts,
    "finite": beam_tests.test_a_row_that_is_not_finite_ends_its_search_alone,
    "target": (beam_tests.test_a_target_that_fails_once_changes_no_answer),
    "copies": cache_tests.test_children_of_one_parent_copy_it_and_feed_one_token_each,
    "kept": cache_tests.test_what_was_fed_and_not_kept_is_used_where_it_fits,
    "between": cache_tests.test_slots_between_those_fed_keep_what_they_hold,
    "arrears": cache_tests.test_arrears_longer_than_a_span_are_fed_in_pieces,
    "texts": lambda: cache_tests.test_any_texts_in_any_order_have_their_own_rows(0),
    "queue": scheduler_tests.test_nobody_overtakes_a_request_that_waits_for_several_slots,
    "min_tokens": beam_tests.test_end_tokens_are_not_searched_before_min_tokens,
    "rows": row_tests.test_they_are_ranked_with_ties_by_the_lower_token,
}
MUTANTS = {
    "a copy over what is wanted": (
        beam_cache,
        "range(len(self.slots)) if member not in taken)",
        "range(len(self.slots)))",
        "texts",
    ),
    "a copy where none is needed": (
        beam_cache,
        "(shared[m], m not in taken, -m)",
        "(m not in taken, shared[m], -m)",
        "copies",
    ),
    "a copy that nobody notes": (
        beam_cache,
        "self.note_fed(members[index], length, self._held[source].tail)",
        "pass",
        "copies",
    ),
    "what differs is taken for shared": (
        beam_cache,
        "if held.tail[:high] == tail[:high]:",
        "if True:",
        "texts",
    ),
    "a row that is wanted again is not fed": (
        beam_cache,
        "num_shared = min(num_shared, len(self._prompt) + len(tail) - 1)",
        "num_shared += 0",
        "kept",
    ),
    "arrears with the rest": (
        beam_cache,
        "tokens[:-1][: engine.limits.max_extend]",
        "tokens",
        "arrears",
    ),
    "slots between are cut": (
        beam_cache,
        "start=held[slot], tokens=()",
        "start=0, tokens=()",
        "between",
    ),
    "a row that is not finite is no row": (
        continuations,
        "if not math.isfinite(float(logits.max())):",
        "if False:",
        "finite",
    ),
    "prompts that were lost are taken for fed": (
        beams,
        "one.request.lose_cache()",
        "pass",
        "target",
    ),
    "rows move without what they hold": (
        search,
        "self.cache.move(member, destination)",
        "pass",
        "moves",
    ),
    "rows move and nobody notes": (
        search,
        "self.slots[member] = destination",
        "pass",
        "moves",
    ),
    "the end token is shown": (
        search,
        "shown = tokens[:-1] if is_stopped and not spec.include_stop else tokens",
        "shown = tokens",
        "text",
    ),
    "engines forget what searches hold": (rows, "rows[slot] = length", "pass", "crowded"),
    "whoever fits overtakes": (
        scheduler,
        "break\n        num_free",
        "num_admitted += 1; continue\n        num_free",
        "queue",
    ),
    "bans are not read": (
        continuations,
        "process_logits(logits, params, history, num_prompt)",
        "logits",
        "min_tokens",
    ),
    "a row's own norm is left out": (continuations, " - log_norm(logits)", "", "rows"),
}
ERRORS = (AssertionError, EngineError, IllegalTransition, IndexError, KeyError, TypeError)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], ERRORS)
