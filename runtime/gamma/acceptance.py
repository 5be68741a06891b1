"""How likely the next draft tokens are to be kept, from what verifications have revealed.

Per row and draft position: hits over trials of the positions that were reached, with the overlap
sum of min(p, q) in place of the hit where the sampler had both laws (a Rao-Blackwell estimate,
Leviathan et al. 2023, arXiv:2211.17192, section 3.1). Positions behind the first rejection have the
wrong prefix and count nowhere; a token that was asked for and not proposed was not kept. Old rounds
fade, so that a change of subject is noticed; a row that knows little follows the recent traffic of
rows that are drafted for alike. So it is estimated what share of the tokens that are asked for is
proposed, and what share the draft model is called for: a step costs what is proposed in it.

Everything used here was revealed before the round it helps to plan, so what is chosen from it
leaves the law of the answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma import evidence_loops

Rates = npt.NDArray[np.float64]
LEAST_RATE, MOST_RATE = 0.01, 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Fading:
    """How fast evidence fades and how much it weighs; weights are in trials.

    Attributes:
        row_decay: of a row's evidence, per round.
        traffic_decay: of the traffic's evidence, per round of any row.
        first_rate: acceptance expected before anything was seen.
        first_weight: of ``first_rate`` against the traffic.
        position_weight: of the rate over all positions against that of one position.
        traffic_weight: of the traffic against a row's own rounds.
        half_life: steps without drafts after which the traffic's evidence counts half.
        old_weight: trials that it counts for at least, however old, once it did.
    """

    row_decay: float = 0.96
    traffic_decay: float = 0.998
    first_rate: float = 0.7
    first_weight: float = 4.0
    position_weight: float = 12.0
    traffic_weight: float = 8.0
    half_life: float = 512.0
    old_weight: float = 16.0


class Round(NamedTuple):
    """One verification of one row.

    Attributes:
        row: index.
        num_asked: tokens that were asked for.
        num_drafted: tokens that were verified.
        num_called: of them, those that the draft model was called for.
        num_accepted: leading ones that were kept.
        overlaps: sum of min(p, q) at each position reached, or empty.
    """

    row: int
    num_asked: int
    num_drafted: int
    num_called: int
    num_accepted: int
    overlaps: tuple[float, ...] = ()


class AcceptanceBook:
    """Evidence per row and per group of rows.

    Args:
        num_rows: rows at most.
        max_gamma: G, draft positions.
        num_groups: groups at most.
    """

    def __init__(
        self, *, num_rows: int, max_gamma: int, num_groups: int, fading: Fading | None = None
    ) -> None:
        self._fading = fading = fading or Fading()
        prior = fading.first_rate, fading.first_weight, fading.position_weight
        weights = fading.traffic_weight, fading.position_weight
        self._known_fading = np.array((*prior, *weights, LEAST_RATE, MOST_RATE))
        self._group_of = np.zeros(num_rows, dtype=np.int64)
        # Hits and trials, by owner and position.
        self._rows = np.zeros((2, num_rows, max_gamma))
        self._traffic = np.zeros((2, num_groups, max_gamma))
        # Proposed, called for and asked for, likewise.
        self._row_shares = np.zeros((3, num_rows, max_gamma))
        self._traffic_shares = np.zeros((3, num_groups, max_gamma))

    def start(self, row: int, group: int) -> None:
        """A row begins a request of a group and knows nothing of its own."""
        self._group_of[row] = group
        self._rows[:, row] = 0.0
        self._row_shares[:, row] = 0.0

    def move(self, source: int, destination: int) -> None:
        """A request goes on in another row."""
        self._group_of[destination] = self._group_of[source]
        self._rows[:, destination] = self._rows[:, source]
        self._row_shares[:, destination] = self._row_shares[:, source]

    def record(self, rounds: Sequence[Round]) -> None:
        """Count what was revealed; rounds in which no draft was asked for reveal nothing."""
        told: list[int] = []
        overlaps: list[float] = []
        for row, num_asked, num_drafted, num_called, num_accepted, seen in rounds:
            if num_asked:
                told += (row, num_asked, num_drafted, num_called, num_accepted, len(seen))
                overlaps += seen
        if not told:
            return
        evidence_loops.record(
            np.array(told, dtype=np.int64).reshape(-1, 6),
            np.array(overlaps, dtype=np.float64),
            self._group_of,
            self._fading.row_decay,
            self._fading.traffic_decay,
            self._rows,
            self._traffic,
            self._row_shares,
            self._traffic_shares,
        )

    def expect(self, num_rows: int) -> tuple[Rates, Rates, float]:
        """What the next draft tokens of the first rows will do.

        Returns:
            [num_rows, G] probability that the first i + 1 draft tokens are all kept: a row that does better or worse
            than the traffic does so at every position, its odds are the traffic's times one factor, pulled towards 1
            while the row knows little; [2, num_rows, G] share of what is asked for that is proposed, and that the
            draft model is called for; and the standard deviation of the rate that is expected of rows that know
            nothing of their own, their mean.
        """
        survival = np.empty((num_rows, self._rows.shape[2]))
        shares = np.empty((2, *survival.shape))
        doubt = evidence_loops.expect(
            self._rows,
            self._traffic,
            self._row_shares,
            self._traffic_shares,
            self._group_of,
            self._known_fading,
            survival,
            shares,
        )
        return survival, shares, doubt

    def age(self, num_steps: int) -> None:
        """Drafts are made again after so many steps without: what was seen before says less of today."""
        fading = self._fading
        trials = np.maximum(self._traffic[1].max(axis=1), 1e-9)
        least = np.minimum(fading.old_weight / trials, 1.0)
        factor = np.maximum(0.5 ** (num_steps / fading.half_life), least)[:, None]
        self._traffic *= factor
        self._traffic_shares *= factor
