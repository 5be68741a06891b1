"""Acceptance by row and position, taken in and estimated by compiled loops.

``core.acceptance`` says what is estimated, and from which source; here it is written number by number, since the
arrays are as small as decisions are frequent. One file, because the functions call each other (``engines.jit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types, void
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

HITS, TRIALS = range(2)
# Of shares: what was asked for, and what of it was proposed, and by the draft model.
PROPOSED, CALLED, ASKED = range(3)
# Columns of what a round reveals.
ROW, WANTED, DRAFTED, CALLS, ACCEPTED, NUM_OVERLAPS = range(6)

_EVIDENCE, _WIDE, _LINE, _INDICES = float64[:, :, ::1], float64[:, ::1], float64[::1], int64[::1]


@njit_exact(void(_EVIDENCE, float64, _INDICES))
def fade(evidence: Floats, decay: float, counts: Ints) -> None:
    """Let each owner's evidence fade as often as it is told something.

    Args:
        evidence: [kinds, owners, G].
        decay: factor of one time.
        counts: [owners] times.
    """
    for owner in range(evidence.shape[1]):
        if counts[owner]:
            factor = decay ** counts[owner]
            for position in range(evidence.shape[2]):
                for kind in range(evidence.shape[0]):
                    evidence[kind, owner, position] *= factor


@njit_exact(
    void(
        int64[:, ::1], _LINE, _INDICES, float64, float64, _EVIDENCE, _EVIDENCE, _EVIDENCE, _EVIDENCE
    ),
)
def record(
    rounds: Ints,
    overlaps: Floats,
    group_of: Ints,
    row_decay: float,
    traffic_decay: float,
    rows: Floats,
    traffic: Floats,
    row_shares: Floats,
    traffic_shares: Floats,
) -> None:
    """Count what rounds revealed, after what was known has faded by as many.

    Args:
        rounds: [k, 6], in each of which a draft was asked for.
        overlaps: of all rounds, one after the other.
        group_of: [num_rows].
        row_decay: of a row's evidence, per round.
        traffic_decay: of a group's.
        rows: [2, num_rows, G] changed.
        traffic: [2, num_groups, G] changed.
        row_shares: [3, num_rows, G] changed.
        traffic_shares: [3, num_groups, G] changed.
    """
    by_row = np.zeros(rows.shape[1], dtype=np.int64)
    by_group = np.zeros(traffic.shape[1], dtype=np.int64)
    for told in range(len(rounds)):
        by_row[rounds[told, ROW]] += 1
        by_group[group_of[rounds[told, ROW]]] += 1
    fade(rows, row_decay, by_row)
    fade(traffic, traffic_decay, by_group)
    fade(row_shares, row_decay, by_row)
    fade(traffic_shares, traffic_decay, by_group)
    used = 0
    for told in range(len(rounds)):
        row, accepted = rounds[told, ROW], rounds[told, ACCEPTED]
        group, num_overlaps = group_of[row], rounds[told, NUM_OVERLAPS]
        wanted = rounds[told, WANTED]
        # What was asked for and not proposed was not kept either.
        reached = min(accepted + 1, wanted)
        for position in range(wanted):
            proposed = 1.0 if position < rounds[told, DRAFTED] else 0.0
            called = 1.0 if position < rounds[told, CALLS] else 0.0
            row_shares[PROPOSED, row, position] += proposed
            row_shares[CALLED, row, position] += called
            row_shares[ASKED, row, position] += 1.0
            traffic_shares[PROPOSED, group, position] += proposed
            traffic_shares[CALLED, group, position] += called
            traffic_shares[ASKED, group, position] += 1.0
        for position in range(rows.shape[2]):
            hit = 1.0 if position < accepted else 0.0
            if position < num_overlaps:
                hit = overlaps[used + position]
            rows[HITS, row, position] += hit
            traffic[HITS, group, position] += hit
            if position < reached:
                rows[TRIALS, row, position] += 1.0
                traffic[TRIALS, group, position] += 1.0
        used += num_overlaps


@njit_exact(
    void(_EVIDENCE, _INDICES, types.UniTuple(float64, 3), types.UniTuple(float64, 2), _WIDE)
)
def rate_traffic(
    traffic: Floats,
    groups: Ints,
    prior: tuple[float, float, float],
    bounds: tuple[float, float],
    rates: Floats,
) -> None:
    """Write the rates of rows that know nothing of their own.

    Args:
        traffic: [2, num_groups, G].
        groups: of which they are wanted.
        prior: rate expected at first, its weight, and the weight of all positions against one.
        bounds: least and greatest rate.
        rates: [num_groups, G], of which those of the groups are overwritten.
    """
    first_rate, first_weight, weight = prior
    for at, group in enumerate(groups):
        # Rows are mostly of one group.
        if at and group == groups[at - 1]:
            continue
        hits, trials = 0.0, 0.0
        for position in range(traffic.shape[2]):
            hits += traffic[HITS, group, position]
            trials += traffic[TRIALS, group, position]
        pooled = (hits + first_weight * first_rate) / (trials + first_weight)
        for position in range(traffic.shape[2]):
            rate = traffic[HITS, group, position] + weight * pooled
            rate /= traffic[TRIALS, group, position] + weight
            rates[group, position] = min(max(rate, bounds[0]), bounds[1])


@njit_exact(
    void(_EVIDENCE, _WIDE, _INDICES, types.UniTuple(float64, 2), types.UniTuple(float64, 2), _WIDE)
)
def rate_rows(
    rows: Floats,
    traffic_rates: Floats,
    group_of: Ints,
    weights: tuple[float, float],
    bounds: tuple[float, float],
    rates: Floats,
) -> None:
    """Write the rates of rows: their group's odds times one factor, and what each position showed.

    Args:
        rows: [2, num_rows, G].
        traffic_rates: [num_groups, G] that ``rate_traffic`` wrote for the rows' groups.
        group_of: [num_rows].
        weights: of the traffic, and of all positions against one.
        bounds: least and greatest rate.
        rates: [n, G] overwritten, of the first n rows.
    """
    traffic_weight, weight = weights
    length = rates.shape[1]
    for row in range(rates.shape[0]):
        of_traffic = traffic_rates[group_of[row]]
        found, total, expected, mean = 0.0, 0.0, 0.0, 0.0
        for position in range(length):
            found += rows[HITS, row, position]
            total += rows[TRIALS, row, position]
            expected += rows[TRIALS, row, position] * of_traffic[position]
            mean += of_traffic[position] / length
        good, bad = traffic_weight * mean, traffic_weight * (1.0 - mean)
        factor = (found + good) * (total - expected + bad)
        factor /= (max(total - found, 0.0) + bad) * (expected + good)
        for position in range(length):
            odds = of_traffic[position] / (1.0 - of_traffic[position]) * factor
            rate = odds / (1.0 + odds) * weight + rows[HITS, row, position]
            rate /= weight + rows[TRIALS, row, position]
            rates[row, position] = min(max(rate, bounds[0]), bounds[1])


@njit_exact(float64(_EVIDENCE, _INDICES, int64, types.UniTuple(float64, 2)))
def mean_doubt(traffic: Floats, group_of: Ints, num_rows: int, first: tuple[float, float]) -> float:
    """Standard deviation of the rate of rows that know nothing of their own, their mean.

    Args:
        traffic: [2, num_groups, G].
        group_of: [num_rows] at least.
        num_rows: of which the first.
        first: rate expected before anything was seen, and its weight.
    """
    rate, weight = first
    total = 0.0
    for row in range(num_rows):
        hits, trials = weight * rate, weight
        for position in range(traffic.shape[2]):
            hits += traffic[HITS, group_of[row], position]
            trials += traffic[TRIALS, group_of[row], position]
        kept = hits / trials
        total += np.sqrt(kept * (1.0 - kept) / (trials + 1.0))
    return total / num_rows


@njit_exact(void(_EVIDENCE, _EVIDENCE, _INDICES, types.UniTuple(float64, 2), _EVIDENCE))
def share_rows(
    rows: Floats, traffic: Floats, group_of: Ints, weights: tuple[float, float], shares: Floats
) -> None:
    """Write the share of what is asked for that is proposed, and that the draft model is called for.

    A position that was never asked for is expected to fare as the one before it, and the first as if all were proposed.

    Args:
        rows: [3, num_rows, G].
        traffic: [3, num_groups, G].
        group_of: [num_rows].
        weights: of the traffic against a row's own rounds, and of one position against the next.
        shares: [2, n, G] overwritten, of the first n rows.
    """
    traffic_weight, weight = weights
    for row in range(shares.shape[1]):
        group = group_of[row]
        for kind in range(2):
            usual, before = 1.0, 1.0
            for position in range(shares.shape[2]):
                usual = traffic[kind, group, position] + weight * usual
                usual /= traffic[ASKED, group, position] + weight
                share = rows[kind, row, position] + traffic_weight * usual
                share /= rows[ASKED, row, position] + traffic_weight
                # Whatever positions were asked for: further ones are not proposed more often.
                shares[kind, row, position] = before = min(share, before)


@njit_exact(float64(_EVIDENCE, _EVIDENCE, _EVIDENCE, _EVIDENCE, _INDICES, _LINE, _WIDE, _EVIDENCE))
def expect(
    rows: Floats,
    traffic: Floats,
    row_shares: Floats,
    traffic_shares: Floats,
    group_of: Ints,
    fading: Floats,
    survival: Floats,
    shares: Floats,
) -> float:
    """Write how likely each row's first draft tokens are all kept, and what of them is proposed.

    Returns:
        The doubt of the traffic, as ``mean_doubt``.

    Args:
        rows: [2, num_rows, G].
        traffic: [2, num_groups, G].
        row_shares: [3, num_rows, G].
        traffic_shares: [3, num_groups, G].
        group_of: [num_rows].
        fading: [7] prior of ``rate_traffic``, weights of ``rate_rows``, least and greatest rate; no tuples, which take
            a call longer to recognise than all else.
        survival: [n, G] overwritten, of the first n rows.
        shares: [2, n, G] overwritten.
    """
    num_rows = survival.shape[0]
    traffic_rates = np.empty(traffic.shape[1:])
    first = fading[0], fading[1]
    bounds = fading[5], fading[6]
    prior = fading[0], fading[1], fading[2]
    rate_traffic(traffic, group_of[:num_rows], prior, bounds, traffic_rates)
    rate_rows(rows, traffic_rates, group_of, (fading[3], fading[4]), bounds, survival)
    share_rows(row_shares, traffic_shares, group_of, (fading[3], fading[4]), shares)
    for row in range(num_rows):
        for position in range(survival.shape[1]):
            if position:
                survival[row, position] *= survival[row, position - 1]
            survival[row, position] = min(survival[row, position], shares[PROPOSED, row, position])
    return mean_doubt(traffic, group_of, num_rows, first)
