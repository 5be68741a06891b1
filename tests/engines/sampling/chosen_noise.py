"""Noise of the test's choice, and the exact law that a sampler has over all noise.

``ChosenNoise`` answers each draw from a list and stops the run at the first draw beyond it, so the walk below can find,
for that draw, where in [0, 1) the continuation changes: by scanning a grid and bisecting between different neighbours.
What comes out is the sampler's own law, rounding included, with no formula of the oracle in it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from outrider.engines.sampling.noise import CounterNoise

# Of overlaps, which samplers sum in other orders.
MAX_ERROR = 1e-6


class NeedsDrawError(BaseException):
    """The run asked for a number beyond the chosen ones; ``address`` is what it asked for."""

    def __init__(self, address):
        super().__init__(str(address))
        self.address = address


class ChosenNoise:
    """A ``NoiseSource`` whose uniforms are chosen, in the order they are asked for."""

    def __init__(self, values=()):
        self.values = list(values)
        self.addresses = []

    def uniform(self, seed, *, purpose, position, round_start):
        return self._next((purpose, position, round_start))

    def _next(self, address):
        if len(self.addresses) == len(self.values):
            raise NeedsDrawError(address)
        self.addresses.append(address)
        return self.values[len(self.addresses) - 1]

    def of_sibling(self, seed, *, purpose, position, round_start, node, index):
        return self._next((purpose, position, round_start, node, index))

    def exponentials(self, seed, position, size):
        return CounterNoise().exponentials(seed, position, size)


class FixedNoise(ChosenNoise):
    """The same uniform for every draw, and given exponentials at every position."""

    def __init__(self, *, uniform=0.5, exponentials=None):
        super().__init__()
        self.value = uniform
        self.race = exponentials

    def uniform(self, seed, *, purpose, position, round_start):
        return self.value

    def exponentials(self, seed, position, size):
        return np.array(self.race[:size], dtype=np.float32)


GRID = np.concatenate([[0.0], (np.arange(24) + 0.5) / 24, [1.0 - 2.0**-53]])
NUM_BISECTIONS = 28  # 1/24 * 2 ** -28 is 2e-10


def law_of(run):
    """Law of ``run(noise)`` over independent uniforms, as outcome -> probability.

    Args:
        run: a function of a ``ChosenNoise``; returns a hashable outcome. Whatever a draw changes must show in the
            outcome, in the address of the next draw, or in ``noise.trail`` where a draft token is appended.
    """
    probs = {}

    def walk(values, mass):
        for low, high, kind in _pieces(run, values):
            share = mass * (high - low)
            middle = (low + high) / 2
            if kind[0] == "done":
                probs[kind[1]] = probs.get(kind[1], 0.0) + share
            else:
                walk([*values, middle], share)

    first = _kind(run, [])
    if first[0] == "done":
        return {first[1]: 1.0}
    walk([], 1.0)
    return probs


def _kind(run, values):
    noise = ChosenNoise(values)
    noise.trail = []
    try:
        return ("done", run(noise))
    except NeedsDrawError as missing:
        return ("draw", missing.address, tuple(noise.trail))


def _pieces(run, values):
    """Intervals of the next uniform on which the continuation is of one kind."""
    points = [(float(u), _kind(run, [*values, float(u)])) for u in GRID]
    cuts = [0.0]
    kinds = [points[0][1]]
    for (low, kind), (high, next_kind) in pairwise(points):
        if kind != next_kind:
            cuts.append(_cut(run, values, low, high, kind))
            kinds.append(next_kind)
    cuts.append(1.0)
    return [(low, high, kind) for (low, high), kind in zip(pairwise(cuts), kinds, strict=True)]


def _cut(run, values, low, high, kind):
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        if _kind(run, [*values, middle]) == kind:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class TableNoise:
    """A ``NoiseSource`` that looks its uniforms up by (seed, purpose, position)."""

    def __init__(self):
        self.tables = []

    def uniform(self, seed, *, purpose, position, round_start):
        return self.tables[seed].get((purpose, position), 0.5)

    def exponentials(self, seed, position, size):
        return CounterNoise().exponentials(seed, position, size)


def logits_of(*rows):
    """[R, V] float32 logits of probability rows."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows)).astype(np.float32)


def same(one, other):
    """Whether two verdicts agree, overlaps up to rounding."""
    return (one.num_accepted, one.next_token, one.num_fallbacks) == (
        other.num_accepted,
        other.next_token,
        other.num_fallbacks,
    ) and one.overlaps == pytest.approx(other.overlaps, abs=MAX_ERROR)
