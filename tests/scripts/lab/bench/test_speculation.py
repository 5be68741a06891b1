"""The rate of decoding, and the formula's rows: by hand."""

from __future__ import annotations

import math

import pytest

from scripts.lab.bench.speculation import (
    Sample,
    decode_rate,
    joined,
    measured,
    median_pause,
    theory,
)
from scripts.lab.bench.tools.call_times import Costs


def test_decoding_is_counted_from_when_every_row_has_been_through_a_round() -> None:
    # The second row's first round ends at 5 s, after both prompts; from then on tokens come at 6, 6 and 9.
    assert decode_rate([[1.0, 2.0, 2.0, 6.0], [3.0, 5.0, 6.0, 9.0]]) == pytest.approx(4 / 6)
    assert math.isnan(decode_rate([[1.0], [2.0]]))


def test_pauses_are_between_calls_of_either_engine() -> None:
    # Pauses of 1, 3 and 2 seconds.
    assert median_pause([(6.0, 9.0), (11.0, 12.0), (0.0, 1.0), (2.0, 3.0)]) == 2.0


def sample(rate: float, *, accepted: int = 0, trials: int = 0) -> Sample:
    return Sample(
        tokens_per_s=rate,
        decode_tokens_per_s=2 * rate,
        num_accepted=accepted,
        num_trials=trials,
        num_output=20,
        num_emitted=20,
        num_steps=10,
        pause_s=1e-4,
        engine_share=0.9,
        sampling_share=0.02,
    )


def test_speedups_are_medians_of_ratios_within_a_round() -> None:
    # The machine halves its speed in the second round; both ways feel it.
    rounds = [
        {0: sample(100.0), 2: sample(150.0, accepted=6, trials=10)},
        {0: sample(50.0), 2: sample(75.0, accepted=4, trials=10)},
        {0: sample(100.0), 2: sample(120.0, accepted=5, trials=10)},
    ]
    cell = measured(2, rounds)
    assert cell["speedup"] == cell["decode_speedup"] == pytest.approx(1.5)
    assert cell["alpha_hat"] == pytest.approx(0.5)
    assert cell["tokens_per_step"] == pytest.approx(2.0)


def test_groups_of_equal_work_join_by_their_seconds() -> None:
    assert joined([sample(100.0), sample(50.0)]).tokens_per_s == pytest.approx(200 / 3)


def test_the_formula_is_held_against_decoding_alone() -> None:
    cell = measured(2, [{0: sample(100.0), 2: sample(100.0, accepted=5, trials=10)}])
    found = theory(2, cell["alpha_hat"], cell["decode_speedup"], Costs(c=0.1, v=1.2))
    # N(0.5, 2) = 1 + 0.5 + 0.25, over 2 x 0.1 + 1.2.
    assert found["predicted"] == pytest.approx(1.75 / 1.4)
    assert found["ratio"] == pytest.approx(1.4 / 1.75)
