"""The gammas of the best rate, from acceptance, prices and caps: a pure function.

For every longest draft L up to G each row takes its first positions that bring a part of what they cost, L at most.
Expected tokens are 1 per row plus the survival of the positions that are taken; seconds are the step's price, times
what steps of this length were measured to take against the table. The L of the most tokens per second wins (Leviathan
et al. 2023, arXiv:2211.17192, Theorem 3.8, with measured costs and a batch in place of c and one row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma.acceptance import Expected
from outrider.runtime.gamma.costs import RowPrices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PART = 0.25
"""Part of its price that a position must bring. With the whole price, rows whose drafts fare better run ahead and end
early, and the others go on alone at a higher price per token: played with recorded answers of the demo pair in batches
of 4 to 32 rows, 1 lost up to 9 % against one gamma for all, 0 and 0.5 lost 1 to 2 % against this."""


class Rows(NamedTuple):
    """The live rows of a step; those whose prompt is still being read as if they decoded.

    Attributes:
        caps: [n] int64, most draft tokens that a row may take.
        is_fixed: [n] bool, rows that take their cap whatever it brings.
        uses_model: [n] bool, rows whose drafter calls the draft model.
        row_s: seconds that the host spends on all rows.
        token_s: [n] float64 seconds that the host spends on one draft token.
        catch_up_s: [n] float64 seconds of feeding the draft model what a row missed, per token that the row then emits.
        behind: [n] int64, tokens that drafters put behind any gamma but 0, without a draft call.
    """

    caps: Ints
    is_fixed: npt.NDArray[np.bool_]
    uses_model: npt.NDArray[np.bool_]
    row_s: float
    token_s: Floats
    catch_up_s: Floats
    behind: Ints


class Options(NamedTuple):
    """Gammas [G + 1, n] int64 for every longest draft 0..G, and the tokens and seconds of such a step.

    Both are expectations, [G + 1] float64.
    """

    gammas: Ints
    tokens: Floats
    seconds: Floats


def options_of(
    rows: Rows, expected: Expected, prices: RowPrices, ratios: Sequence[float]
) -> Options:
    """Return the choice for every longest draft; ``ratios`` [G + 1] by longest draft are measured over tabled seconds.

    A step of which less is expected to be drafted is as wrong as the lengths that it lies between.
    """
    num_rows, most = expected.survival.shape
    survival, scales = expected.survival, np.array(ratios)
    longest = np.arange(most + 1)
    called = expected.called * rows.uses_model[:, None]
    plain_rate = num_rows / (scales[0] * (rows.row_s + prices.verify_s[0]))
    # [G + 1, 1, 1]: what one more draft token costs to verify, on average over the positions up to here.
    each_s = np.array(prices.verify_s[::num_rows]) - prices.verify_s[0]
    each_s = (each_s / (num_rows * np.maximum(longest, 1)))[:, None, None]
    token_s = rows.token_s[:, None] + called * (prices.call_s[num_rows] / num_rows)
    pays = survival >= PART * plain_rate * scales[:, None, None] * (each_s + token_s)
    # [G + 1, n] leading positions that pay, within the cap and the longest draft.
    most_taken = np.minimum(rows.caps, longest[:, None])
    gammas = np.minimum(np.cumprod(pays, axis=2).sum(axis=2), most_taken)
    gained = _sums(survival, _reached(rows, gammas, most))
    gammas[gained < plain_rate * rows.catch_up_s * (1.0 + gained)] = 0
    gammas = np.where(rows.is_fixed, rows.caps, gammas)
    reached = _reached(rows, gammas, most)
    gained = _sums(survival, reached)
    lengths = _sums(expected.proposed, reached)
    taken = longest[:-1] < gammas[:, :, None]
    calls = np.where(taken, called, 0.0).sum(axis=1).tolist()
    host_s = (rows.row_s + lengths @ rows.token_s).tolist()
    totals, widest = lengths.sum(axis=1).tolist(), lengths.max(axis=1).tolist()
    step_s = list(map(prices.step_s, totals, widest, calls, host_s))
    caught_s = ((gammas > 0) * rows.catch_up_s * (1.0 + gained)).sum(axis=1)
    step_scales = np.interp(widest, longest, scales)
    return Options(gammas, num_rows + gained.sum(axis=1), np.array(step_s) * step_scales + caught_s)


def _reached(rows: Rows, gammas: Ints, most: int) -> Ints:
    """Return the tokens that are verified [G + 1, n]: gammas, and what stands behind them, G at most."""
    found: Ints = np.where(gammas > 0, np.minimum(gammas + rows.behind, most), 0)
    return found


def _sums(shares: Floats, gammas: Ints) -> Floats:
    """Return [G + 1, n], the shares [n, G] of each row added up over its first positions."""
    sums = np.concatenate([np.zeros((len(shares), 1)), np.cumsum(shares, axis=1)], axis=1)
    found: Floats = sums[np.arange(len(shares)), gammas]
    return found
