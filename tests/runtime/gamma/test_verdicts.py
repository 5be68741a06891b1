"""Whether a drafter pays is said before the first request, and follows what is kept."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma.verdicts import least_alpha, verdict_words
from outrider.runtime.oracle.analysis import walltime_factor

from tests.runtime.gamma.test_controller import serve, served, table, wrong_logits
from tests.runtime.markov import Harness, counting_logits


@pytest.mark.parametrize(("c", "slope"), [(0.05, 0.0), (0.3, 0.1), (0.6, 0.02), (0.02, 0.6)])
def test_drafts_pay_from_the_least_alpha_on_and_not_before(c: float, slope: float) -> None:
    step_s = [1.0 + gamma * (c + slope) for gamma in range(9)]
    least = least_alpha(step_s)
    assert least is not None
    gains = {
        alpha: max(walltime_factor(alpha, g, c, verify_cost=1.0 + g * slope) for g in range(1, 9))
        for alpha in np.linspace(0.0, 1.0, 1001)
    }
    assert all(
        (gain > 1.0) == (alpha > least)
        for alpha, gain in gains.items()
        if abs(alpha - least) > 1e-6
    )


def test_where_a_step_costs_as_much_as_all_it_can_bring_nothing_is_enough() -> None:
    assert least_alpha([1.0, 2.0, 3.0]) is None
    assert least_alpha([1.0]) is None


def test_a_verdict_is_a_sentence() -> None:
    assert verdict_words("model", 0.31, 0.45) == (
        "model loses here: alpha 0.31, would need 0.45; off unless gamma is fixed"
    )
    assert verdict_words("model", 0.62, 0.45) == "model pays here: alpha 0.62, needs 0.45"
    assert verdict_words("model", None, 0.45) == "model pays from alpha 0.45 on"
    assert (
        verdict_words("model", 0.9, None) == "model loses here, however many of its tokens are kept"
    )


def test_the_default_drafter_has_a_verdict_before_the_first_request() -> None:
    (verdict,) = served(0.2).worker.snapshot().control.verdicts
    assert (verdict.drafter, verdict.alpha, verdict.num_rows) == ("model", None, 1)
    assert verdict.least_alpha == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("draft", "least", "most"), [(counting_logits, 0.9, 1.0), (wrong_logits, 0.0, 0.1)]
)
def test_the_verdict_follows_what_is_kept(draft, least: float, most: float) -> None:
    one = served(0.2, draft=draft)
    serve(one, [str(number) for number in range(40)])
    (verdict,) = one.worker.snapshot().control.verdicts
    assert verdict.alpha is not None
    assert least <= verdict.alpha <= most
    assert verdict.least_alpha is not None


def test_auto_has_the_verdicts_of_what_it_takes() -> None:
    one = served(0.2, default_drafter="auto")
    assert one.worker.snapshot().control.verdicts == ()
    serve(one, [str(number) for number in range(4)])
    names = {verdict.drafter for verdict in one.worker.snapshot().control.verdicts}
    assert names and "auto" not in names


def test_where_the_default_drafter_needs_a_model_that_is_missing_there_is_no_verdict() -> None:
    one = Harness("F3", has_draft=False, costs=table())
    assert one.worker.snapshot().control.verdicts == ()
