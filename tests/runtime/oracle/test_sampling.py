"""The adjustment of logits: worked examples, and the fast rows of ``engines.sampling.adjust`` against the slow
oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outrider.engines.sampling import adjust
from outrider.engines.sampling.adjust import adjusted_token_probs, greatest_token, process_logits
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.truncation import ranked_greatest
from outrider.runtime.oracle.sampling import adjusted_probs, processed_scores, softmax

from tests.mutants import assert_caught

EMPTY = np.zeros(0, dtype=np.int64)
MAX_ERROR = 1e-6


def adjusted_row(logits, law):
    """The fast law written out over the vocabulary; None where there is none."""
    adjusted = adjusted_token_probs(logits, law, np.ones(len(logits) + 3, dtype=np.float32))
    if adjusted is None:
        return None
    row = np.zeros(len(logits), dtype=np.float32)
    row[slice(None) if adjusted.ids is None else adjusted.ids] = adjusted.weights / adjusted.total()
    return row


def fast_probs(logits, law, history, num_prompt, mask=None):
    processed = process_logits(np.asarray(logits, dtype=np.float32), law, history, num_prompt, mask)
    if law.is_greedy:
        probs = np.zeros(len(processed))
        probs[greatest_token(processed)] = 1.0
        return probs
    return adjusted_row(processed, law)


def slow_probs(logits, law, history, num_prompt):
    return adjusted_probs(np.asarray(logits, dtype=np.float32), law, history, num_prompt)


both = pytest.mark.parametrize("probs_of", [fast_probs, slow_probs], ids=["fast", "slow"])


def logs(*probs):
    return np.log(np.array(probs))


@both
def test_greedy_gives_all_mass_to_the_lowest_id_of_a_tie(probs_of):  # T9
    law = SamplingParams(temperature=0.0)
    assert probs_of([2.0, 2.0, 1.0], law, EMPTY, 0).tolist() == [1.0, 0.0, 0.0]


@both
def test_temperature_comes_before_top_p(probs_of):  # T10
    law = SamplingParams(temperature=2.0, top_p=0.66)
    probs = probs_of([2.0, 1.0, 0.0], law, EMPTY, 0)
    assert probs == pytest.approx([0.6225, 0.3775, 0.0], abs=5e-5)


@both
def test_top_p_keeps_one_token_where_the_mass_before_the_next_equals_it(probs_of):  # T10
    law = SamplingParams(top_p=0.5)
    assert probs_of([1.0, 1.0], law, EMPTY, 0).tolist() == [1.0, 0.0]
    # (.5, .3, .2): a margin beyond float32 on either side of the edge.
    for top_p, num_kept in [(0.4999, 1), (0.5001, 2)]:
        probs = probs_of(logs(0.5, 0.3, 0.2), SamplingParams(top_p=top_p), EMPTY, 0)
        assert np.count_nonzero(probs) == num_kept


@both
def test_top_p_equal_to_the_mass_before_drops_the_token(probs_of):
    # Four equal tokens have exactly .25 each in any precision.
    probs = probs_of([3.0] * 4, SamplingParams(top_p=0.5), EMPTY, 0)
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]


@both
def test_top_k_keeps_exactly_k_and_breaks_ties_by_lower_id(probs_of):
    probs = probs_of([1.0, 2.0, 2.0, 2.0], SamplingParams(top_k=2), EMPTY, 0)
    assert probs.tolist() == [0.0, 0.5, 0.5, 0.0]


@both
@pytest.mark.parametrize("top_k", [0, 3, 4, 99])
def test_top_k_of_zero_or_all_is_off(probs_of, top_k):
    probs = probs_of(logs(0.5, 0.3, 0.2), SamplingParams(top_k=top_k), EMPTY, 0)
    assert probs == pytest.approx([0.5, 0.3, 0.2], abs=MAX_ERROR)


@both
def test_top_p_counts_mass_among_the_tokens_that_top_k_kept(probs_of):
    # Kept by top-k: .4/.7 and .3/.7; the first alone has .571 >= .5, of the whole row only .4.
    law = SamplingParams(top_k=2, top_p=0.5)
    assert probs_of(logs(0.4, 0.3, 0.2, 0.1), law, EMPTY, 0).tolist() == [1.0, 0.0, 0.0, 0.0]


@both
def test_min_p_is_relative_to_the_greatest_probability(probs_of):
    probs = probs_of(logs(0.5, 0.3, 0.2), SamplingParams(min_p=0.5), EMPTY, 0)
    assert probs == pytest.approx([0.625, 0.375, 0.0], abs=MAX_ERROR)


def check_top_n_sigma(probs_of):
    logits = np.array([3.0, 2.0, 1.0, -2.0, -np.inf], dtype=np.float32)
    # Of the finite ones: mean 1, deviation sqrt(3.5) = 1.871.
    for sigma, count in {0.53: 1, 0.54: 2, 1.06: 2, 1.07: 3, 2.67: 3, 2.68: 4}.items():
        params = SamplingParams(top_n_sigma=sigma, temperature=2.0)
        probs = np.array(probs_of(logits, params, EMPTY, 0))
        weights = np.exp(logits[:count] / 2.0)
        assert probs[:count] == pytest.approx(weights / weights.sum(), abs=MAX_ERROR), sigma
        assert not probs[count:].any(), sigma
    # Behind a bias, which moves the greatest logit and the deviation, and a ban, which leaves one logit out.
    biased = SamplingParams(top_n_sigma=1.0, logit_bias=((1, 9.0),))
    assert np.flatnonzero(probs_of(logits, biased, EMPTY, 0)).tolist() == [1]
    banned = SamplingParams(top_n_sigma=1.0, bad_words=((3,),))
    assert np.flatnonzero(probs_of(logits, banned, EMPTY, 0)).tolist() == [0]
    equal = probs_of(np.zeros(4, np.float32), SamplingParams(top_n_sigma=0.1), EMPTY, 0)
    assert [*equal] == [0.25] * 4


@both
def test_top_n_sigma_keeps_what_is_near_the_greatest_logit(probs_of):
    check_top_n_sigma(probs_of)


# A row without a token left has no probabilities.
ERRORS = (AssertionError, TypeError, ValueError)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("processed < finite.max() -", "processed <= finite.max() -"),
        ("finite = processed[np.isfinite(processed)]", "finite = np.maximum(processed, -1e9)"),
        ("finite.std()", "finite.std(ddof=1)"),
        ("params.top_n_sigma * finite", "params.top_n_sigma / params.temperature * finite"),
    ],
)
def test_a_mistake_in_top_n_sigma_is_caught(monkeypatch, old, new):
    assert_caught(monkeypatch, adjust, old, new, lambda: check_top_n_sigma(fast_probs), ERRORS)


@both
def test_penalties_count_prompt_and_output_as_documented(probs_of):
    law = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    history = np.array([0, 1, 2, 2])
    probs = probs_of([2.0, -2.0, 4.0, 1.0], law, history, 2)
    # Prompt 0, 1: halved and doubled; output 2, 2: halved, then -.5 - 2 * .25.
    assert probs == pytest.approx(softmax([1.0, -4.0, 1.0, 1.0]), abs=MAX_ERROR)


@both
def test_bias_comes_before_the_repetition_penalty(probs_of):
    law = SamplingParams(logit_bias=((0, 3.0),), repetition_penalty=2.0)
    probs = probs_of([-1.0, 0.0], law, np.array([0]), 1)
    assert probs == pytest.approx(softmax([1.0, 0.0]), abs=MAX_ERROR)


@both
def test_a_bad_word_is_banned_only_after_its_beginning_was_produced(probs_of):
    law = SamplingParams(bad_words=((1, 2),))
    assert probs_of([0.0] * 3, law, np.array([0, 1]), 1)[2] == 0.0
    assert probs_of([0.0] * 3, law, np.array([1, 0]), 1)[2] > 0.0
    # The prompt is not produced.
    assert probs_of([0.0] * 3, law, np.array([0, 1]), 2)[2] > 0.0


@both
def test_a_bad_word_of_one_token_is_always_banned(probs_of):
    assert probs_of([0.0] * 2, SamplingParams(bad_words=((1,),)), EMPTY, 0).tolist() == [1.0, 0.0]


@both
def test_end_tokens_are_banned_until_min_tokens_exist(probs_of):
    law = SamplingParams(min_tokens=2, end_token_ids=(0,))
    assert probs_of([5.0, 0.0], law, np.array([1, 1]), 1)[0] == 0.0
    assert probs_of([5.0, 0.0], law, np.array([1, 1, 1]), 1)[0] > 0.0


@both
def test_only_allowed_tokens_have_mass(probs_of):
    law = SamplingParams(allowed_token_ids=(1, 2))
    probs = probs_of([9.0, 0.0, 0.0], law, EMPTY, 0)
    assert probs.tolist() == [0.0, 0.5, 0.5]


@both
def test_a_finite_mask_value_carries_no_mass_and_no_warning(probs_of):
    probs = probs_of([0.0, np.finfo(np.float32).min], SamplingParams(temperature=0.1), EMPTY, 0)
    assert probs.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("row", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])  # T36
def test_a_row_that_is_not_finite_has_no_law(row):
    with pytest.raises(ValueError, match="not finite"):
        adjusted_probs(np.array(row), SamplingParams(), EMPTY, 0)
    logits = np.array(row, dtype=np.float32)
    assert adjusted_row(logits, SamplingParams()) is None
    assert adjusted_row(logits, SamplingParams(top_k=1)) is None
    assert greatest_token(logits) is None


def test_bans_that_leave_no_token_have_no_law():
    law = SamplingParams(allowed_token_ids=(0,), bad_words=((0,),))
    with pytest.raises(ValueError, match="not finite"):
        adjusted_probs(np.zeros(2), law, EMPTY, 0)
    assert adjusted_row(process_logits(np.zeros(2, np.float32), law, EMPTY, 0), law) is None


def test_processing_leaves_the_engine_s_logits_unchanged():
    logits = np.array([1.0, 2.0], dtype=np.float32)
    process_logits(logits, SamplingParams(logit_bias=((0, 5.0),), temperature=0.5), EMPTY, 0)
    adjusted_row(logits, SamplingParams(temperature=0.5, min_p=0.5))
    assert logits.tolist() == [1.0, 2.0]


def test_a_smaller_draft_vocabulary_may_share_the_target_s_law():  # T35
    law = SamplingParams(
        allowed_token_ids=(0, 7),
        logit_bias=((7, 1.0),),
        bad_words=((7,),),
        min_tokens=9,
        end_token_ids=(7,),
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    processed = process_logits(np.ones(3, np.float32), law, np.array([7, 0]), 0)
    assert adjusted_row(processed, law).tolist() == [1.0, 0.0, 0.0]


def normal_row(vocab_size, scale, step=0.0):
    """[V] float32 logits; a ``step`` above 0 rounds them to a grid, which makes many of them equal."""
    row = np.random.default_rng(3).normal(size=vocab_size) * scale
    return (np.round(row / step) * step if step else row).astype(np.float32)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab_size", [3000, 20_000])
def test_top_p_is_exact_for_flat_and_peaked_rows_of_large_vocabularies(scale, top_p, vocab_size):
    logits = normal_row(vocab_size, scale)
    law = SamplingParams(top_p=top_p)
    slow = adjusted_probs(logits, law, EMPTY, 0)
    fast = adjusted_row(logits, law)
    # One token at the edge may go either way by the rounding of the mass before it.
    differing = np.flatnonzero((fast > 0.0) != (slow > 0.0))
    assert len(differing) <= 1
    assert abs(fast - slow).max() < MAX_ERROR + slow[differing].sum() + fast[differing].sum()
    assert slow[differing].sum() < 10 / vocab_size


@pytest.mark.parametrize("vocab_size", [3000, 20_000])
@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_tokens_that_tie_at_the_edge_of_a_large_nucleus_are_kept_by_lower_id(vocab_size, top_p):
    logits = normal_row(vocab_size, 0.6, step=0.5)
    fast = adjusted_row(logits, SamplingParams(top_p=top_p))
    slow = adjusted_probs(logits, SamplingParams(top_p=top_p), EMPTY, 0)
    assert abs(int((fast > 0.0).sum()) - int((slow > 0.0).sum())) <= 1
    edge = np.flatnonzero(logits == logits[fast > 0.0].min())
    is_kept = fast[edge] > 0.0
    assert 0 < is_kept.sum() < len(edge)
    assert is_kept.tolist() == sorted(is_kept.tolist(), reverse=True)


@pytest.mark.parametrize("size", [4, 63, 64, 65, 3000])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_the_greatest_tokens_are_those_of_a_stable_sort(size, step):
    logits = normal_row(size, 2.0, step=step)
    for count in {1, 3, size // 2, size - 1, size}:
        expected = np.argsort(-logits, kind="stable")[:count]
        assert ranked_greatest(logits, count).tolist() == expected.tolist()


def test_the_greatest_tokens_may_all_lie_in_one_column():
    logits = np.zeros(4096, dtype=np.float32)
    logits[::64] = np.arange(64) + 1.0
    assert ranked_greatest(logits, 40).tolist() == list(range(63 * 64, 23 * 64, -64))


def test_greatest_tokens_of_many_ties_are_the_lowest_ids():
    assert ranked_greatest(np.array([1.0, 3.0, 1.0, 1.0]), 3).tolist() == [1, 0, 2]


GRID = st.integers(-24, 24).map(lambda n: n / 8)
TOKEN = st.integers(0, 6)


@st.composite
def laws(draw):
    subset = st.lists(TOKEN, max_size=3, unique=True).map(tuple)
    word = st.lists(TOKEN, min_size=1, max_size=2).map(tuple)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 7, 50])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.61, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.07, 0.33, 1.0])),
        top_n_sigma=draw(st.sampled_from([0.0, 0.51, 1.07, 3.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -1.5, 0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 0.7])),
        logit_bias=tuple((token, draw(GRID)) for token in draw(subset)),
        allowed_token_ids=draw(subset),
        bad_words=tuple(draw(st.lists(word, max_size=2))),
        min_tokens=draw(st.integers(0, 3)),
        end_token_ids=draw(subset),
        no_repeat_ngram_size=draw(st.integers(0, 3)),
    )


def is_near_a_cut(logits, law, history, num_prompt, mask):
    """Whether float64 and float32 may rightly disagree on which tokens survive."""
    scores = sorted(processed_scores(logits, law, history, num_prompt, mask), reverse=True)
    gaps = [a - b for a, b in pairwise(scores) if a > b > -np.inf]
    if any(gap < 1e-9 for gap in gaps):
        return True
    if law.is_greedy:
        return False
    if law.top_n_sigma > 0.0:
        # Where the cut lies is known of the scores before it.
        whole = processed_scores(logits, replace(law, top_n_sigma=0.0), history, num_prompt, mask)
        finite = np.array([score for score in whole if score > -np.inf])
        cut = finite.max() - law.top_n_sigma * finite.std()
        if (abs(finite - cut) < 1e-9).any():
            return True
    is_top_k = 0 < law.top_k < len(scores)
    scores = scores[: law.top_k] if is_top_k else scores
    probs = softmax([score / law.temperature for score in scores])
    is_near_min_p = any(abs(p / probs[0] - law.min_p) < 1e-6 and p < probs[0] for p in probs)
    is_near_top_p = law.top_p < 1.0 and bool((abs(np.cumsum(probs) - law.top_p) < 1e-6).any())
    return is_near_min_p or is_near_top_p


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(st.one_of(GRID, st.just(-np.inf)), min_size=7, max_size=7),
    law=laws(),
    history=st.lists(TOKEN, max_size=6),
    num_prompt=st.integers(0, 3),
    bits=st.one_of(st.none(), st.integers(0, 127)),
)
def test_fast_rows_agree_with_the_oracle_for_any_law(logits, law, history, num_prompt, bits):
    tokens = np.array(history, dtype=np.int64)
    num_prompt = min(num_prompt, len(history))
    mask = None if bits is None else np.array([bits], dtype=np.int32)
    row = np.array(logits, dtype=np.float32)
    try:
        slow = adjusted_probs(row, law, tokens, num_prompt, mask)
    except ValueError:
        processed = process_logits(row, law, tokens, num_prompt, mask)
        assert not np.isfinite(row.max()) or greatest_token(processed) is None
        return
    assume(not is_near_a_cut(row, law, tokens, num_prompt, mask))
    assert fast_probs(row, law, tokens, num_prompt, mask) == pytest.approx(slow, abs=MAX_ERROR)
