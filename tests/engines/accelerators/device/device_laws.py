"""The exact law of a device sampler's round, by walking its noise in batches.

A device is given all the noise of a round at once, so the walk of ``chosen_noise``, which follows one
draw after another, does not apply. Here every number of a round is a coordinate. Along each the
outcome is piecewise constant; the pieces are found by a grid and by bisecting all their borders at
once, each trial a row of one batch with a seed of its own. What comes out is the kernels' own law,
rounding included. ``laws_of`` reads the laws of a row's single positions.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from outrider.engines.accelerators.device.base import DeviceTensor, HostDevice
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.kernels.launches import Launches
from outrider.engines.accelerators.device.sampling.rows import Shape, describe
from outrider.engines.accelerators.device.sampling.tensors import Count, Rule, Stage
from outrider.engines.sampling.noise import Purpose

from tests.emulation.kernels.host import HostKernels
from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import logits_of

GRID = np.concatenate([[0.0], (np.arange(16) + 0.5) / 16, [1.0 - 2.0**-53]])
NUM_BISECTIONS = 28
MAX_GAMMA = 4
MAX_TRIALS = len(GRID)


def outcomes(sampler, noise, tables, draft_row, target_row, gamma, given=None, **changes):
    """(draft, num_accepted, next token) of one round per noise table, in one batch."""
    noise.tables = tables
    rows = [row_for(index=i, slot=i, seed=i, **changes) for i in range(len(tables))]
    drafts = [() if given is None else given for _ in rows]
    vocab_size = len(target_row(()))
    for _ in range(gamma if given is None else 0):
        logits = np.stack([logits_of(draft_row(draft)) for draft in drafts])
        asked = [replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts, strict=True)]
        tokens = sampler.propose(logits, asked, vocab_size=vocab_size)
        drafts = [(*draft, token) for draft, token in zip(drafts, tokens, strict=True)]
    logits = np.stack(
        [logits_of(*[target_row(draft[:i]) for i in range(gamma + 1)]) for draft in drafts]
    )
    judged = [
        replace(row, draft_tokens=draft, is_sampled_draft=given is None and gamma > 0)
        for row, draft in zip(rows, drafts, strict=True)
    ]
    verdicts = sampler.judge(logits, judged)
    return [
        (draft, verdict.num_accepted, verdict.next_token)
        for draft, verdict in zip(drafts, verdicts, strict=True)
    ]


def round_law(sampler, noise, draft_row, target_row, gamma, given=None, **changes):
    """Exact law of the emitted run of one round, over all noise."""
    start = 1
    positions = range(start, start + gamma + 1)
    purposes = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER, Purpose.MATCH, Purpose.BONUS)
    coordinates = [(purpose, position) for purpose in purposes for position in positions]

    def run(tables):
        return outcomes(sampler, noise, tables, draft_row, target_row, gamma, given, **changes)

    probs = {}

    def walk(table, left, mass):
        if not left:
            ((draft, num_accepted, next_token),) = run([table])
            emitted = (*draft[:num_accepted], next_token)
            probs[emitted] = probs.get(emitted, 0.0) + mass
            return
        for low, high in _pieces(run, table, left[0]):
            walk(table | {left[0]: (low + high) / 2}, left[1:], mass * (high - low))

    walk({}, coordinates, 1.0)
    return probs


def _pieces(run, table, coordinate):
    """Intervals of one coordinate on which the outcome is constant."""

    def kinds_at(values):
        return run([table | {coordinate: float(value)} for value in values])

    kinds = kinds_at(GRID)
    # (low, high, kind at low, kind at high) of every stretch with a border in it.
    open_ends = [
        (low, high, kind, following)
        for (low, high), (kind, following) in zip(pairwise(GRID), pairwise(kinds), strict=True)
        if kind != following
    ]
    for _ in range(NUM_BISECTIONS if open_ends else 0):
        middles = [(low + high) / 2 for low, high, _, _ in open_ends]
        halves = []
        for (low, high, kind, following), middle, found in zip(
            open_ends, middles, kinds_at(middles), strict=True
        ):
            halves += [(low, middle, kind, found), (middle, high, found, following)]
        open_ends = [half for half in halves if half[2] != half[3]]
    borders = sorted((low + high) / 2 for low, high, _, _ in open_ends)
    return list(pairwise([0.0, *borders, 1.0]))


def laws_of(row, logits, kernels=None):
    """Laws of the tokens behind each prefix of the row's draft, [R, V], as proposals keep them."""
    num_positions, vocab_size = logits.shape
    shape = Shape(
        num_rows=1, num_positions=num_positions, depth=MAX_GAMMA + 1, vocab_size=vocab_size
    )
    launches = Launches(kernels or HostKernels(), HostDevice(), vocab_size)
    laws = np.zeros((1, 1, shape.depth, vocab_size), dtype=np.float32)
    tokens = []
    for depth in range(num_positions):
        arrays = describe([row], shape)
        arrays[names.COUNTS][0, [Count.DEPTH, Count.KEEP_AT]] = depth
        arrays[names.COUNTS][0, Count.RULE] = Rule.GREEDY if row.params.is_greedy else Rule.MATCH
        arrays |= {
            names.LOGITS: np.ascontiguousarray(logits[None, depth : depth + 1]),
            names.DRAWS: np.zeros((1, 1), dtype=np.int64),
            names.KEPT_ROWS: laws,
            names.NEXT_TOKENS: np.zeros((1, 1), dtype=np.int64),
            names.NEW_DRAFT_TOKENS: np.zeros((1, num_positions), dtype=np.int64),
        }
        tensors = {
            name: DeviceTensor(array.ctypes.data, array.shape, array.dtype)
            for name, array in arrays.items()
        }
        launches.run(Stage.PROPOSE, tensors)
        tokens.append(int(arrays[names.NEXT_TOKENS][0, 0]))
    launches.close()
    return np.eye(vocab_size)[tokens] if row.params.is_greedy else laws[0, 0, :num_positions]
