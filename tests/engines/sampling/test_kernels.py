"""The compiled loops against numpy in float64, and against themselves with a mistake put in."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from outrider.engines.sampling import kernels as row_loops
from outrider.engines.sampling import row_kernels, truncation

# Each may call the ones before it.
MODULES = (row_loops, truncation, row_kernels)


def together(modules):
    """Everything the modules define, under one name."""
    return types.SimpleNamespace(
        **{name: value for one in modules for name, value in vars(one).items()}
    )


kernels = together(MODULES)
SIZES = [1, 2, 63, 64, 65, 700, 4096]
SCALES = [0.0, 1.0, 5.0, 40.0]


def row_of(size, scale, *, step=0.0, dtype=np.float32):
    """Normal logits, on a grid of ``step`` where ties are wanted."""
    values = np.random.default_rng([size, int(scale)]).standard_normal(size) * scale
    return (np.round(values / step) * step if step else values).astype(dtype)


def weights_of(logits, temperature=1.0):
    weights = np.empty(len(logits), dtype=np.float32)
    kernels.write_weights(logits, float(logits.max()), 1.0 / temperature, weights)
    return weights


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_those_of_the_softmax(size, scale, dtype):
    logits = row_of(size, scale, dtype=dtype)
    exact = np.exp((logits - logits.max()).astype(np.float64))
    weights = weights_of(logits)
    normal = exact > 1e-37
    assert weights[normal] == pytest.approx(exact[normal], rel=5e-6)
    assert abs(weights - exact).max() < 1e-6
    assert weights.max() == 1.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", SCALES)
def test_a_law_is_written_behind_the_rows_own_peak(size, scale):
    logits = row_of(size, scale) - 3.0
    probs = np.empty(size, dtype=np.float32)
    mass = kernels.write_softmax(logits, 0.5, probs)
    assert probs.tolist() == weights_of(logits, 2.0).tolist()
    assert mass == kernels.total(probs)


@pytest.mark.parametrize("size", [1, 5, 700])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_law(size, bad):
    for at in {0, size // 2, size - 1}:
        logits = row_of(size, 2.0)
        logits[at] = bad
        probs = np.full(size, 7.0, dtype=np.float32)
        assert kernels.write_softmax(logits, 1.0, probs) == 0.0
        assert (probs == 7.0).all()
    assert kernels.write_softmax(np.full(size, -np.inf, dtype=np.float32), 1.0, probs) == 0.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_the_greatest_is_the_first_of_its_equals(size, step):
    for shift in (-40.0, 0.0):
        logits = row_of(size, 5.0, step=step) + np.float32(shift)
        assert kernels.greatest(logits) == logits.argmax()
    assert kernels.greatest(np.array([-1.0, -0.0, 0.0], dtype=np.float32)) == 1


@pytest.mark.parametrize("size", [1, 5, 700])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_greatest(size, bad):
    for at in {0, size // 2, size - 1}:
        logits = row_of(size, 2.0)
        logits[at] = bad
        assert kernels.greatest(logits) == -1
    assert kernels.greatest(np.full(size, -np.inf, dtype=np.float32)) == -1


def test_peaks_of_either_sign():
    for peak in (-5.0, -0.0, 0.0, 1e-40, 3e38):
        logits = np.array([-np.inf, peak - 1.0, peak, -3e38], dtype=np.float32)
        probs = np.empty(4, dtype=np.float32)
        assert kernels.write_softmax(logits, 1.0, probs) >= 1.0
        assert probs[2] == 1.0
        assert probs[0] == 0.0


def test_few_weights_are_those_of_the_whole_row():
    logits = row_of(700, 2.0)
    ids = kernels.ranked_greatest(logits, 9)
    few = kernels.few_weights(logits, ids, 0.5)
    assert few == pytest.approx(weights_of(logits, 2.0)[ids].astype(np.float64), rel=1e-6)
    assert few[0] == 1.0
    other = np.array([ids[3], ids[0], 699, 1], dtype=np.int64)
    draft, scratch, shared = np.array([0.5, 0.25, 1.0, 2.0]), np.ones(700, np.float32), np.empty(9)
    mass = kernels.write_shared_few(few, ids, draft, other, 0.5, scratch, shared)
    row = np.zeros(700)
    row[other] = draft
    assert shared.tolist() == np.minimum(few, 0.5 * row[ids]).tolist()
    assert mass == pytest.approx(shared.sum())


def test_banned_tokens_and_mask_values_weigh_nothing():
    logits = np.array([3.0e38, -np.inf, -3.0e38, 3.0e38 - 1e32], dtype=np.float32)
    assert weights_of(logits).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert weights_of(logits.astype(np.float64) / 1e37, 2.0)[1] == 0.0


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_right_and_do_not_depend_on_what_lies_behind(size):
    weights = weights_of(row_of(size, 3.0))
    longer = np.concatenate([weights, np.ones(100, dtype=np.float32)])
    assert kernels.total(weights) == pytest.approx(weights.sum(dtype=np.float64), rel=1e-6)
    assert kernels.total(longer[:size]) == kernels.total(weights)


def check_draws(module):
    tiny = 2.0**-24
    # The float32 sum of the last row is 1 + 2 tiny.
    rows = ([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], [1.0], [0.0, 1.0], [1.0, 1.5 * tiny, 0.0])
    for probs in rows:
        weights = np.array(probs, dtype=np.float32)
        ends = np.cumsum(weights, dtype=np.float64)
        for point in (0.0, 0.1, 0.25, 0.3, 0.75, 0.99, 1.0, 1.0 + 1.75 * tiny, 1.5):
            held = np.flatnonzero((ends > point) & (weights > 0.0))
            last = np.flatnonzero(weights)[-1]
            assert module.draw(weights, point) == (held[0] if len(held) else last)


def test_a_point_draws_the_token_whose_interval_holds_it():
    check_draws(kernels)


@pytest.mark.parametrize("size", SIZES)
def test_draws_of_long_rows(size):
    weights = weights_of(row_of(size, 3.0))
    weights[1::3] = 0.0
    ends = np.cumsum(weights, dtype=np.float64)
    for uniform in np.random.default_rng(1).random(200):
        token = kernels.draw(weights, uniform * kernels.total(weights))
        assert weights[token] > 0.0
        assert ends[token] - weights[token] - 1e-5 <= uniform * ends[-1] <= ends[token] + 1e-5


@pytest.mark.parametrize("num_draft", [3, 700, 900])
def test_what_two_rows_share(num_draft):
    target, draft = weights_of(row_of(700, 2.0)), weights_of(row_of(num_draft, 2.0))
    shared = np.full(700, np.nan, dtype=np.float32)
    mass = kernels.write_shared(target, draft, 0.5, shared)
    known = np.zeros(700, dtype=np.float32)
    known[: min(num_draft, 700)] = draft[:700]
    assert shared.tolist() == np.minimum(target, known * np.float32(0.5)).tolist()
    assert mass == kernels.total(shared)
    rest = kernels.leave_rest(target, shared)
    assert rest == pytest.approx(kernels.total(target) - mass, rel=1e-5)
    assert (shared >= 0.0).all()


def check_ranks(module):
    for size in (1, 2, 5, 63, 64, 65, 130):
        logits = row_of(size, 2.0, step=1.0)
        for count in {1, 2, size // 2, size} & set(range(1, size + 1)):
            expected = np.argsort(-logits, kind="stable")[:count]
            assert module.ranked_greatest(logits, count).tolist() == expected.tolist()


def test_ranks_are_those_of_a_stable_sort():
    check_ranks(kernels)


def nucleus(weights, logits, mass_wanted):
    """Kept ids by the definition: less than the wanted mass ranked before."""
    order = np.lexsort((np.arange(len(weights)), -logits, -weights))
    before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
    return sorted(order[before < mass_wanted])


def check_nuclei(module):
    """Weights are multiples of a power of two, octaves apart or close together, and every sum is exact."""
    for size in (1, 6, 64, 65, 200):
        levels = np.random.default_rng(size).integers(0, 8, size)
        for weights in (np.exp2(-levels), 1.0 - levels / 128):
            check_nuclei_of(module, weights.astype(np.float32))


def check_nuclei_of(module, weights):
    logits = weights * 3.0
    sums = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
    for mass in (*sums[:: 1 + len(sums) // 20], *(sums[-1] * np.arange(1, 20) / 20)):
        kept = weights.copy()
        module.keep_nucleus(kept, logits, mass)
        assert np.flatnonzero(kept).tolist() == nucleus(weights, logits, mass)
        assert (kept[kept > 0.0] == weights[kept > 0.0]).all()
        few = np.sort(weights)[::-1].astype(np.float64)
        assert module.nucleus_size(few, mass) == (kept > 0.0).sum()


def test_nuclei_are_those_of_the_definition():
    check_nuclei(kernels)


def test_a_nucleus_ranks_equal_weights_by_logit_and_then_by_id():
    logits = np.array([0.0, -50.0, -49.0, -50.0, -49.0], dtype=np.float32)
    weights = np.array([1.0, 0.25, 0.25, 0.25, 0.25], dtype=np.float32)
    kernels.keep_nucleus(weights, logits, 1.75)
    assert weights.tolist() == [1.0, 0.25, 0.25, 0.0, 0.25]


def test_a_nucleus_of_a_row_of_tiny_weights():
    weights = np.full(3000, 2.0**-40, dtype=np.float32)
    weights[7] = 1.0
    logits = np.log2(weights)
    kernels.keep_nucleus(weights, logits, 1.0 + 2.0**-39)
    assert np.flatnonzero(weights).tolist() == [0, 1, 7]


def check_truncation(module):
    """Top-p first, min-p on what it left; weights are dyadic, so every sum is exact."""
    weights = np.array([0.5, 0.125, 1.0, 0.25, 0.125], dtype=np.float32)
    for top_p, min_p, expected in (
        (1.0, 0.0, [0.5, 0.125, 1.0, 0.25, 0.125]),
        (0.75, 0.0, [0.5, 0.0, 1.0, 0.0, 0.0]),
        (1.0, 0.25, [0.5, 0.0, 1.0, 0.25, 0.0]),
        (0.875, 0.5, [0.5, 0.0, 1.0, 0.0, 0.0]),
        (0.9375, 0.0, [0.5, 0.125, 1.0, 0.25, 0.0]),
    ):
        left = weights.copy()
        assert module.truncate(left, np.log2(weights), 2.0, top_p, min_p) == sum(expected)
        assert left.tolist() == expected


def test_a_truncated_row_keeps_the_nucleus_and_what_is_near_the_peak():
    check_truncation(kernels)


def check_keeping(module):
    """(u, l, p(x), sum p, q(x), sum q), all dyadic; at equality the token is not kept."""
    for case, expected in (
        ((0.5, 1.0, 1.0, 4.0, 1.0, 2.0), False),
        ((0.25, 1.0, 1.0, 4.0, 1.0, 2.0), True),
        ((0.5, 0.5, 1.0, 4.0, 1.0, 2.0), True),
        ((0.5, 1.0, 1.0, 2.0, 1.0, 4.0), True),
        ((0.0, 1.0, 0.0, 2.0, 1.0, 4.0), False),
        ((0.0, 1.0, 1.0, 2.0, 0.0, 4.0), True),
    ):
        assert module.is_kept(*case) is expected


def test_a_token_is_kept_below_the_ratio():
    check_keeping(kernels)


def check_residuals(module):
    weights = np.array([0.5, 0.25, 0.25], dtype=np.float32)
    least = 2.0**-19  # 1.9e-6
    for taken, mass in (
        ([0.5, 0.0, 0.125], 0.375),
        ([0.5, 0.25, 0.25 - least], least),
        ([0.5, 0.25, 0.25 - 2.0**-22], 0.0),
    ):
        rest = np.array(taken, dtype=np.float32)
        assert module.leave_residual(weights, rest, 1.0) == mass
        assert rest.tolist() == (weights - np.array(taken, dtype=np.float32)).tolist()


def test_a_residual_of_rounding_has_no_mass():
    check_residuals(kernels)


MUTANTS = {
    "min-p drops what equals it": ("weights[i] < least", "weights[i] <= least", check_truncation),
    "top-p of a sum of 1": ("logits, top_p * mass)", "logits, top_p)", check_truncation),
    "min-p only where top-p is on": (
        "top_p == 1.0 and min_p == 0.0",
        "top_p == 1.0",
        check_truncation,
    ),
    "a token at the ratio kept": (
        "* target_total < target_weight",
        "* target_total <= target_weight",
        check_keeping,
    ),
    "lenience left out": ("coin * lenience *", "coin *", check_keeping),
    "laws compared unnormalised": (
        "draft_weight * target_total < target_weight * draft_total",
        "draft_weight < target_weight",
        check_keeping,
    ),
    "a residual of rounding drawn from": (
        "left > SMALLEST_RESIDUAL * mass",
        "left > 0.0",
        check_residuals,
    ),
    "a residual of a thousandth for rounding": (
        "SMALLEST_RESIDUAL = 1e-6",
        "SMALLEST_RESIDUAL = 1e-3",
        check_residuals,
    ),
    "a token without weight drawn": ("if block[i] > 0.0:", "if True:", check_draws),
    "a point at the end of an interval": ("if within > point:", "if within >= point:", check_draws),
    "equal logits ranked by higher id": ("right > left", "right < left", check_ranks),
    "a later equal logit displaces": (
        "if logits[i] > logits[ids[0]]:",
        "if logits[i] >= logits[ids[0]]:",
        check_ranks,
    ),
    "a block of the greatest skipped": (
        "num_above += block[i] > least",
        "num_above += block[i] > least + 1.0",
        check_ranks,
    ),
    "a token too many in the nucleus": (
        "if mass >= mass_wanted:",
        "if mass > mass_wanted:",
        check_nuclei,
    ),
    "below the nucleus' last bin kept": (
        "bits[i] if bits[i] >= lowest else",
        "bits[i] if bits[i] >= lowest - np.int32(1 << 17) else",
        check_nuclei,
    ),
    "the nucleus' last bin cut off": (
        "if lowest <= block[i] < above:",
        "if lowest < block[i] < above:",
        check_nuclei,
    ),
    "a token too many of the ranked": (
        "and mass < mass_wanted:\n        mass",
        "and mass <= mass_wanted:\n        mass",
        check_nuclei,
    ),
}


COMPILER = re.compile("from outrider.engines.jit import .*\n")
NO_COMPILER = "njit_fastmath = njit_exact = lambda *_: lambda function: function\n"


def interpreted(old="", new=""):
    """The kernels without the compiler, with one text replaced, which must stand in one place."""
    sources = {one.__name__: inspect.getsource(one) for one in MODULES}
    assert not old or sum(map(str.count, sources.values(), [old] * len(MODULES))) == 1, old
    built = []
    with pytest.MonkeyPatch.context() as patch:
        for name, source in sources.items():
            plain, num_replaced = COMPILER.subn(NO_COMPILER, source)
            assert num_replaced == 1
            built.append(types.ModuleType(name))
            patch.setitem(sys.modules, name, built[-1])  # for those that import from it
            exec(compile(plain.replace(old, new) if old else plain, name, "exec"), vars(built[-1]))
    return together(built)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name):
    old, new, check = MUTANTS[name]
    check(interpreted())
    with pytest.raises(AssertionError):
        check(interpreted(old, new))


def test_kernels_are_compiled_where_no_folder_may_be_written_to():
    # A locator for notebooks alone finds no place for a file's functions, as a read-only disk has none.
    draws = "import numpy; from outrider.engines.sampling import kernels; print(kernels.draw(numpy.ones(3), 1.5))"
    ran = subprocess.run(
        [sys.executable, "-c", draws],
        env={**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout == "1\n", ran.stderr
    assert "NUMBA_CACHE_DIR" in ran.stderr
