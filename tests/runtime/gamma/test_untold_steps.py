"""What steps with drafts tell of what was asked for, proposed and kept."""

from __future__ import annotations

from collections.abc import Sequence

import outrider.runtime.gamma.untold_steps
import pytest
from outrider.engines.sampling.base import Verdict
from outrider.runtime.drafters.base import Draft
from outrider.runtime.gamma.acceptance import Round
from outrider.runtime.gamma.decision import StepKind, Taken
from outrider.runtime.gamma.untold_steps import UntoldSteps

from tests.mutants import assert_caught

DRAFTS = (
    Draft(tokens=(5, 6), num_computed=9),
    Draft(tokens=(7, 8, 9)),
    Draft(tokens=()),
    Draft(tokens=(), num_computed=40),
    None,
    Draft(tokens=()),
)
"""Of the draft model, of another, of neither, of a draft model that catches up, of nobody, and not asked for."""
GAMMAS = (4, 3, 4, 4, None, 0)


class Told:
    """Takes the place of the controller and of the rows' evidence."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.steps: list[Taken] = []

    def add(self, rounds: Sequence[Round]) -> None:
        self.rounds += rounds

    def observe_all(self, steps: Sequence[Taken]) -> None:
        self.steps += steps


def told(*, prices_proposed: bool) -> Told:
    one, steps = Told(), UntoldSteps(prices_proposed=prices_proposed)
    verdicts = {0: 1, 1: 3, 2: 0, 3: 0, 5: 0}
    judged = [(slot, Verdict(num_accepted=kept, next_token=1)) for slot, kept in verdicts.items()]
    steps.add(0.25, StepKind.GAIN, False, GAMMAS, DRAFTS, judged)
    steps.tell(one, one)  # type: ignore[arg-type]
    return one


def test_what_was_asked_for_and_not_proposed_is_told() -> None:
    one = told(prices_proposed=True)
    assert one.rounds == [Round(0, 4, 2, 2, 1), Round(1, 3, 3, 0, 3), Round(2, 4, 0, 0, 0)]
    (step,) = one.steps
    assert (step.longest, step.num_emitted, step.num_rows) == (3, 9, 5)
    assert step.drafted == ((0, 2, 2), (1, 3, 0))


def test_where_a_step_costs_its_longest_draft_each_is_as_long_as_asked() -> None:
    one = told(prices_proposed=False)
    assert one.rounds == [Round(0, 2, 2, 2, 1), Round(1, 3, 3, 0, 3)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("asked = max(asked, depth)", "asked = depth"),
        ("0 if draft.num_computed is None else depth", "depth"),
        ("elif asked and draft.num_computed is None:", "elif asked:"),
        ("if self._prices_proposed else 0", ""),
    ],
)
def test_a_mistake_in_what_is_told_is_caught(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    def killer() -> None:
        test_what_was_asked_for_and_not_proposed_is_told()
        test_where_a_step_costs_its_longest_draft_each_is_as_long_as_asked()

    assert_caught(monkeypatch, outrider.runtime.gamma.untold_steps, old, new, killer)
