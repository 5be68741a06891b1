"""The laws that the device sampler's kernels have, against the oracle: whole rounds and single rows."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.noise import CounterNoise, Purpose
from outrider.runtime.oracle.sampling import adjusted_probs
from outrider.runtime.oracle.verification import emitted_probs, point_mass

from tests.engines.accelerators.device.device_laws import laws_of, outcomes, round_law
from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import TableNoise
from tests.runtime.oracle.laws import (
    F1_DRAFT,
    F1_TARGET,
    F4A_RUNS,
    distance,
    f4a_draft,
    f4a_target,
    random_row_of,
)

MAX_ERROR = 1e-6
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def law_of(loaded):
    """``round_law`` of the sampler over four tokens."""

    def params(draft_row, target_row, gamma, given=None, **changes):
        switch, sampler = loaded(4)
        switch.source = noise = TableNoise()
        try:
            return round_law(sampler, noise, draft_row, target_row, gamma, given, **changes)
        finally:
            switch.source = CounterNoise()

    return params


def f1_draft(_):
    return F1_DRAFT


def f1_target(_):
    return F1_TARGET


def widened(row_of):
    """A law over two tokens as one over four."""
    return lambda prefix: np.concatenate([row_of(prefix), [0.0, 0.0]])


def test_the_sampled_round_has_the_oracles_law(law_of):  # T1
    assert (
        distance(law_of(f1_draft, f1_target, 1), emitted_probs(f1_draft, f1_target, 1)) < MAX_ERROR
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_random_pairs_have_the_oracles_law(law_of, seed):
    draft, target = random_row_of(seed, 4), random_row_of(seed + 50, 4, num_zeros=1)
    assert distance(law_of(draft, target, 1), emitted_probs(draft, target, 1)) < MAX_ERROR


def test_the_run_law_of_the_markov_pair(law_of):  # T6b
    assert distance(law_of(widened(f4a_draft), widened(f4a_target), 2), F4A_RUNS) < MAX_ERROR


def test_plain_decoding_has_the_targets_law(law_of):
    probs = law_of(f1_draft, f1_target, 0)
    assert distance(probs, {(t,): p for t, p in enumerate(F1_TARGET)}) < MAX_ERROR


def test_a_truncated_round_has_the_truncated_targets_law(law_of):  # T24
    def kept(row_of):
        return lambda prefix: (
            (row := np.where(row_of(prefix) >= 0.25, row_of(prefix), 0)) / sum(row)
        )

    actual = law_of(f1_draft, f1_target, 1, params=SamplingParams(top_k=2))
    assert distance(actual, emitted_probs(kept(f1_draft), kept(f1_target), 1)) < MAX_ERROR


@pytest.mark.parametrize("lenience", [1.0, 0.8, 0.5])  # T13
def test_the_lenient_round_has_the_oracles_law(law_of, lenience):
    actual = law_of(f1_draft, f1_target, 1, mode=LENIENT, lenience=lenience)
    assert distance(actual, emitted_probs(f1_draft, f1_target, 1, lenience=lenience)) < MAX_ERROR


@pytest.mark.parametrize("lenience", [None, 0.5])  # T18
@pytest.mark.parametrize("token", range(4))
def test_a_point_mass_draft_has_the_oracles_law(law_of, token, lenience):
    changes = {} if lenience is None else {"mode": LENIENT, "lenience": lenience}
    actual = law_of(None, f1_target, 1, (token,), **changes)
    expected = emitted_probs(
        lambda _: point_mass(token, 4), f1_target, 1, lenience=1.0 if lenience is None else lenience
    )
    assert distance(actual, expected) < MAX_ERROR


@pytest.mark.parametrize(
    ("target", "coin", "num_accepted"),
    [
        # Dyadic rows, which come out of the softmax exactly.
        ([0.5, 0.5, 0.0, 0.0], np.nextafter(0.5, 0.0), 1),
        ([0.5, 0.5, 0.0, 0.0], 0.5, 0),
        ([0.0, 1.0, 0.0, 0.0], 0.0, 0),
    ],
)
def test_the_coin_at_the_ratio_itself_rejects(loaded, target, coin, num_accepted):  # T3, T4
    switch, sampler = loaded(4)
    switch.source = noise = TableNoise()
    table = {(Purpose.ACCEPT, 1): float(coin)}
    certain = np.eye(4)[0]
    try:
        found = outcomes(sampler, noise, [table], lambda _: certain, lambda _: np.array(target), 1)
    finally:
        switch.source = CounterNoise()
    assert found[0][:2] == ((0,), num_accepted)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_a_draw_never_yields_a_token_without_mass(loaded, uniform):
    switch, sampler = loaded(4)
    switch.source = noise = TableNoise()
    table = {(Purpose.MATCH, 1): uniform}
    target = np.array([0.0, 0.25, 0.75, 0.0])
    try:
        found = outcomes(sampler, noise, [table], None, lambda _: target, 0)
    finally:
        switch.source = CounterNoise()
    assert found == [((), 0, 1 if uniform == 0.0 else 2)]


HISTORY = np.array([3, 1, 4, 1, 5, 2, 6], dtype=np.int64)
DRAFT = (5, 3, 1)
LAWS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k one": {"top_k": 1},
    "top_k of everything": {"top_k": 9},
    "top_k beyond everything": {"top_k": 100},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-9},
    "top_p of one": {"top_p": 1.0},
    "min_p": {"min_p": 0.2},
    "all three": {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": ((2, 4.0), (6, -100.0), (2, -1.0))},
    "allowed": {"allowed_token_ids": (7, 1, 3)},
    "bad words": {"bad_words": ((4,), (6, 2), (6, 5, 0), (5, 3, 7), (1, 1))},
    "min_tokens": {"min_tokens": 5, "end_token_ids": (0, 8)},
    "everything": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": ((1, 1.5), (5, -0.5)),
        "allowed_token_ids": (0, 1, 2, 3, 5, 6, 8),
        "bad_words": ((3,), (5, 6)),
        "min_tokens": 6,
        "end_token_ids": (2,),
    },
}


def expected_laws(logits, params):
    return np.array(
        [
            adjusted_probs(row, params, np.concatenate([HISTORY, DRAFT[:i]]).astype(np.int64), 4)
            for i, row in enumerate(logits)
        ]
    )


LOGITS = ("random", "tied", "masked")


def law_case(name, kind):
    """A row with a draft, its logits, and the oracle's laws of its positions."""
    params = SamplingParams(**LAWS[name])
    generator = np.random.default_rng([len(name), len(kind)])
    logits = generator.normal(scale=2.0, size=(4, 9)).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits)
    if kind == "masked":
        logits[:, [0, 4]] = -np.inf
        logits[1, 2] = -3e38
    row = row_for(DRAFT, params=params, history=HISTORY, num_prompt=4)
    return row, logits, expected_laws(logits, params)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", LAWS)
def test_every_position_has_the_oracles_law(name, kind):
    row, logits, expected = law_case(name, kind)
    assert np.abs(laws_of(row, logits) - expected).max() < MAX_ERROR


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-3, 1e5, 1e37])
def test_thresholds_are_found_at_every_magnitude_of_a_float(scale):
    steps = np.array([3.0, -2.0, 1.0, 0.0, -1.0, 2.0, -3.0, 0.0, 1.0])
    logits = (steps * scale).astype(np.float32)[None]
    for top_k in range(1, 9):
        params = SamplingParams(top_k=top_k, temperature=max(scale, 1.0))
        expected = set(np.argsort(-logits[0], kind="stable")[:top_k].tolist())
        assert set(np.flatnonzero(laws_of(row_for(params=params), logits)[0]).tolist()) == expected


def test_exactly_k_are_kept_where_neighbouring_floats_decide():
    logits = np.full((1, 9), 1.0, dtype=np.float32)
    logits[0, 5] = np.nextafter(np.float32(1.0), np.float32(2.0))
    assert np.flatnonzero(laws_of(row_for(params=SamplingParams(top_k=1)), logits)[0]).tolist() == [
        5
    ]
    kept = laws_of(row_for(params=SamplingParams(top_k=3)), logits)[0]
    assert np.flatnonzero(kept).tolist() == [0, 1, 5]


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.5, 4), (0.75, 6), (0.125, 1), (0.126, 2)])
def test_the_mass_before_decides_at_the_border_itself(top_p, num_kept):  # T10
    logits = np.zeros((1, 9), dtype=np.float32)
    logits[0, 8] = -np.inf
    kept = laws_of(row_for(params=SamplingParams(top_p=top_p)), logits)[0]
    assert np.flatnonzero(kept).tolist() == list(range(num_kept))
