"""Beam search: the definition, in float64.

Pure: likely continuations in, hypotheses out; no engine, request or device is known. A step of the search is one
function of the live hypotheses and the target's rows behind them. Searches are not drafted for; how a draft model
would run ahead of one is ``runtime.oracle.beam_drafts``.

* S1  Continuations of all live hypotheses are ranked by the sum of their log-probabilities; ties by the rank of the
  hypothesis, then by the lower token. What has probability 0 is no continuation.
* S2  Of the ``num_beams`` highest ranked, those that end with an end token are finished. The ``num_beams`` highest
  ranked that do not end live on.
* S3  A finished hypothesis of n tokens, its end token included and ``num_forced`` more, scores its sum /
  n ** length_penalty. The
  ``num_beams`` best are kept; of equals the one that finished first, and of these the one that ranked first.
* S4  The search is over when nothing lives; when ``max_tokens`` is reached, and then the live ones finish, by rank; or
  when ``num_beams`` have finished and either ``stops_early`` is set or the best live sum cannot beat the worst of them:
  scored at its present length or, where ``is_exhaustive``, at that of the continuation that could score best. These are
  early_stopping True, False and "never" of Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from outrider.engines.sampling.base import Continuations


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """The rules of a search.

    Attributes:
        num_beams: hypotheses that live, and that are kept when finished; at least 1.
        max_tokens: of a hypothesis, at least 1.
        end_tokens: tokens that finish a hypothesis.
        length_penalty: exponent of the length in a score; above 0 favours long answers, since sums are negative.
        stops_early: whether ``num_beams`` finished hypotheses end the search whatever the live ones promise.
        is_exhaustive: whether a search that does not stop early goes on while any continuation could change it.
        num_forced: tokens that every answer begins with and that no hypothesis has: they count in its length, as those
            that Transformers forces do.
    """

    num_beams: int
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    stops_early: bool = False
    is_exhaustive: bool = False
    num_forced: int = 0

    def score(self, log_prob: float, length: int) -> float:
        """Return the score of a hypothesis of ``length`` tokens, as in S3."""
        return float(log_prob / (length + self.num_forced) ** self.length_penalty)

    @property
    def row_size(self) -> int:
        """Likeliest continuations of a hypothesis that a step needs: they hold ``num_beams`` that do not end."""
        return self.num_beams + len(self.end_tokens)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens behind the prompt, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamState:
    """A search between two steps.

    Attributes:
        live: best first, all of one length; none where the search is over.
        finished: best first.
    """

    live: tuple[Hypothesis, ...] = (Hypothesis(),)
    finished: tuple[Hypothesis, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether ``finished`` is the answer."""
        return not self.live


def advance(state: BeamState, rows: Sequence[Continuations], rules: BeamRules) -> BeamState:
    """One step of the search (S1 to S4).

    Args:
        state: of a search that is not over.
        rows: behind each live hypothesis its likeliest continuations, ``rules.row_size`` of them or all there are.
        rules: what is searched for.
    """
    width = rules.num_beams
    live: list[Hypothesis] = []
    finished: list[Hypothesis] = []
    for rank, candidate in enumerate(ranked(state.live, rows, _enough(state.live, rules))):
        if candidate.tokens[-1] not in rules.end_tokens:
            live.append(candidate)
        elif rank < width:
            finished.append(candidate)
        if len(live) == width:
            break
    if live and len(live[0].tokens) == rules.max_tokens:
        finished.extend(live)
        live = []
    kept = _best([*state.finished, *finished], rules)
    return BeamState(live=() if _is_settled(live, kept, rules) else tuple(live), finished=kept)


def ranked(
    live: Sequence[Hypothesis], rows: Sequence[Continuations], count: int
) -> list[Hypothesis]:
    """The ``count`` best continuations, or as many as there are, best first (S1)."""
    sums = np.concatenate(
        [one.log_prob + row.log_probs for one, row in zip(live, rows, strict=True)]
    )
    tokens = np.concatenate([row.tokens for row in rows])
    ranks = np.repeat(np.arange(len(live)), [len(row.tokens) for row in rows])
    order = np.lexsort((tokens, ranks, -sums))
    best = order[sums[order] > -np.inf][:count]
    return [
        Hypothesis((*live[rank].tokens, token), total)
        for rank, token, total in zip(
            ranks[best].tolist(), tokens[best].tolist(), sums[best].tolist(), strict=True
        )
    ]


def _enough(live: Sequence[Hypothesis], rules: BeamRules) -> int:
    """Continuations that hold ``num_beams`` which do not end: each hypothesis has one ending per end token."""
    return rules.num_beams + len(live) * len(rules.end_tokens)


def _best(finished: Sequence[Hypothesis], rules: BeamRules) -> tuple[Hypothesis, ...]:
    """The num_beams best; a stable sort, so that of equals the first stays."""
    by_score = sorted(finished, key=lambda one: -rules.score(one.log_prob, len(one.tokens)))
    return tuple(by_score[: rules.num_beams])


def _is_settled(
    live: Sequence[Hypothesis], finished: Sequence[Hypothesis], rules: BeamRules
) -> bool:
    """Return whether no live hypothesis can change what is finished (S4)."""
    if not live:
        return True
    if len(finished) < rules.num_beams:
        return False
    if rules.stops_early:
        return True
    worst = rules.score(finished[-1].log_prob, len(finished[-1].tokens))
    best = live[0]
    length = len(best.tokens)
    if rules.is_exhaustive:
        # A sum only falls; a positive exponent favours the longest continuation, another one the shortest.
        length = rules.max_tokens if rules.length_penalty > 0.0 else length + 1
    bound = rules.score(best.log_prob, length)
    return bound <= worst
