"""Counter-based noise: every random number is a function of its address, never of what was drawn before.

An address is (seed, purpose, position, round). Philox 4x64 maps it to numbers: seed and purpose are the key, position
and round are two words of the counter, and the word below them counts the numbers drawn at this address. A request's
tokens therefore depend neither on its batch neighbours nor on how much noise others used.

Which address a draw has decides whether the output keeps the target's law:

* N1  Draws of different purposes are never shared: a draft draw, the coin that judges it and the draw after a
  rejection are independent.
* N2  A draw whose number is revealed without its token being emitted (a draft, a coin) is keyed by the round as
  well, so the same position is drafted afresh in a later round.
* N3  ``MATCH`` and ``RACE`` are keyed by the position alone: what they yield at a position is emitted there whatever
  the draft was, so the same seed gives the same tokens with and without a draft.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); the generator is numpy's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.base import FloatArray

UniformArray = npt.NDArray[np.float64]

_WORD_MASK = (1 << 64) - 1
_MANTISSA_BITS = 53
_MANTISSA_STEP = 2.0**-_MANTISSA_BITS
_PHILOX_BUFFER_LENGTH = 4


class Purpose(IntEnum):
    """What a number is drawn for; part of its address (N1).

    DRAFT: a draft token. ACCEPT: the coin that judges one. RECOVER: the token after a rejection. BONUS: the token
    after a fully accepted draft. MATCH: a token drawn from the target and compared with the draft, or plain decoding.
    RACE: the exponentials that draft and target share.
    """

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    BONUS = 4
    MATCH = 5
    RACE = 6


class NoiseSource(Protocol):
    """Where a sampler takes its random numbers from; tests pass numbers of their choice."""

    def uniforms(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int | None, count: int
    ) -> UniformArray:
        """[count] float64 in [0, 1)."""
        ...

    def exponentials(self, seed: int, position: int, size: int) -> FloatArray:
        """[size] float32, positive."""
        ...


class CounterNoise:
    """The noise of production. Holds one generator to reposition, no state that a draw could depend on.

    Not thread-safe. Repositioning costs 2 us where a fresh generator costs 20 us.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)

    def uniforms(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int | None, count: int
    ) -> UniformArray:
        """Numbers at one address.

        Args:
            seed: 64-bit seed of the request; higher bits are ignored.
            purpose: see ``Purpose``.
            position: index in the sequence of the token that the numbers decide.
            round_start: length of the sequence when the round began (N2), or None for noise that is the same in every
                round (N3).
            count: how many.

        Returns:
            [count] float64 in [0, 1), multiples of 2 ** -53.
        """
        mantissas = self._mantissas(seed, purpose, position, round_start, count)
        return mantissas.astype(np.float64) * _MANTISSA_STEP

    def exponentials(self, seed: int, position: int, size: int) -> FloatArray:
        """Standard exponentials, one per token id, that draft and target share at one position.

        Entry x is the same for every ``size`` > x, so models of different vocabularies share the noise too.

        Returns:
            [size] float32, positive and finite.
        """
        mantissas = self._mantissas(seed, Purpose.RACE, position, None, size)
        centred = (mantissas.astype(np.float64) + 0.5) * _MANTISSA_STEP
        # The race is won by the smallest values: log1p keeps their relative precision, log(1 - u) would not.
        values: FloatArray = (-np.log1p(-centred)).astype(np.float32)
        return values

    def _mantissas(
        self, seed: int, purpose: Purpose, position: int, round_start: int | None, count: int
    ) -> npt.NDArray[np.uint64]:
        round_word = 0 if round_start is None else round_start + 1
        self._generator.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([0, position, round_word, 0], dtype=np.uint64),
                "key": np.array([seed & _WORD_MASK, int(purpose)], dtype=np.uint64),
            },
            "buffer": np.zeros(_PHILOX_BUFFER_LENGTH, dtype=np.uint64),
            "buffer_pos": _PHILOX_BUFFER_LENGTH,
            "has_uint32": 0,
            "uinteger": 0,
        }
        raw = self._generator.random_raw(count)
        return np.asarray(raw, dtype=np.uint64) >> np.uint64(64 - _MANTISSA_BITS)


def uniforms(
    seed: int, *, purpose: Purpose, position: int, round_start: int | None, count: int
) -> UniformArray:
    """[count] float64 in [0, 1) at one address; see ``CounterNoise.uniforms``."""
    return CounterNoise().uniforms(
        seed, purpose=purpose, position=position, round_start=round_start, count=count
    )


def exponentials(seed: int, position: int, size: int) -> FloatArray:
    """[size] float32 standard exponentials; see ``CounterNoise.exponentials``."""
    return CounterNoise().exponentials(seed, position, size)
