"""The tests of sources can fail: each known mistake is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.base import EngineError
from outrider.runtime.core import request, scheduler, sequence
from outrider.runtime.drafters.model import model
from outrider.runtime.loop import prefill, rows
from outrider.runtime.loop.beams import cache

import tests.runtime.core.test_request as request_tests
import tests.runtime.loop.sources.test_failures as failure_tests
import tests.runtime.loop.sources.test_requests as source_tests
import tests.runtime.loop.sources.test_searches as search_tests
from tests.mutants import assert_caught

KILLERS = {
    "penalties": source_tests.test_penalties_see_the_decoders_text_alone,
    "prefixes": source_tests.test_a_forced_prefix_is_never_sampled_and_never_told,
    "usage": source_tests.test_a_source_is_told_as_the_prompt_and_the_prefix_nowhere,
    "slot_reuse": source_tests.test_answers_in_random_slot_reuse_are_those_of_requests_alone,
    "every_slot": search_tests.test_every_slot_of_a_search_has_its_source,
    "searches_that_end": search_tests.test_searches_that_end_move_others_with_their_sources,
    "alike": lambda: [
        source_tests.test_sources_alike_are_read_by_the_draft_model_in_one_call(length)
        for length in (1, 4)
    ],
    "one_read_a_step": source_tests.test_a_stream_waits_for_one_read_a_step_and_sources_alike_share_it,
    "a_failing_read": lambda: (
        failure_tests.test_a_source_that_cannot_be_read_ends_its_request_alone(1)
    ),
    "a_failing_draft": lambda: (
        failure_tests.test_a_draft_model_that_fails_has_the_source_to_read_again("read", 0)
    ),
    "the_text": request_tests.test_the_sampler_sees_the_decoders_text_and_drafters_the_source_before_it,
}

# What is mutated, the change, and the test that fails.
MUTANTS = {
    "the source counts in penalties": (
        request,
        "history=sequence.tokens[: sequence.num_known],",
        "history=sequence.text,",
        "penalties",
    ),
    "the prefix counts as output": (
        request,
        "num_prompt=sequence.num_prompt,",
        "num_prompt=0,",
        "penalties",
    ),
    "the prefix stands in the text twice": (
        request,
        "        self.spec = spec\n",
        "        spec = self.spec = replace(spec, prompt_tokens=spec.prompt_tokens * 2)\n",
        "prefixes",
    ),
    "a forced token is sampled": (
        scheduler,
        "is_unread or sequence.num_known - sequence.num_pending - num_fed != 1",
        "is_unread or sequence.num_known - sequence.num_pending - num_fed not in (1, 2)",
        "prefixes",
    ),
    "what parts source and answer is left out": (
        sequence,
        "(*spec.source_tokens, SEPARATOR) if",
        "(*spec.source_tokens,) if",
        "the_text",
    ),
    "a draft model's source stays behind where its row moves": (
        rows,
        "length > 0 or (length == 0 and engine.limits.max_source)",
        "length > 0",
        "slot_reuse",
    ),
    "a short source is taken for read": (
        model,
        "return computed[slot] >= 0 and num_missing",
        "return num_missing",
        "alike",
    ),
    "a draft model reads its neighbour's source": (
        model,
        "tokens=live[slot].source) for slot in slots",
        "tokens=live[slots[0]].source) for slot in slots",
        "alike",
    ),
    "a row decodes before its source is read": (
        scheduler,
        "is_unread = row.cache.num_unread and slot not in read",
        "is_unread = False",
        "one_read_a_step",
    ),
    "sources of any length are read together": (
        scheduler,
        "most_tokens=limits.read_tokens,",
        "most_tokens=10**6,",
        "one_read_a_step",
    ),
    "a failed read is committed": (
        prefill,
        "failed = bisect_failures(requests, self._read_again)",
        "failed = [(0, 0.0)], []; [one.commit_read() for one in requests]",
        "a_failing_read",
    ),
    "a draft model's lost source is taken for read": (
        request,
        "self.cache.draft_computed = -1 if self.spec.source_tokens else 0",
        "self.cache.draft_computed = 0",
        "a_failing_draft",
    ),
    "a search's other slots do not get the source": (
        cache,
        "self.engine.share_source(first, others)",
        "self.engine.share_source(first, others[:1])",
        "every_slot",
    ),
    "a search's slot moves without its source": (
        cache,
        "if length or self.engine.limits.max_source:",
        "if length:",
        "searches_that_end",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_with_sources_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], (AssertionError, EngineError))
