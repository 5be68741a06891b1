"""Small laws with known answers, and laws of whole token runs."""

from __future__ import annotations

import numpy as np

# A four-token pair: overlap .8, residual (.5, 0, 0, .5).
F1_DRAFT = np.array([0.3, 0.4, 0.1, 0.2])
F1_TARGET = np.array([0.4, 0.2, 0.1, 0.3])


def f4a_target(prefix):
    """First token fair, then three quarters on the token before."""
    if not prefix:
        return np.array([0.5, 0.5])
    return np.array([0.75, 0.25]) if prefix[-1] == 0 else np.array([0.25, 0.75])


def f4a_draft(prefix):
    return np.array([0.5, 0.5]) if prefix else np.array([0.75, 0.25])


F4A_RUNS = {
    (1,): 1 / 4,
    (0, 0): 1 / 8,
    (1, 1): 1 / 16,
    (0, 0, 0): 3 / 16,
    (0, 0, 1): 1 / 16,
    (0, 1, 0): 1 / 32,
    (0, 1, 1): 3 / 32,
    (1, 0, 0): 3 / 64,
    (1, 0, 1): 1 / 64,
    (1, 1, 0): 1 / 32,
    (1, 1, 1): 3 / 32,
}


def random_row_of(seed, vocab_size, *, num_zeros=0):
    """A context-dependent law: an independent random row for every prefix, some tokens of which have no mass."""

    def row_of(prefix):
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        row = generator.dirichlet(np.full(vocab_size, 0.7))
        row[generator.permutation(vocab_size)[:num_zeros]] = 0.0
        return row / row.sum()

    return row_of


def distance(one, other):
    """Greatest difference of two laws at any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
