"""Beam search, and how far one pass of the target takes it when a draft model ran ahead: the definition, in float64.

Pure: likely continuations in, hypotheses out; no engine, request or device is known. A step of the search is one
function of the live hypotheses and the target's rows behind them. Speculation changes none of that: it only decides
behind which hypotheses one pass of the target yields rows, so the result is that of the plain search whatever was
drafted, and only the number of passes differs.

Rules, which every number of passes shares:

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

Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.4; w is num_beams, u, the beams of the draft, is ``width``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from outrider.engines.sampling.base import Continuations

MaybeRow = Callable[[tuple[int, ...]], Continuations | None]


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
    for rank, candidate in enumerate(ranked(state.live, rows, _enough(state.live, width, rules))):
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


def search(
    state: BeamState, row_after: MaybeRow, rules: BeamRules
) -> tuple[BeamState, tuple[tuple[int, ...], ...]]:
    """Steps of the search as far as rows are known: what one pass of the target is good for.

    Args:
        state: of a search that is not over.
        row_after: the target's continuations behind a hypothesis' tokens, as ``advance`` takes them; None where the
            pass did not compute them. Those behind every live hypothesis of ``state`` it did.
        rules: what is searched for.

    Returns:
        The state after the last step, and per step the tokens whose rows were used, best first.
    """
    used: list[tuple[int, ...]] = []
    while not state.is_over:
        rows = [row_after(hypothesis.tokens) for hypothesis in state.live]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            break
        used.extend(hypothesis.tokens for hypothesis in state.live)
        state = advance(state, known, rules)
    return state, tuple(used)


class BeamDraft:
    """A beam search of the draft model that runs ahead from the live hypotheses, with their own sums.

    Ask for the draft's rows behind ``beams`` and ``grow`` by them, as long as it ``is_growing``.

    Args:
        state: of a search that is not over.
        rules: what is searched for.
        width: u, hypotheses drafted per step.
        gamma: steps drafted; none beyond what ``max_tokens`` leaves.

    Attributes:
        beams: hypotheses drafted last, best first; the live ones before the first step.
        wanted: tokens behind which the target's rows are wanted: the live hypotheses, and what the draft expects to
            live; at most ``len(state.live) + width * gamma``, parents before children.
    """

    def __init__(self, state: BeamState, rules: BeamRules, *, width: int, gamma: int) -> None:
        self.beams = list(state.live)
        self.wanted = [hypothesis.tokens for hypothesis in self.beams]
        self._rules = rules
        self._width = width
        # The rows behind a hypothesis of max_tokens are of no use.
        self._num_left = min(gamma, rules.max_tokens - 1 - len(self.beams[0].tokens))

    @property
    def is_growing(self) -> bool:
        """Return whether another step is to be drafted."""
        return self._num_left > 0 and bool(self.beams)

    def stop(self) -> None:
        """Leave it at what was drafted."""
        self._num_left = 0

    def grow(self, rows: Sequence[Continuations]) -> None:
        """One step, from the draft's ``width + len(end_tokens)`` likeliest continuations behind each of ``beams``."""
        self._num_left -= 1
        count = _enough(self.beams, self._width, self._rules)
        self.beams = [
            candidate
            for candidate in ranked(self.beams, rows, count)
            if candidate.tokens[-1] not in self._rules.end_tokens
        ][: self._width]
        self.wanted.extend(hypothesis.tokens for hypothesis in self.beams)


def chains_over(
    wanted: Sequence[tuple[int, ...]], num_live: int, num_chains: int, num_beams: int
) -> list[tuple[int, ...]]:
    """What to feed where each row of a batch holds one chain of tokens: as much of a draft as they cover.

    A row lies behind every prefix of a chain, so hypotheses that follow one another share one. Every live hypothesis
    lies on a chain of its own. What is drafted follows by step and rank: first what would live if the draft were right,
    the ``num_beams`` best of each step, then the rest.

    Args:
        wanted: of a ``BeamDraft``.
        num_live: leading entries of ``wanted`` that are live.
        num_chains: at least ``num_live``.
        num_beams: of the search.

    Returns:
        The ends of the chains, each one of ``wanted``.
    """
    ends = list(wanted[:num_live])
    covered = set(ends)
    num_seen: Counter[int] = Counter()
    likely: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for tokens in wanted[num_live:]:
        (likely if num_seen[len(tokens)] < num_beams else others).append(tokens)
        num_seen[len(tokens)] += 1
    for tokens in (*likely, *others):
        if tokens in covered:
            continue
        index = next((i for i, end in enumerate(ends) if tokens[: len(end)] == end), None)
        if index is not None:
            ends[index] = tokens
        elif len(ends) < num_chains:
            ends.append(tokens)
        else:
            continue
        covered.update(tokens[:length] for length in range(1, len(tokens) + 1))
    return ends


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


def _enough(live: Sequence[Hypothesis], width: int, rules: BeamRules) -> int:
    """Continuations that hold ``width`` which do not end: each hypothesis has one ending per end token."""
    return width + len(live) * len(rules.end_tokens)


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
