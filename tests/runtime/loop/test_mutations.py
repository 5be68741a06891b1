"""The tests of steps and requests can fail: each known mistake is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.base import EngineError
from outrider.engines.reference import token_slots
from outrider.runtime.core import params, request, scheduler, sequence
from outrider.runtime.core.events import FinishReason
from outrider.runtime.drafters.model import model
from outrider.runtime.loop import prefill as prompts
from outrider.runtime.loop import step, verification

import tests.runtime.drafters.model.test_model as model_tests
import tests.runtime.loop.samples.test_requests as sample_tests
import tests.runtime.loop.test_first_tokens as first_token_tests
import tests.runtime.loop.test_step as step_tests
from tests.mutants import assert_caught, put_in


def cut_tests() -> None:
    for options, reason in (
        ({"end_tokens": (8,)}, FinishReason.STOP_TOKEN),
        ({"stop_strings": ("ij",)}, FinishReason.STOP_STRING),
        ({"max_tokens": 2}, FinishReason.LENGTH),
    ):
        step_tests.test_a_run_is_cut_where_plain_decoding_stops(8, options, reason)


KILLERS = {
    "the_worked_example": step_tests.test_pointers_follow_the_worked_example,
    "the_draft_never_falls_behind": (
        step_tests.test_the_draft_cache_never_falls_behind_in_a_long_run
    ),
    "seeded_answers_in_any_batch": lambda: (
        step_tests.test_a_seed_gives_the_same_answer_in_any_batch("model")
    ),
    "a_run_is_cut": cut_tests,
    "the_answer_ends_at_the_limit": step_tests.test_the_answer_ends_at_the_context_limit,
    "drafting_stops_after_an_end_token": step_tests.test_drafting_stops_after_an_end_token,
    "rows_in_lockstep": model_tests.test_rows_draft_in_lockstep_and_drop_out,
    "a_failing_verification_spares": (
        step_tests.test_a_failing_verification_has_rows_that_still_prefill_begin_anew
    ),
}

KILLERS |= {
    "first_tokens_equal": lambda: first_token_tests.test_answers_are_those_of_steps_of_their_own(
        first_token_tests.LAWS["sampled"], first_token_tests.STABLE, first_token_tests.CHUNKS[1]
    ),
    "first_tokens_beside_a_stream": (
        first_token_tests.test_a_row_takes_no_part_in_decoding_in_the_step_of_its_first_token
    ),
    "first_tokens_in_front": (
        first_token_tests.test_a_row_in_front_of_rows_that_decode_keeps_all_that_was_read
    ),
    "prompts_are_read_again": first_token_tests.test_a_failing_verification_has_the_prompt_read_again,
    "figures_without_first_tokens": first_token_tests.test_figures_leave_first_tokens_out,
    "calls_of_an_answer": lambda: (
        first_token_tests.test_an_answer_costs_a_call_per_chunk_and_one_per_token_behind_the_first(
            4, 6
        )
    ),
}

KILLERS |= {
    "samples_asked_alone": lambda: sample_tests.test_each_is_the_answer_of_its_own_seed_asked_alone(
        "sampled", 15, "model", False
    ),
    "samples_asked_alone_late": (
        sample_tests.test_a_prompt_is_copied_to_the_draft_no_sooner_than_it_would_be_fed
    ),
    "samples_read_once": lambda: sample_tests.test_both_models_read_the_prompt_once(4, 16, True),
    "samples_that_are_left": lambda: sample_tests.test_those_that_are_left_go_on((0,), 2),
    "samples_of_a_failing_step": lambda: (
        sample_tests.test_a_failing_step_behind_a_read_spares_the_group(0)
    ),
}

# What is mutated, the change, and the test that fails.
MUTANTS = {
    "target rollback keeps one token too many": (
        request,
        "cache.num_computed = sequence.num_known - 1",
        "cache.num_computed = sequence.num_known",
        "the_worked_example",
    ),
    "target rollback forgets one token too many": (
        request,
        "cache.num_computed = sequence.num_known - 1",
        "cache.num_computed = sequence.num_known - 2",
        "the_worked_example",
    ),
    "verification starts one token late": (
        verification,
        "start=request.cache.num_computed,",
        "start=request.cache.num_computed + (request.sequence.num_output > 0),",
        "seeded_answers_in_any_batch",
    ),
    "verification starts one token early": (
        verification,
        "start=request.cache.num_computed,",
        "start=request.cache.num_computed - (request.sequence.num_output > 0),",
        "seeded_answers_in_any_batch",
    ),
    "draft rollback keeps one token too many": (
        request,
        "min(draft_computed, cache.num_computed)",
        "min(draft_computed, cache.num_computed + 1)",
        "the_worked_example",
    ),
    "draft rollback does not happen": (
        request,
        "min(draft_computed, cache.num_computed)",
        "draft_computed",
        "the_worked_example",
    ),
    "draft rollback forgets one token too many": (
        request,
        "min(draft_computed, cache.num_computed)",
        "max(0, min(draft_computed, cache.num_computed) - 1)",
        "the_draft_never_falls_behind",
    ),
    "the draft's last token counts as cached": (
        model,
        "computed[slot] += len(fed[slot])",
        "computed[slot] += len(fed[slot]) + (len(drafted[slot]) + 1 == gammas[slot])",
        "rows_in_lockstep",
    ),
    "the bonus token follows an accepted end token": (
        sequence,
        "token in ends or",
        "(token in ends and end - start == len(run)) or",
        "a_run_is_cut",
    ),
    "tokens follow a stop string": (
        request,
        "return text, num_kept, Ending(",
        "return text, len(run), Ending(",
        "a_run_is_cut",
    ),
    "one token more than max_tokens": (
        sequence,
        "or end == len(cells)",
        "",
        "the_answer_ends_at_the_limit",
    ),
    "drafting goes on after an end token": (
        model,
        "if len(drafted) >= most or token in row.sampling.params.end_token_ids:",
        "if len(drafted) >= most:",
        "drafting_stops_after_an_end_token",
    ),
    "a failed verification ends rows that prefill": (
        verification,
        "if gamma is None:",
        "if False:",
        "a_failing_verification_spares",
    ),
    "a prompt's last token is fed in a call of its own": (
        scheduler,
        "missing + limits.answers_prompts",
        "missing",
        "calls_of_an_answer",
    ),
    "a first token is drawn from another row's logits": (
        prompts,
        "                index=index,\n",
        "                index=0,\n",
        "first_tokens_equal",
    ),
    "a first token is looked for at its slot": (
        prompts,
        "                index=index,\n",
        "                index=request.slot,\n",
        "first_tokens_beside_a_stream",
    ),
    "the chunk of a prompt is not counted as computed": (
        prompts,
        "        for request, end in ends:\n            request.commit_prefill(end)\n        return [(row.slot",
        "        return [(row.slot",
        "first_tokens_in_front",
    ),
    "a first token is committed though its step failed": (
        step,
        "() if done.was_recovered else fed.first_verdicts",
        "fed.first_verdicts",
        "prompts_are_read_again",
    ),
    "a first token counts as a pass": (
        request,
        "is_prompt = self.state is State.PREFILLING",
        "is_prompt = self.state is State.PREFILLING and self.transition(RequestEvent.PROMPT_COMPUTED)",
        "figures_without_first_tokens",
    ),
    "a lost cache is taken for valid": (
        request,
        "in (State.READING, State.PREFILLING)\n        self.cache.num_computed = 0",
        "in (State.READING, State.PREFILLING)",
        "a_failing_verification_spares",
    ),
    "only a leader is judged": (
        prompts,
        "(leader, *leader.group.followers)",
        "(leader,)",
        "samples_asked_alone",
    ),
    "a copy lacks the last token": (
        prompts,
        "move_slot(leader.slot, follower.slot, end)",
        "move_slot(leader.slot, follower.slot, end - 1)",
        "samples_asked_alone",
    ),
    "all completions have one seed": (
        params,
        "seed=sample_seed(self.seed, index)",
        "seed=self.seed",
        "samples_asked_alone",
    ),
    "who waits is fed": (
        scheduler,
        "        and row.group.leader is None\n        and (missing",
        "        and (missing",
        "samples_read_once",
    ),
    "a draft's prompt is fed to each": (
        model,
        "and computed[slot] < live[slot].sampling.num_prompt",
        "and False",
        "samples_read_once",
    ),
    "a draft's copy has tokens of another completion": (
        model,
        "min(computed[leader], row.sampling.num_prompt)",
        "computed[leader]",
        "samples_asked_alone",
    ),
    "a draft's copy comes before a row's own time": (
        model,
        "if not row.is_adaptive:",
        "if False:",
        "samples_asked_alone_late",
    ),
    "nobody reads for those that are left": (
        request,
        "heir.lead(left)",
        "self.lead(left)",
        "samples_that_are_left",
    ),
    "who waits does not decode with its leader": (
        scheduler,
        "gamma if row.group.leader is None else gammas[rows.index(row.group.leader)]",
        "gamma",
        "samples_of_a_failing_step",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_step_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], (AssertionError, EngineError))


def test_the_mechanism_runs_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change without meaning kills nothing: what the others catch is the change itself."""
    put_in(monkeypatch, token_slots, "self._slots[destination] =", "self._slots[ destination ] =")
    step_tests.test_a_seed_gives_the_same_answer_in_any_batch("model")
