"""The likeliest continuations of a row are its greatest log-probabilities, as the option logprobs gives them."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.continuations import continuations_of
from outrider.engines.sampling.draws import raw_logprobs

PLAIN = SamplingParams()
HISTORY = np.array([7, 8, 3], dtype=np.int64)


def some_row(vocab_size: int, seed: int = 0) -> np.ndarray:
    """[V] float32, every third value tied with others."""
    row = np.random.default_rng(seed).normal(size=vocab_size).astype(np.float32)
    row[::3] = np.float32(0.5)
    return row


def found(row: np.ndarray, count: int, params: SamplingParams = PLAIN) -> list[tuple[int, float]]:
    answer = continuations_of(row, count, params, HISTORY, 2)
    assert answer is not None
    return list(zip(answer.tokens.tolist(), answer.log_probs.tolist(), strict=True))


@pytest.mark.parametrize("vocab_size", [12, 2000])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_they_are_what_logprobs_reports_bit_for_bit(vocab_size: int, count: int) -> None:
    row = some_row(vocab_size)
    assert found(row, count) == list(raw_logprobs(row, 0, count).top)


def test_they_are_ranked_with_ties_by_the_lower_token() -> None:
    row = some_row(40)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    order = np.lexsort((np.arange(40), -row))
    answer = found(row, 99)
    assert [token for token, _ in answer] == order.tolist()
    np.testing.assert_allclose([value for _, value in answer], exact[order], atol=1e-6)


@pytest.mark.parametrize(
    ("params", "banned"),
    [
        (SamplingParams(allowed_token_ids=(1, 4, 6)), {0, 2, 3, 5, 7, 8, 9}),
        (SamplingParams(bad_words=((2,), (3, 5), (8, 6))), {2, 5}),
        (SamplingParams(min_tokens=2, end_token_ids=(0, 9)), {0, 9}),
        (SamplingParams(min_tokens=1, end_token_ids=(0, 9)), set()),
        (SamplingParams(no_repeat_ngram_size=1), {3, 7, 8}),
    ],
)
def test_bans_leave_tokens_out_and_the_numbers_of_the_others_as_they_are(
    params: SamplingParams, banned: set[int]
) -> None:
    """HISTORY has one output token, 3; the prompt's 8 begins no bad word of the output."""
    row = some_row(10)
    expected = [one for one in found(row, 10) if one[0] not in banned]
    assert found(row, 10, params) == expected
    assert found(row, 2, params) == expected[:2]


def test_what_has_no_probability_is_left_out() -> None:
    row = some_row(6)
    row[[1, 2]] = -np.inf
    assert {token for token, _ in found(row, 6)} == {0, 3, 4, 5}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_none(value: float) -> None:
    row = some_row(6)
    row[4] = value
    assert continuations_of(row, 3, PLAIN, HISTORY, 2) is None
    assert continuations_of(np.full(6, -np.inf, np.float32), 3, PLAIN, HISTORY, 2) is None
