"""Estimates how likely the next draft tokens are to be kept, from the verifications so far.

Per request and draft position: hits over trials of the positions that were reached, with the overlap sum of
min(p, q) in place of the hit where the sampler had both distributions (a Rao-Blackwell estimate, Leviathan et al. 2023,
arXiv:2211.17192, section 3.1). A token that was asked for and not proposed counts as not kept. Old rounds fade. A
request that knows little follows its group: the requests with the same drafter and temperature class.

Everything used here was revealed before the round it helps to plan, so choosing by it leaves the distribution of the
answer alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rates = npt.NDArray[np.float64]
Group = tuple[str, bool]
"""Requests whose drafts fare alike: their drafter, and whether they are greedy."""

# As in 0.1.0, where they were chosen on the demo pair; judged on 125M and an unseen pair (docs/measurements.md).
REQUEST_DECAY = 0.96  # of a request's evidence per round: about 25 rounds count
GROUP_DECAY = 0.998  # of a group's evidence per round of any request: about 500 count
FIRST_RATE = 0.7  # expected before anything was seen: of the demo pair .7 to .8
FIRST_WEIGHT = 4.0  # trials that the first rate weighs
POSITION_WEIGHT = 12.0  # trials that the rate over all positions weighs against those of one
GROUP_WEIGHT = 8.0  # trials that the group weighs against a request's own
OLD_TRIALS = 32.0  # that old evidence weighs at most in a try: 8 new ones must be able to turn it
LEAST_RATE, MOST_RATE = 0.01, 0.99  # bounds of every estimate, so that odds stay finite
MOST_GROUPS = 64  # groups that are kept; the one unused for longest goes first
HITS, TRIALS, JUDGED, ASKED, PROPOSED, CALLED = range(6)


class Round(NamedTuple):
    """One verification of one row.

    Attributes:
        num_asked: draft tokens that were asked for.
        num_drafted: of them, those that were verified; of a tree its depth.
        num_called: of these, those that the draft model was called for.
        overlaps: sum of min(p, q) at each position reached, or empty.
    """

    request: str
    group: Group
    num_asked: int
    num_drafted: int
    num_called: int
    num_accepted: int
    overlaps: Sequence[float] = ()


class Expected(NamedTuple):
    """Probabilities [n, G] float64: of keeping the first i + 1 tokens, of proposing token i, of a draft call for it."""

    survival: Rates
    proposed: Rates
    called: Rates


class Acceptance:
    """Evidence per request and per group, on G = ``max_gamma`` positions; its owner is the worker's thread."""

    def __init__(self, max_gamma: int) -> None:
        self._max_gamma = max_gamma
        # [6, G] float64 each: hits, trials, those of them whose token was proposed, and how often a token was asked
        # for, proposed, and called for.
        self._requests: dict[str, Rates] = {}
        self._groups: dict[Group, Rates] = {}  # the one unused for longest first

    def keep_only(self, requests: Collection[str]) -> None:
        """Forget the requests that are not named."""
        self._requests = {name: one for name, one in self._requests.items() if name in requests}

    def soften(self, group: Group) -> None:
        """Let the old evidence of a group that is tried again weigh no more than ``OLD_TRIALS``."""
        evidence = self._of_group(group)
        evidence *= min(1.0, OLD_TRIALS / max(1.0, float(evidence[TRIALS].max())))

    def record(self, rounds: Sequence[Round]) -> None:
        """Count the positions that verifications reached; a round that asked for nothing reached none."""
        for one in rounds:
            if not one.num_asked:
                continue
            own = self._requests.setdefault(one.request, self._empty())
            for evidence, decay in (self._of_group(one.group), GROUP_DECAY), (own, REQUEST_DECAY):
                evidence *= decay
                if one.overlaps:
                    evidence[HITS, : len(one.overlaps)] += one.overlaps
                else:
                    evidence[HITS, : one.num_accepted] += 1.0
                # The position after the last kept one was tried too: rejected, or asked for and not proposed.
                evidence[TRIALS, : min(one.num_accepted + 1, one.num_asked)] += 1.0
                evidence[JUDGED, : min(one.num_accepted + 1, one.num_drafted)] += 1.0
                evidence[ASKED, : one.num_asked] += 1.0
                evidence[PROPOSED, : one.num_drafted] += 1.0
                evidence[CALLED, : one.num_called] += 1.0

    def expect(self, rows: Sequence[tuple[str, Group]]) -> Expected:
        """Return the probabilities of the next draft tokens, for the request and group of each row.

        A request that does better or worse than its group does so at every position: its odds are the group's times
        one factor, pulled towards 1 while the request knows little.
        """
        nothing = self._empty()
        own = np.array([self._requests.get(name, nothing) for name, _ in rows])
        group = np.array([self._of_group(key) for _, key in rows])
        hits, trials = group[:, HITS], group[:, TRIALS]
        num_hits, num_trials = hits.sum(axis=1), trials.sum(axis=1)
        pooled = (num_hits + FIRST_RATE * FIRST_WEIGHT) / (num_trials + FIRST_WEIGHT)
        rates = (hits + POSITION_WEIGHT * pooled[:, None]) / (trials + POSITION_WEIGHT)
        rates = np.clip(rates, LEAST_RATE, MOST_RATE)
        # Of the positions that the request tried: what its group would have kept, and what was kept.
        usual, seen = (own[:, TRIALS] * rates).sum(axis=1), own[:, HITS].sum(axis=1)
        weight = own[:, TRIALS].sum(axis=1) + GROUP_WEIGHT
        usual, seen = (
            np.clip((one + GROUP_WEIGHT * pooled) / weight, LEAST_RATE, MOST_RATE)
            for one in (usual, seen)
        )
        odds = rates / (1.0 - rates) * (seen / (1.0 - seen) * (1.0 - usual) / usual)[:, None]
        survival = np.cumprod(np.clip(odds / (1.0 + odds), LEAST_RATE, MOST_RATE), axis=1)
        # Before anything was seen, all that is asked for is proposed by the draft model.
        share = GROUP_WEIGHT / (group[:, ASKED] + GROUP_WEIGHT)
        counts = own[:, ASKED:] + group[:, ASKED:] * share[:, None] + 1.0
        asked, proposed, called = counts.transpose(1, 0, 2)
        return Expected(survival, proposed / asked, called / asked)

    def kept(self) -> dict[Group, tuple[float, float]]:
        """Return how many proposed tokens of each group were kept and judged of late; callable from any thread."""
        return {
            key: (float(evidence[HITS].sum()), float(evidence[JUDGED].sum()))
            for key, evidence in list(self._groups.items())
        }

    def _of_group(self, key: Group) -> Rates:
        """Return the evidence of a group; a new one takes the place of the one unused for longest."""
        evidence = self._groups.pop(key, None)
        if evidence is None:
            evidence = self._empty()
            if len(self._groups) >= MOST_GROUPS:
                del self._groups[next(iter(self._groups))]
        self._groups[key] = evidence
        return evidence

    def _empty(self) -> Rates:
        return np.zeros((6, self._max_gamma))
