"""Counter-based noise: every random number is a function of its address, never of what was drawn before.

An address is (seed, purpose, position, round). Philox 4x64 (``engines.sampling.philox``) maps a key and a counter to
four words. The key is the seed and a stream; the counter counts positions, and its third word is the round. What a
round draws once per position has one word each of one stream: drafts, coins, draws after a rejection and after a
fully accepted draft. Matched draws and races have streams of their own, and so have the candidates of a tree and
their coins: there the counter also counts siblings and nodes. A request's tokens therefore depend neither on its
batch neighbours nor on how much noise others used.

Addresses decide whether the output keeps the target's distribution:

* N1  Draws of different purposes are never shared: a draft draw, the coin that judges it and the draw after a
  rejection are independent.
* N2  A draw whose number is revealed without its token being emitted (a draft, a coin) is keyed by the round as well.
  So the same position is drafted afresh in a later round.
* N3  ``MATCH`` and ``RACE`` are keyed by the position alone: what they yield at a position is emitted there whatever
  the draft was, so the same seed gives the same tokens with and without a draft.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); races are numpy's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling import philox

_WORD_MASK = (1 << 64) - 1
_RACE_BITS = 32
_LEAST_ABOVE_MINUS_ONE = np.float32(2.0**-24 - 1.0)
# A round asks for each of its races twice, to draft and to verify: 32 MB keep 55 of a vocabulary of 151,936.
_MOST_RACE_VALUES = 1 << 23
# Of a small vocabulary that would be rows of requests long gone; these are as many as 56 rows of 9 drafts need.
_MOST_RACES = 512


class Purpose(IntEnum):
    """Purpose of a random number; part of its address (N1).

    DRAFT: a draft token. ACCEPT: the coin that judges one, or the run that ends with it. RECOVER: the token after a
    rejection. BONUS: the token after a fully accepted draft. MATCH: a token drawn from the target and compared with the
    draft, or plain decoding. RACE: the exponentials that draft and target share. CANDIDATE: a candidate of a node
    of a tree. CANDIDATE_COIN: the coin that judges one.
    """

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    BONUS = 4
    MATCH = 5
    RACE = 6
    CANDIDATE = 7
    CANDIDATE_COIN = 8


_PLACES = {
    Purpose.DRAFT: (philox.ROUND_STREAM, philox.DRAFT_WORD),
    Purpose.ACCEPT: (philox.ROUND_STREAM, philox.ACCEPT_WORD),
    Purpose.RECOVER: (philox.ROUND_STREAM, philox.RECOVER_WORD),
    Purpose.BONUS: (philox.ROUND_STREAM, philox.BONUS_WORD),
    Purpose.MATCH: (philox.MATCH_STREAM, philox.MATCH_WORD),
}


class NoiseSource(Protocol):
    """Source of a sampler's random numbers; tests pass numbers of their choice."""

    def uniform(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int | None
    ) -> float:
        """A number in [0, 1)."""
        ...

    def of_sibling(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int, node: int, index: int
    ) -> float:
        """A number in [0, 1)."""
        ...

    def exponentials(self, seed: int, position: int, size: int) -> FloatArray:
        """[size] float32, positive."""
        ...


class CounterNoise:
    """The noise of production.

    Holds one generator to reposition and races it may be asked for again; no number depends on what was drawn
    before. Not thread-safe. Repositioning in place costs 1 us, a fresh generator 20 us.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._counter = np.zeros(4, dtype=np.uint64)
        self._key = np.zeros(2, dtype=np.uint64)
        self._buffer = np.zeros(philox.NUM_WORDS, dtype=np.uint64)
        self._races: dict[tuple[int, int], FloatArray] = {}
        self._num_kept = 0

    def uniform(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int | None
    ) -> float:
        """Return the number at an address.

        Args:
            seed: 64-bit seed of the request; higher bits are ignored.
            purpose: see ``Purpose``; not a race.
            position: index in the sequence of the token that the number decides.
            round_start: length of the sequence when the round began (N2), or None for noise that is the same in every
                round (N3).

        Returns:
            A multiple of 2 ** -53 in [0, 1).
        """
        stream, word = _PLACES[purpose]
        round_number = 0 if round_start is None else round_start + 1
        return philox.uniform(seed & _WORD_MASK, stream, word, position, round_number)

    def of_sibling(
        self, seed: int, *, purpose: Purpose, position: int, round_start: int, node: int, index: int
    ) -> float:
        """Return the number of one candidate of one node of a round's tree (N2).

        Args:
            seed: as for ``uniform``.
            purpose: a candidate or its coin.
            position: of the token that the candidate proposes.
            round_start: length of the sequence when the round began.
            node: that the candidate stands behind, as the tree's drafter numbers its nodes.
            index: of the candidate among its siblings, in the order of drafting.

        Returns:
            A multiple of 2 ** -53 in [0, 1).
        """
        group, word = divmod(index, philox.NUM_WORDS)
        counter = (group, position, round_start + 1, node)
        return philox.number(seed & _WORD_MASK, int(purpose), word, *counter)

    def exponentials(self, seed: int, position: int, size: int) -> FloatArray:
        """Return standard exponentials, one per token id, that draft and target share at one position.

        Entry x is the same for every ``size`` > x, so models of different vocabularies share the noise too.

        Returns:
            [size] float32, positive and finite; not to be written to.
        """
        address = (seed & _WORD_MASK, position)
        race = self._races.get(address)
        if race is None or len(race) < size:
            race = self._draw_race(seed, position, size)
            self._keep_race(address, race)
        return race[:size]

    def _draw_race(self, seed: int, position: int, size: int) -> FloatArray:
        """32 bits each are plenty: the least of V exponentials is near 1 / V, and 2 ** -32 resolves that.

        log1p in float32 keeps the relative precision of small values, which win the race.
        """
        self._move_to(seed, position)
        words = self._generator.random_raw(-(-size // 2)).view(np.uint32)[:size]
        values: FloatArray = words.astype(np.float32)
        values += 0.5
        values *= -(2.0**-_RACE_BITS)
        np.maximum(values, _LEAST_ABOVE_MINUS_ONE, out=values)
        np.log1p(values, out=values)
        return np.negative(values, out=values)

    def _keep_race(self, address: tuple[int, int], race: FloatArray) -> None:
        """Keep a row, and forget the oldest ones beyond the bound."""
        replaced = self._races.pop(address, None)
        self._num_kept += len(race) - (0 if replaced is None else len(replaced))
        self._races[address] = race
        while len(self._races) > 1 and (
            self._num_kept > _MOST_RACE_VALUES or len(self._races) > _MOST_RACES
        ):
            oldest = next(iter(self._races))
            self._num_kept -= len(self._races.pop(oldest))

    def _move_to(self, seed: int, position: int) -> None:
        self._counter[1] = position
        self._key[0] = seed & _WORD_MASK
        self._key[1] = philox.RACE_STREAM
        self._generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": self._buffer,
            "buffer_pos": philox.NUM_WORDS,
            "has_uint32": 0,
            "uinteger": 0,
        }
