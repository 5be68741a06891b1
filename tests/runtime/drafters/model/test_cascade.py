"""A cascade drafts what the draft model alone would have drafted, in fewer of its passes."""

from __future__ import annotations

import pytest
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Progressed, StepTrace
from outrider.runtime.drafters.model import cascade
from outrider.runtime.drafters.model.cascade import CascadeDrafter

from tests.mutants import assert_caught
from tests.runtime.markov import Harness

INNER = ("lookup", "suffix", "phrases")
PROMPT = (0, 1, 2, 3, 0, 1, 2, 3, 1)


def traces(harness: Harness, name: str) -> list[StepTrace]:
    return [event.trace for event in harness.events[name] if isinstance(event, Progressed)]


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("inner", INNER)
def test_a_cascade_drafts_the_draft_models_own_chain(
    inner: str, temperature: float, mode: ExactnessMode
) -> None:
    """The inner scheme is exact with respect to q: same noise, same tokens, same rows kept.

    In max_accept the target judges by ratio against the rows that were kept while drafting, so a
    draft drawn otherwise, or a row kept for another position, would show in what is accepted.
    """
    drafting = DraftingConfig(min_prob=0.02, suffix_factor=4.0)
    found, num_extends = [], []
    for name in ("model", f"model/{inner}"):
        harness = Harness("F4", drafting=drafting)
        for request in range(3):
            harness.submit(
                str(request), PROMPT[request:], max_tokens=40, drafter=name, gamma=5,
                temperature=temperature, mode=mode, seed=request,
            )  # fmt: skip
        harness.run()
        found.append([traces(harness, str(request)) for request in range(3)])
        num_extends.append(harness.draft.num_extends)
    assert isinstance(harness.worker._parts.drafters[name], CascadeDrafter)
    assert num_extends[1] < num_extends[0], "no guess was ever right"
    assert found[0] == found[1]
    assert sum(trace.num_accepted for trace in found[0][0]) > 0


def test_a_guess_leaves_room_for_the_draw_behind_it() -> None:
    harness = Harness("F3")
    harness.submit("a", [*range(10), 0, 1, 2], max_tokens=9, drafter="model/lookup", gamma=3)
    harness.run()
    assert max(len(trace.draft_tokens) for trace in traces(harness, "a")) == 3
    assert harness.tokens("a") == [3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize(
    ("source", "replacement"),
    [
        # The mismatching draw is thrown away and drawn again in the next pass (T22's mistake).
        ("                drafted[slot].append(token)\n",
         "                is_match = guesses[slot][column : column + 1] == (token,)\n"
         "                is_last = column == len(guesses[slot])\n"
         "                drafted[slot].append(token if is_match or is_last else guesses[slot][column])\n"),
        # Every draw from the first column: rows kept for other positions than their tokens'.
        ("logits[:, column:]", "logits[:, :]"),
        # The cache pointer counts guesses that the draft model did not say.
        ("computed[slot] += len(fed) + num_matched[slot]",
         "computed[slot] += len(fed) + len(guesses[slot])"),
    ],
    ids=["keeps the guess at a mismatch", "draws from the wrong row", "pointer beyond the match"],
)  # fmt: skip
def test_mistakes_of_a_cascade_are_caught(
    source: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chain() -> None:
        test_a_cascade_drafts_the_draft_models_own_chain("suffix", 0.7, ExactnessMode.MAX_ACCEPT)

    assert_caught(monkeypatch, cascade, source, replacement, chain)
