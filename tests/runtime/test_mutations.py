"""The tests of steps and requests can fail: each known mistake is caught by a named test.

A mutant is one function's source with one place changed, compiled in the module's own namespace and put in the real
one's place; the named test must then fail.
"""

from __future__ import annotations

import inspect
import textwrap

import pytest

import tests.drafters.test_model as model_tests
import tests.runtime.test_step as step_tests
from engines import scripted
from engines.base import EngineError
from runtime import step
from runtime.core import request
from runtime.core.params import FinishReason
from runtime.drafters import model


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
        step_tests.test_a_failing_verification_spares_rows_that_still_prefill
    ),
}

# What is mutated (module, class or None, function), the change, and the test that fails.
MUTANTS = {
    "target rollback keeps one token too many": (
        (request, "Request", "commit"),
        "self.num_computed = self.num_known - 1",
        "self.num_computed = self.num_known",
        "the_worked_example",
    ),
    "target rollback forgets one token too many": (
        (request, "Request", "commit"),
        "self.num_computed = self.num_known - 1",
        "self.num_computed = self.num_known - 2",
        "the_worked_example",
    ),
    "verification starts one token late": (
        (step, None, "_on_host"),
        "[request.num_computed for request in live]",
        "[request.num_computed + (request.num_output > 0) for request in live]",
        "seeded_answers_in_any_batch",
    ),
    "verification starts one token early": (
        (step, None, "_on_host"),
        "[request.num_computed for request in live]",
        "[request.num_computed - (request.num_output > 0) for request in live]",
        "seeded_answers_in_any_batch",
    ),
    "draft rollback keeps one token too many": (
        (request, "Request", "commit_draft_cache"),
        "min(num_computed, self.num_known - 1)",
        "min(num_computed, self.num_known)",
        "the_worked_example",
    ),
    "draft rollback does not happen": (
        (request, "Request", "commit_draft_cache"),
        "min(num_computed, self.num_known - 1)",
        "num_computed",
        "the_worked_example",
    ),
    "draft rollback forgets one token too many": (
        (request, "Request", "commit_draft_cache"),
        "min(num_computed, self.num_known - 1)",
        "max(0, min(num_computed, self.num_known - 1) - 1)",
        "the_draft_never_falls_behind",
    ),
    "the draft's last token counts as cached": (
        (model, "ModelDrafter", "_draft_in_lockstep"),
        "computed[slot] += len(fed[slot])",
        "computed[slot] += len(fed[slot]) + (len(drafted[slot]) + 1 == gammas[slot])",
        "rows_in_lockstep",
    ),
    "the bonus token follows an accepted end token": (
        (request, "Request", "_cut"),
        "if is_end or",
        "if (is_end and num_kept == len(run)) or",
        "a_run_is_cut",
    ),
    "tokens follow a stop string": (
        (request, "Request", "_cut"),
        "if isinstance(shown, StopMatch) and not is_end:",
        "if isinstance(shown, StopMatch) and not is_end and num_kept == len(run):",
        "a_run_is_cut",
    ),
    "one token more than max_tokens": (
        (request, "Request", "_cut"),
        "self.num_output + num_kept >= self.max_output",
        "self.num_output + num_kept > self.max_output",
        "the_answer_ends_at_the_limit",
    ),
    "drafting goes on after an end token": (
        (model, "ModelDrafter", "_draft_in_lockstep"),
        "and not is_end",
        "",
        "drafting_stops_after_an_end_token",
    ),
    "a failed verification ends rows that prefill": (
        (step, None, "_fail"),
        "if gamma is None:",
        "if False:",
        "a_failing_verification_spares",
    ),
    "a lost cache is taken for valid": (
        (request, "Request", "lose_cache"),
        "self.num_computed = 0",
        "pass",
        "a_failing_verification_spares",
    ),
}


def mutate(
    monkeypatch: pytest.MonkeyPatch, place: tuple[object, str | None, str], old: str, new: str
) -> None:
    module, owner_name, name = place
    owner = getattr(module, owner_name) if owner_name else module
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"the mutation must hit one place: {old}"
    namespace = dict(vars(module))
    exec(compile(source.replace(old, new), f"mutant of {name}", "exec"), namespace)
    monkeypatch.setattr(owner, name, namespace[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_step_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place, old, new, killer = MUTANTS[name]
    KILLERS[killer]()
    mutate(monkeypatch, place, old, new)
    # A mutant of run_step is reached through the worker, which imported it by name.
    if place[2] == "run_step":
        monkeypatch.setattr("runtime.worker.run_step", step.run_step)
    with pytest.raises((AssertionError, EngineError)):
        KILLERS[killer]()


def test_the_mechanism_runs_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change without meaning kills nothing: what the others catch is the change itself."""
    place = (scripted, "ScriptedEngine", "move_slot")
    mutate(monkeypatch, place, "self._slots[destination] =", "self._slots[ destination ] =")
    step_tests.test_a_seed_gives_the_same_answer_in_any_batch("model")
