"""Gammas follow costs and acceptance, keep their place between equals, and are checked by probes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.costs import (
    CostTable,
    HostCosts,
    ModelCosts,
    RowCosts,
    RowKind,
    monotone,
)
from outrider.runtime.gamma.forecast import Batch, Forecaster, Settings
from outrider.runtime.gamma.trial_loops import SETTLING, TIMED
from outrider.runtime.oracle.analysis import optimal_gamma

MAX_GAMMA = 8


def table(
    *, c: float = 0.05, slope: float = 0.0, token_s: float = 0.0, catch_up_s: float = 0.01
) -> CostTable:
    """Target: 1 s for up to two tokens, ``slope`` more for each further one. Draft: c per call."""
    tokens = (2, 3, 9)
    verify = tuple(1.0 + slope * (n - 1) for n in tokens)
    catch_up = ModelCosts(
        batches=(1,),
        tokens=(1, 100),
        seconds=((catch_up_s, 100 * catch_up_s),),
        capacity=128,
        position_s=0.0,
    )
    return CostTable(
        target=ModelCosts(
            batches=(1, 8),
            tokens=(1, *tokens),
            seconds=((1.0, *verify),) * 2,
            capacity=128,
            position_s=0.0,
        ),
        draft=ModelCosts(
            batches=(1,), tokens=(1,), seconds=((max(c, 1e-12),),), capacity=128, position_s=0.0
        ),
        catch_up=catch_up,
        host=HostCosts(
            step_s=0.0,
            call_s=0.0,
            rows={kind: RowCosts(row_s=0.0, token_s=token_s) for kind in RowKind},
        ),
        capacities=(128, 256),
    )


def batch(
    *alphas: float, caps: object = MAX_GAMMA, fixed: object = False, **change: object
) -> Batch:
    n = len(alphas)
    powers = np.arange(1, MAX_GAMMA + 1)
    facts = {
        "caps": caps,
        "is_fixed": fixed,
        "uses_model": True,
        "kinds": 0,
        "num_missing": 1,
        "num_remaining": 100,
    }
    facts |= {name: change.pop(name) for name in facts if name in change}
    rows = [np.broadcast_to(np.array(one), n) for one in facts.values()]
    survival = np.array(alphas)[:, None] ** powers
    return Batch(
        np.array(rows, dtype=np.int64),
        **{
            "survival": survival,
            "shares": np.ones((2, *survival.shape)),
            "num_cached": 20,
            **change,
        },
    )


def controller(costs: CostTable, **settings: object) -> Controller:
    chosen = Settings(**settings)
    forecaster = Forecaster(costs, max_gamma=MAX_GAMMA, max_shared_missing=2, settings=chosen)
    return Controller(forecaster, max_gamma=MAX_GAMMA, settings=chosen, spread=costs.disagreement)


def first_choice(costs: CostTable, rows: Batch) -> list[int]:
    one = controller(costs)
    one.decide(rows)
    return one.next_step()[0]


@pytest.mark.parametrize("alpha", [0.02, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
def test_one_row_gets_the_gamma_of_the_formula(alpha: float, c: float, slope: float) -> None:
    """Within the margin: a longest draft that promises no more than that is as good."""
    expected, factor = optimal_gamma(
        alpha, c, max_gamma=MAX_GAMMA, verify_cost=lambda k: 1.0 + slope * (k - 1)
    )
    assert first_choice(table(c=c, slope=slope), batch(alpha)) == [expected], factor


def test_a_useless_draft_is_not_used_and_a_perfect_one_fully() -> None:
    assert first_choice(table(c=0.3), batch(0.05)) == [0]
    assert first_choice(table(c=0.01), batch(0.999)) == [MAX_GAMMA]


def test_equal_gammas_go_to_the_smaller() -> None:
    """alpha = c = .5: gamma 1 gains exactly nothing, so nothing is drafted."""
    assert first_choice(table(c=0.5), batch(0.5)) == [0]


def test_rows_of_a_mixed_batch_get_gammas_of_their_own() -> None:
    chosen = first_choice(table(c=0.02, token_s=0.05), batch(0.95, 0.05, 0.6))
    assert chosen[0] > chosen[2] > chosen[1] == 0


def test_a_row_for_which_nothing_pays_does_not_stop_the_others() -> None:
    alone = first_choice(table(c=0.02, token_s=0.02), batch(0.9))
    together = first_choice(table(c=0.02, token_s=0.02), batch(0.9, 0.01))
    assert alone[0] > 0
    assert together[0] > 0
    assert together[1] == 0


def test_a_small_gain_is_taken_where_rows_that_end_make_room_for_others() -> None:
    """Otherwise those that run ahead leave the others in a smaller batch, which costs more per token."""
    costs = table(c=0.05, slope=0.3)
    rows = batch(0.45, 0.45)
    # A draft call for two rows takes twice as long.
    gain = 1.45 / 1.4
    assert 1.0 < gain < 1.0 + Settings().lead
    assert first_choice(costs, rows) == [0, 0]
    assert first_choice(costs, rows._replace(is_refilled=True)) == [1, 1]


def test_caps_hold_and_fixed_rows_keep_their_gamma() -> None:
    rows = batch(0.99, 0.99, 0.01, caps=(3, 0, 5), fixed=(False, False, True))
    chosen = first_choice(table(c=0.01), rows)
    assert chosen == [3, 0, 5]


def test_a_fixed_row_makes_its_width_free_for_the_others() -> None:
    costs = table(c=0.6, slope=0.5)
    assert first_choice(costs, batch(0.6)) == [0]
    assert first_choice(costs, batch(0.6, 0.6, caps=8, fixed=(False, True)))[0] > 0


def test_retrieved_drafts_cost_no_draft_calls() -> None:
    rows = batch(0.3, uses_model=np.array([False]))
    assert first_choice(table(c=0.9), batch(0.3)) == [0]
    assert first_choice(table(c=0.9), rows) == [MAX_GAMMA]


def test_a_deadline_forbids_steps_that_would_miss_it() -> None:
    costs = table(c=0.1)
    assert first_choice(costs, batch(0.99)) == [8]
    assert first_choice(costs, batch(0.99, time_left_s=1.35)) == [3]
    assert first_choice(costs, batch(0.99, time_left_s=1.05)) == [0]
    # Too late for any step: nothing is gained by short ones.
    assert first_choice(costs, batch(0.99, time_left_s=0.5)) == [8]


def test_catching_up_must_pay_before_the_answer_ends() -> None:
    costs = table(c=0.02, catch_up_s=0.1)
    missing = {"num_missing": np.array([100])}
    assert first_choice(costs, batch(0.8, **missing))[0] > 0
    assert first_choice(costs, batch(0.8, **missing, num_remaining=np.array([2]))) == [0]


def test_two_equal_choices_never_alternate() -> None:
    """Expectations that waver by less than the margin around a tie change nothing."""
    one = controller(table(c=0.5))
    chosen = []
    for index in range(60):
        one.decide(batch(0.5 + (0.007 if index % 2 else -0.007)))
        gammas, kind = one.next_step()
        if kind is not StepKind.EXPLORE:
            chosen.append(gammas[0])
    assert set(chosen) == {0}
    one.decide(batch(0.9))
    assert one.next_step()[0][0] > 0
    chosen.clear()
    for index in range(60):
        one.decide(batch(0.5 + (0.007 if index % 2 else -0.007)))
        gammas, kind = one.next_step()
        if kind not in (StepKind.PROBE, StepKind.EXPLORE):
            chosen.append(int(gammas[0]))
    assert len(set(chosen)) == 1


def run(
    one: Controller,
    rows: Batch,
    steps: int,
    *,
    c: float = 0.05,
    plain_s: float = 1.0,
    kept: float = 1.0,
) -> Counter[StepKind]:
    kinds: Counter[StepKind] = Counter()
    for _ in range(steps):
        if one.is_due:
            one.decide(rows)
        gammas, kind = one.next_step()
        longest = max(gammas)
        seconds = plain_s if longest == 0 else 1.0 + c * longest
        one.observe(seconds, longest, 1 + kept * longest, kind)
        kinds[kind] += 1
    return kinds


def test_steps_with_drafts_are_probed_rarely_and_the_speed_up_is_measured() -> None:
    one = controller(table(c=0.05), probe_every=80)
    one.decide(batch(0.9))
    kinds = run(one, batch(0.9), 440)
    # The first probe comes sooner; besides, another length is tried.
    assert 330 <= kinds[StepKind.GAIN] <= 405
    assert kinds[StepKind.GAIN] + kinds[StepKind.PROBE] + kinds[StepKind.EXPLORE] == 440
    report = one.report()
    assert report.num_probes == kinds[StepKind.PROBE] >= 4 * (SETTLING + TIMED)
    assert report.num_steps_on == 440 - report.num_probes
    # 9 tokens in 1.4 s with drafts, 1 in 1 s without; recent steps weigh a little more.
    num_on, num_off = report.num_steps_on, report.num_probes
    assert report.speed_up == pytest.approx(
        (num_on * 9 + num_off) / (num_on * 1.4 + num_off), rel=0.05
    )


def test_a_slow_plain_step_shows_in_the_speed_up() -> None:
    one = controller(table(c=0.05), probe_every=40)
    one.decide(batch(0.9))
    run(one, batch(0.9), 1000, plain_s=2.0)
    assert one.scales[0] == pytest.approx(2.0, rel=0.02)
    assert one.scales[8] == pytest.approx(1.0, rel=0.02)
    report = one.report()
    assert report.speed_up is not None
    assert report.speed_up > 9.0


def test_steps_without_drafts_explore_for_a_bounded_share_of_the_time() -> None:
    one = controller(table(c=0.4), lost_share=0.01, explore_trials=4)
    one.decide(batch(0.1))
    kinds = run(one, batch(0.1), 1000, c=0.4, kept=0.1)
    assert kinds[StepKind.EXPLORE] % 4 == 0
    assert kinds[StepKind.GAIN] == kinds[StepKind.PROBE] == 0
    # An explored step costs .4 s more and brings a tenth of a token.
    assert 8 <= kinds[StepKind.EXPLORE] <= 1000 * 0.01 / (0.4 - 0.1) + 4


def test_rows_without_drafts_are_not_explored() -> None:
    one = controller(table(c=0.4))
    one.decide(batch(0.1, 0.1, caps=(0, 3), fixed=(False, True)))
    for _ in range(500):
        assert not one.is_due
        gammas, kind = one.next_step()
        assert gammas == [0, 3]
        one.observe(1.0, 3, 2, kind)


def test_measured_times_correct_the_table() -> None:
    """The table says that drafting pays; the clock says that it does not, so it ends."""
    one = controller(table(c=0.05))
    rows = batch(0.6)
    one.decide(rows)
    assert one.next_step()[0][0] > 0
    for _ in range(100):
        one.decide(rows)
        gammas, kind = one.next_step()
        longest = max(gammas)
        one.observe(3.0 if longest else 1.0, longest, 1 + longest, kind)
    assert one.next_step()[0][0] == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slow_from", [None, 500])
def test_a_table_from_a_noisy_start_is_right_before_long(seed: int, slow_from: int | None) -> None:
    """Every time in the table is wrong by up to a factor 2, and the machine may slow down besides."""
    rng = np.random.default_rng(seed)
    alpha, c, slope = rng.choice([0.4, 0.6, 0.8]), rng.choice([0.05, 0.15, 0.3]), 0.04
    one = controller(noisy_table(rng, c, slope))
    rows = batch(alpha)

    def true_s(longest: int) -> float:
        return 1.0 + longest * c + slope * (longest + 1 - 2 if longest else 0)

    def rate(longest: int) -> float:
        return sum(alpha**k for k in range(longest + 1)) / true_s(longest)

    emitted = seconds = 0.0
    for step in range(1500):
        if step % 8 == 0 or one.is_due:
            one.decide(rows)
        gammas, kind = one.next_step()
        longest = max(gammas)
        slowness = 2.0 if slow_from is not None and step >= slow_from else 1.0
        took_s = true_s(longest) * slowness * float(np.exp(rng.normal(scale=0.1)))
        one.observe(took_s, longest, 1 + longest, kind)
        if step >= 500:
            emitted += rate(longest) * true_s(longest)
            seconds += true_s(longest)
    best = max(rate(longest) for longest in range(MAX_GAMMA + 1))
    assert emitted / seconds > 0.95 * best


def noisy_table(rng: np.random.Generator, c: float, slope: float) -> CostTable:
    """As measured on a machine that others used in fits and starts; monotone all the same."""
    tokens = (2, 3, 5, 9)
    factors = np.exp(rng.uniform(-np.log(2.0), np.log(2.0), size=len(tokens)))
    times = monotone(np.array([1.0 + slope * (n - 2) for n in tokens]) * factors)
    right = table(c=c * float(np.exp(rng.uniform(-np.log(2.0), np.log(2.0)))))
    noisy = ModelCosts(
        batches=(1,), tokens=tokens, seconds=(tuple(times.tolist()),), capacity=128, position_s=0.0
    )
    return replace(right, target=noisy, disagreement=0.4)


def test_steps_in_which_the_draft_model_catches_up_say_nothing_of_the_table() -> None:
    one = controller(table(c=0.05))
    rows = batch(0.8)
    for _ in range(40):
        one.decide(rows)
        longest = max(one.next_step()[0])
        one.observe(9.0, longest, 1 + longest, StepKind.GAIN, catches_up=True)
    one.decide(rows)
    assert one.scales.tolist() == [1.0] * (MAX_GAMMA + 1)


def test_regret_is_none_at_the_best_gamma_and_large_far_from_it() -> None:
    good, bad = controller(table(c=0.05)), controller(table(c=0.05))
    rows = batch(0.5)
    tokens = 1.0 + sum(0.5**k for k in range(1, 4))
    for one, longest in ((good, 3), (bad, 8)):
        one.decide(rows)
        for _ in range(50):
            emitted = tokens if longest == 3 else 2.0
            one.observe(1.0 + 0.05 * longest, longest, emitted, StepKind.GAIN)
    assert good.report().best_fixed_gamma == 3
    assert good.report().regret == pytest.approx(0.0, abs=0.01)
    assert bad.report().regret == pytest.approx(1 - (2.0 / 1.4) / (tokens / 1.15), abs=0.02)


def test_nothing_is_claimed_before_the_first_step() -> None:
    report = controller(table()).report()
    assert report.speed_up is None
    assert report.regret is None


def test_steps_told_at_once_count_like_steps_told_one_by_one() -> None:
    rows = batch(0.05, 0.05)
    told, apart = (controller(table(c=0.8, slope=0.8)) for _ in range(2))
    seconds = [1.0, 1.02, 0.99, 1.01] * 4
    for one in (told, apart):
        one.decide(rows)
        assert one.next_step() == ([0, 0], StepKind.NO_GAIN)
        one.observe(1.0, 0, 2, StepKind.NO_GAIN)
        assert one.is_at_rest
    for _ in range(3):
        told.observe_rest(seconds, num_rows=2)
        for took_s in seconds:
            apart.observe(took_s, 0, 2, StepKind.NO_GAIN)
    assert told.report().num_steps_off == apart.report().num_steps_off == 49
    assert told.report().speed_up == pytest.approx(apart.report().speed_up, rel=5e-3)
    assert told.scales == pytest.approx(apart.scales, rel=5e-3)
    accounts = [one._decision.account for one in (told, apart)]
    assert accounts[0].credit_s == pytest.approx(accounts[1].credit_s)
    assert accounts[0].saved_s == pytest.approx(accounts[1].saved_s) == pytest.approx(0.005 * 49.24)


def test_rows_with_drafts_or_a_try_at_hand_are_not_at_rest() -> None:
    assert not controller(table()).is_at_rest
    gains = controller(table())
    gains.decide(batch(0.9))
    assert not gains.is_at_rest
    fixed = controller(table(c=0.8, slope=0.8))
    fixed.decide(batch(0.05, 0.05, fixed=[True, False]))
    assert not fixed.is_at_rest
    tries = controller(table(c=0.8, slope=0.8))
    tries.decide(batch(0.05))
    while not tries.is_due:
        assert tries.is_at_rest
        tries.next_step()
        tries.observe(1.0, 0, 1, StepKind.NO_GAIN)
    assert not tries.is_at_rest


def test_how_long_nothing_will_be_tried_is_known_beforehand() -> None:
    one = controller(table(c=0.8, slope=0.8))
    assert one.rest_s == float("inf")
    one.decide(batch(0.05))
    left_s = one.rest_s
    assert 10.0 < left_s < float("inf")
    one.observe_rest([1.0] * int(left_s - 1.0), num_rows=1)
    assert not one.is_due
    assert one.rest_s == pytest.approx(left_s - int(left_s - 1.0))
    one.observe_rest([1.0] * 3, num_rows=1)
    assert one.is_due
    assert one.rest_s == 0.0
    stingy = controller(table(c=0.8, slope=0.8), lost_share=0.0)
    stingy.decide(batch(0.05))
    assert stingy.rest_s == float("inf")


def test_long_rests_enter_the_regret_as_they_pass() -> None:
    """However long a decision holds, what it passed up fades as all else does."""
    one = controller(table(c=0.8, slope=0.8))
    one.decide(batch(0.05))
    for _ in range(40):
        one.observe_rest([1.0] * 100, num_rows=1)
        assert one._decision.num_steps < 612
    report = one.report()
    assert report.num_steps_off == 4000
    assert report.speed_up == pytest.approx(1.0)
    assert report.best_fixed_gamma == 0
    assert report.regret == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_are_made_have_the_benefit_of_the_doubt(num_rows: int) -> None:
    """A loss of a tenth is expected: of what few drafts told it is no reason to stop, of many it is."""
    costs = table(c=0.6 / num_rows)
    good, bad = batch(*[0.9] * num_rows), batch(*[0.45] * num_rows)
    for doubt, goes_on in ((0.15, True), (0.02, False)):
        one = controller(costs)
        one.decide(good)
        assert one.is_drafting
        one.decide(bad._replace(doubt=doubt))
        assert one.is_drafting is goes_on
    one = controller(costs)
    one.decide(bad._replace(doubt=0.15))
    assert not one.is_drafting
