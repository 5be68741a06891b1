from __future__ import annotations

import pytest
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.events import SpeculationDisabledReason, SpeculationReport
from outrider.runtime.core.stats import SpeculationStats


def report(stats: SpeculationStats, off_reason: str | None = None) -> SpeculationReport:
    return stats.report(
        drafter="model", mode=ExactnessMode.MAX_ACCEPT, lenience=1.0, off_reason=off_reason
    )


def test_alpha_hat_counts_the_trials_that_were_reached() -> None:
    """The hand example: gamma 4 and A = 4, 1, 0, 2."""
    stats = SpeculationStats(max_gamma=4)
    for num_accepted in (4, 1, 0, 2):
        stats.record(
            gamma=4, num_accepted=num_accepted, num_emitted=num_accepted + 1, num_fallbacks=0
        )
    found = report(stats)
    assert found.alpha_hat == pytest.approx(0.7)
    assert found.draft_utilization == 0.4375
    assert found.tokens_per_step == 2.75
    assert found.accepted_by_position == (3, 2, 1, 1)
    assert found.drafted_by_position == (4, 4, 4, 4)
    assert found.is_on


def test_plain_decoding_has_no_alpha() -> None:
    stats = SpeculationStats(max_gamma=0)
    stats.record(gamma=0, num_accepted=0, num_emitted=1, num_fallbacks=0)
    found = report(stats, SpeculationDisabledReason.DEGRADED)
    assert found.alpha_hat is None
    assert found.draft_utilization is None
    assert found.tokens_per_step == 1.0
    assert not found.is_on
    assert found.off_reason == "DEGRADED"


def test_nothing_run_has_no_rates() -> None:
    assert report(SpeculationStats(max_gamma=2)).tokens_per_step is None


def test_what_was_cut_off_counts_nowhere() -> None:
    stats = SpeculationStats(max_gamma=4)
    assert stats.record(gamma=4, num_accepted=3, num_emitted=2, num_fallbacks=1) == 2
    found = report(stats)
    assert found.num_accepted == 2
    assert found.alpha_hat == 1.0
    assert found.accepted_by_position == (1, 1, 0, 0)
    assert found.num_fallbacks == 1


def test_positions_that_were_never_drafted_are_left_out() -> None:
    stats = SpeculationStats(max_gamma=4)
    stats.record(gamma=2, num_accepted=0, num_emitted=1, num_fallbacks=0)
    assert report(stats).drafted_by_position == (1, 1)
