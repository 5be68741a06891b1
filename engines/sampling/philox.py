"""The generator of all noise: Philox 4x64 with ten rounds, one number at a time.

Compiled, so that other compiled loops can draw. Pinned to numpy's generator by tests and never to be changed: a seed
means the same for ever.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, uint64
from outrider.engines.jit import njit_exact

# Streams, which are halves of a key, and the words of a round's: where each purpose finds its number, for ever.
ROUND_STREAM, MATCH_STREAM, RACE_STREAM = 1, 5, 6
DRAFT_WORD, ACCEPT_WORD, RECOVER_WORD, BONUS_WORD = range(4)
MATCH_WORD = 0
NUM_WORDS = 4

_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_KEY_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_NUM_ROUNDS = 10
_HALF_BITS = np.uint64(32)
_HALF_MASK = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
# The upper 53 bits of a word, as a multiple of 2 ** -53.
_UNUSED_BITS = np.uint64(11)
_STEP = 2.0**-53


@njit_exact(uint64(uint64, uint64))
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper 64 bits of a product, from products of halves."""
    a_low, a_high = a & _HALF_MASK, a >> _HALF_BITS
    b_low, b_high = b & _HALF_MASK, b >> _HALF_BITS
    upper = a_high * b_low + ((a_low * b_low) >> _HALF_BITS)
    lower = a_low * b_high + (upper & _HALF_MASK)
    return a_high * b_high + (upper >> _HALF_BITS) + (lower >> _HALF_BITS)


@njit_exact(float64(uint64, uint64, int64, uint64, uint64, uint64, uint64))
def number(
    seed: int,
    stream: int,
    word: int,
    counter0: int | np.uint64,
    counter1: int | np.uint64,
    counter2: int | np.uint64,
    counter3: int | np.uint64,
) -> float:
    """A number in [0, 1): 53 bits of one of the four words that a key and a counter yield.

    Args:
        seed: first half of the key.
        stream: second half.
        word: 0..3.
        counter0: stepped before it is used, as numpy steps it.
        counter1: the other words of the counter, as are
        counter2: and
        counter3: taken as they are.
    """
    x0, x1 = np.uint64(counter0) + _ONE, np.uint64(counter1)
    x2, x3 = np.uint64(counter2), np.uint64(counter3)
    k0, k1 = np.uint64(seed), np.uint64(stream)
    for _ in range(_NUM_ROUNDS):
        high0, high2 = _high(_MULTIPLIERS[0], x0), _high(_MULTIPLIERS[1], x2)
        low0, low2 = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = high2 ^ x1 ^ k0, low2, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    if word == 0:
        chosen = x0
    elif word == 1:
        chosen = x1
    elif word == 2:
        chosen = x2
    else:
        chosen = x3
    share: float = float64(chosen >> _UNUSED_BITS) * _STEP
    return share


@njit_exact(float64(uint64, uint64, int64, uint64, uint64))
def uniform(seed: int, stream: int, word: int, position: int, round_number: int) -> float:
    """The number of a position in a round, or in round 0 where rounds do not matter; see ``number``."""
    return number(seed, stream, word, position, 0, round_number, 0)
