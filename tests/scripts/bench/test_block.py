"""The figures of the block benchmark, by hand."""

from __future__ import annotations

import pytest

from scripts.bench.block import Tally, row_of


def test_figures_are_of_all_requests_and_of_pairs():
    token_wise = Tally(
        speeds=[10.0, 20.0, 30.0], per_pass=[1.0, 2.0], num_emitted=30, num_passes=20
    )
    block = Tally(speeds=[20.0, 20.0, 45.0], per_pass=[1.5, 3.5], num_emitted=30, num_passes=12)
    row = row_of(4, 1.0, {"token-wise": token_wise, "block": block})
    assert row.case == {"gamma": 4, "temperature": 1.0}
    assert row.figures["token_wise_tokens_per_pass"] == 1.5
    assert row.figures["block_tokens_per_pass"] == 2.5
    assert row.figures["mean_difference"] == 1.0
    assert row.figures["half_width_95"] == pytest.approx(1.96 * 0.5)
    assert row.figures["token_wise_tokens_per_s"] == 20.0
    assert row.figures["block_tokens_per_s"] == 20.0
    assert row.figures["median_ratio_of_speeds"] == 1.5
