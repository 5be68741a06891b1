"""Weights as integers: how far from the weight, and how far from its product."""

import itertools

import numpy as np
import pytest
from outrider.engines.base import FloatArray
from outrider.export.weights.rounding import restore, round_by_activations, round_to_nearest


@pytest.mark.parametrize(("bits", "block_size"), [(8, 32), (8, 64), (8, 192), (4, 32)])
def test_nearest_is_within_half_a_scale(bits: int, block_size: int) -> None:
    weight = np.random.default_rng(3).normal(size=(192, 7)).astype(np.float32)
    weight[:, 2] = 0
    integers, scales = round_to_nearest(weight, bits=bits, block_size=block_size)
    assert scales.shape == (192 // block_size, 7)
    assert np.abs(integers).max() == 2 ** (bits - 1) - 1
    limit = np.repeat(scales, block_size, axis=0) * 0.5001
    assert (np.abs(restore(integers, scales) - weight) <= limit).all()
    assert (restore(integers, scales)[:, 2] == 0).all()


def correlated(num_channels: int, *, seed: int) -> FloatArray:
    """Activations [400, K] whose channels go together, one of them never."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(400, 12)) @ rng.normal(size=(12, num_channels))
    mixed += 0.2 * rng.normal(size=mixed.shape)
    mixed[:, 5] = 0
    return mixed.astype(np.float32)


@pytest.mark.parametrize(("bits", "block_size"), [(8, 32), (8, 64), (8, 192), (4, 32)])
def test_rounding_by_activations_keeps_products_closer(bits: int, block_size: int) -> None:
    """On activations that were not seen, too."""
    seen, unseen = np.split(correlated(192, seed=1), 2)
    weight = np.random.default_rng(4).normal(size=(192, 9)).astype(np.float32)
    weight[:, 4] = 0
    nearest = round_to_nearest(weight, bits=bits, block_size=block_size)
    found = round_by_activations(weight, seen, bits=bits, block_size=block_size)
    errors = [np.square(unseen @ (restore(*one) - weight)).mean() for one in (nearest, found)]
    assert errors[1] < 0.2 * errors[0]
    assert np.abs(found[0]).max() <= 2 ** (bits - 1) - 1
    assert (restore(*found)[:, 4] == 0).all()


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    weight = np.random.default_rng(4).normal(size=(192, 9)).astype(np.float32)
    nearest = round_to_nearest(weight, bits=8, block_size=64)
    found = round_by_activations(weight, np.eye(192, dtype=np.float32), bits=8, block_size=64)
    for one, other in zip(nearest, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_row_makes_up_as_well_as_it_can() -> None:
    """Of two rows: the second is, of all integers, the one that leaves the least error behind the first."""
    rng = np.random.default_rng(6)
    given = rng.normal(size=(50, 2)) @ np.array([[1.0, 0.9], [0.0, 0.4]])
    given = given.astype(np.float32)
    weight = rng.normal(size=(2, 30)).astype(np.float32)
    integers, scales = round_by_activations(weight, given, bits=4, block_size=2)
    moments = given.T.astype(np.float64) @ given
    moments += np.eye(2) * 0.01 * np.diag(moments).mean()
    for column in range(30):
        scale = scales[0, column]
        first = np.rint(weight[0, column] / scale)
        assert integers[0, column] == first

        def error(second: int, column: int = column, first: float = first) -> float:
            off = np.array([first, second]) * scales[0, column] - weight[:, column]
            return float(off @ moments @ off)

        assert integers[1, column] == min(range(-7, 8), key=error)


def test_panels_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row loses reaches those behind it, however many are finished at once."""
    weight = np.random.default_rng(4).normal(size=(192, 9)).astype(np.float32)
    found = []
    for num_lazy in (64, 128, 192):
        monkeypatch.setattr("outrider.export.weights.rounding._NUM_LAZY", num_lazy)
        found.append(round_by_activations(weight, correlated(192, seed=2), bits=4, block_size=64))
    for (first, _), (second, _) in itertools.pairwise(found):
        # Sums in another order turn a tie now and then.
        assert (first != second).mean() < 0.01
