"""Probes come often where drafts gain little, or are not known to, and rarely where they are proven."""

from __future__ import annotations

import itertools

import pytest
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.forecast import Settings
from outrider.runtime.gamma.pace import Pace
from outrider.runtime.gamma.probes import UNKNOWN, UNPROVEN
from outrider.runtime.gamma.trial_loops import FIRST_PROBE, SETTLING, TIMED

from tests.runtime.gamma.test_controller import batch, controller, table


def served(one: Controller, steps: int, *, draft_s: float, tokens: float) -> list[int]:
    """Steps with drafts before each probe; what drafts bring is the same whatever is expected."""
    rows = batch(0.7)
    distances, since = [], 0
    for step in range(steps):
        if step % 8 == 0 or one.is_due:
            one.decide(rows)
        gammas, kind = one.next_step()
        longest = max(gammas)
        one.observe(draft_s if longest else 1.0, longest, tokens if longest else 1, kind)
        if kind is not StepKind.PROBE:
            since += 1
        elif since:
            distances.append(since)
            since = 0
    return distances


def test_a_promise_alone_never_makes_probes_rare() -> None:
    """Drafts bring exactly what plain decoding brings, while forecasts promise twice as much."""
    one = controller(table(c=0.05), trial_share=0.0, lost_share=0.0)
    distances = served(one, 2400, draft_s=1.5, tokens=1.5)
    assert distances[:2] == [UNKNOWN, FIRST_PROBE]
    assert max(distances) <= UNPROVEN
    assert len(distances) >= 5


def test_a_proven_gain_makes_them_rare_and_its_end_frequent_again() -> None:
    one = controller(table(c=0.05), trial_share=0.0)
    distances = served(one, 4000, draft_s=1.4, tokens=3.0)
    assert max(distances) > UNPROVEN
    assert sum(distances) + len(distances) > 3000
    assert len(distances) < 4000 * 0.02
    later = served(one, 640, draft_s=1.4, tokens=1.3)
    assert len(later) >= 2


@pytest.mark.parametrize("gain", [1.04, 1.5])
def test_probes_cost_their_share_of_the_time(gain: float) -> None:
    share = 0.005
    one = controller(table(c=0.05), trial_share=0.0, probe_share=share)
    rows = batch(0.7)
    foregone = total = 0.0
    for step in range(6000):
        if step % 8 == 0 or one.is_due:
            one.decide(rows)
        gammas, kind = one.next_step()
        longest = max(gammas)
        took_s = 1.5 if longest else 1.0
        one.observe(took_s, longest, gain * took_s if longest else 1, kind)
        foregone += (gain - 1.0) * (kind is StepKind.PROBE)
        total += took_s
    assert 0.0 < foregone <= 4 * share * total


def test_thinking_keeps_to_its_share_of_the_time() -> None:
    settings = Settings(cost_share=0.01, idle_share=0.001)
    pace = Pace(settings)
    assert pace.may_decide(is_drafting=True)
    for _ in itertools.repeat(None, 50):
        pace.decide(1e-3)
    assert not pace.may_decide(is_drafting=True)
    pace.serve(0.11)
    assert pace.may_decide(is_drafting=True)
    assert not pace.may_decide(is_drafting=False)
    assert pace.rest_s == pytest.approx(0.89, rel=0.01)
    pace.serve(pace.rest_s + 1e-6)
    assert pace.may_decide(is_drafting=False)
    assert pace.share == pytest.approx(50e-3 / 1.0, rel=0.01)


@pytest.mark.parametrize("trial_share", [0.0, 0.01])
def test_steps_alike_may_be_taken_without_asking(trial_share: float) -> None:
    """Just as many as would be answered alike, and the one after them is what it would have been."""
    asked, skipped = (
        controller(table(c=0.05), probe_share=0.02, trial_share=trial_share) for _ in range(2)
    )
    kinds, lengths = set(), []
    for one in (asked, skipped):
        one.decide(batch(0.8))
    for _ in range(12):
        assert skipped.num_alike == asked.num_alike
        lengths.append(skipped.num_alike)
        skipped.skip(lengths[-1])
        for _ in range(lengths[-1]):
            assert asked.next_step()[1] is StepKind.GAIN
        following = asked.next_step()
        assert following == skipped.next_step()
        kinds.add(following[1])
    assert max(lengths) > 1
    assert StepKind.GAIN not in kinds
    assert (StepKind.EXPLORE in kinds) is (trial_share > 0.0)


def plain_scale(one: Controller, kinds: list[tuple[float, int]]) -> float:
    """What a plain step is held to take after some, of (seconds, longest draft)."""
    rows = batch(0.7)
    one.decide(rows)
    for seconds, longest in kinds:
        one.observe(seconds, longest, 1 + longest, StepKind.GAIN if longest else StepKind.PROBE)
    one.decide(rows)
    return float(one.scales[0])


def test_the_first_plain_steps_behind_drafts_say_nothing_of_plain_decoding() -> None:
    """They take a third longer; those behind them in the row are what plain decoding takes."""
    probe = [(1.33, 0)] * SETTLING + [(1.0, 0)] * TIMED
    drafts = [(1.1, 2)] * 16
    assert plain_scale(controller(table()), (drafts + probe) * 8) == pytest.approx(1.0, abs=0.02)
    # So nothing at all is known where they are all there is.
    lone = controller(table())
    assert plain_scale(lone, (drafts + probe[:SETTLING]) * 8) == 1.0
    assert plain_scale(controller(table()), (drafts + [(1.33, 0)] * 7) * 20) > 1.25


def test_a_step_over_other_rows_than_were_decided_on_says_nothing_of_times() -> None:
    one = controller(table())
    one.decide(batch(*[0.1] * 4))
    for _ in range(40):
        one.observe(0.25, 0, 1, StepKind.NO_GAIN, num_rows=1)
    one.decide(batch(*[0.1] * 4))
    assert one.scales[0] == 1.0
    for _ in range(40):
        one.observe(0.5, 0, 4, StepKind.NO_GAIN)
    one.decide(batch(*[0.1] * 4))
    assert one.scales[0] == pytest.approx(0.5, rel=0.05)
