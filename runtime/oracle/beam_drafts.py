"""How far one pass of the target takes a beam search when a draft model ran ahead: the definition, in float64.

Searches are served without it: a pass over drafted texts was good for little more than one step (docs/beam-search.md).

w beams live. The draft model runs its own search ahead from them, u beams wide, for gamma steps. One pass of the target
yields its rows behind all of these texts. A step of the search is taken as long as the rows behind all live beams are
among them: the first one always, a further one where the w best of the target are among the u best of the draft. So
what lives is the plain search's whatever was drafted, and only the number of passes differs.

Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.4; M_p is the target, M_q the draft, w ``num_beams`` and u
``width``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from outrider.runtime.oracle.verification import Probs

Text = tuple[int, ...]
Beam = tuple[Text, float]
"""Tokens behind the prompt, and the sum of their log-probabilities."""
LogRow = Callable[[Text], Probs]
"""From tokens behind the prompt to the next one's log-probabilities, [V] float64."""


def best_beams(beams: Sequence[Beam], row_of: LogRow, count: int) -> list[Beam]:
    """Return the ``count`` best continuations, or as many as there are, best first: a step of a search.

    Of equal sums that of the better beam comes first, and then the lower token. What has probability 0 is none.
    """
    rows = [row_of(tokens) for tokens, _ in beams]
    ranked = sorted(
        (-(total + float(row[token])), rank, token)
        for rank, ((_, total), row) in enumerate(zip(beams, rows, strict=True))
        for token in range(len(row))
        if row[token] > -np.inf
    )
    return [((*beams[rank][0], token), -loss) for loss, rank, token in ranked[:count]]


def drafted_texts(
    beams: Sequence[Beam], draft_row: LogRow, *, width: int, gamma: int
) -> list[Text]:
    """Return the texts of the live beams and, step by step, those that the draft expects to live."""
    texts = [tokens for tokens, _ in beams]
    for _ in range(gamma):
        beams = best_beams(beams, draft_row, width)
        texts += [tokens for tokens, _ in beams]
    return texts


def steps_of_pass(
    beams: Sequence[Beam],
    target_row: LogRow,
    texts: Collection[Text],
    *,
    num_beams: int,
    max_steps: int,
) -> tuple[list[Beam], int]:
    """Return what lives after a pass of the target behind these texts, and the steps that it was good for.

    Args:
        beams: that live before.
        target_row: the target's; read behind ``texts`` alone.
        texts: of ``drafted_texts``.
        num_beams: that live.
        max_steps: taken at most.
    """
    live = list(beams)
    num_steps = 0
    while live and num_steps < max_steps and all(tokens in texts for tokens, _ in live):
        live = best_beams(live, target_row, num_beams)
        num_steps += 1
    return live, num_steps
