"""A choice of gammas for some rows, and decisions that nothing pays, kept by situation."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from outrider.runtime.gamma import choice_loops
from outrider.runtime.gamma.forecast import Batch, Forecast, Settings
from outrider.runtime.gamma.guard import MOST_STEPS, Account
from outrider.runtime.gamma.trials import Trial

# Situations that are kept, and how often each stands in for a decision before it is thought over.
MAX_SETTLED, SETTLED_FOR = 256, 64

LEAST_DOUBT = 0.03
"""Standard deviation of an acceptance that is well known: of such a doubt drafts have no benefit."""


class StepKind(StrEnum):
    """What a step is for.

    GAIN: drafts are expected to pay. NO_GAIN: they are not. PROBE: a step without drafts among
    steps with them. EXPLORE: another longest draft than the one that is expected to be best.
    """

    GAIN = "gain"
    NO_GAIN = "no_gain"
    PROBE = "probe"
    EXPLORE = "explore"


class Taken(NamedTuple):
    """A step that was taken over the rows last decided on.

    Attributes:
        seconds: it took; 0 where the clock is too coarse to tell.
        longest: greatest draft that was verified.
        num_emitted: tokens it emitted.
        num_rows: that decoded.
        kind: what it was for.
        catches_up: whether its time holds what a draft model was fed that it had missed, and so says
            nothing of the table.
        drafted: row and length of each draft that was verified, and tokens of it that the draft model was called
            for; looked at where engines pack rows.
    """

    seconds: float
    longest: int
    num_emitted: int
    num_rows: int
    kind: StepKind
    catches_up: bool = False
    drafted: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class Decision:
    """What holds until the next decision.

    Attributes:
        batch: the rows.
        forecast: for them.
        plain_s: expected time of a step without drafts, but for rows of a fixed gamma.
        floor: longest draft of rows of a fixed gamma.
        gammas: [n] of the best choice.
        bare: [n] of a step without drafts, but for rows of a fixed gamma.
        account: what pays for drafts.
        trial: something else to try; None for nothing.
        longest: greatest gamma of a row that is not fixed.
        saved_s: time that each other step earns for a trial while drafts are made.
        probe_every: steps with drafts between two probes.
        num_steps: steps taken under it, that the ledger does not know of yet.
        num_uses: decisions that it took the place of.
    """

    batch: Batch
    forecast: Forecast
    plain_s: float
    floor: int
    gammas: list[int]
    bare: list[int]
    account: Account
    trial: Trial | None
    longest: int
    saved_s: float
    probe_every: int
    num_steps: int = 0
    num_uses: int = 0

    @property
    def most_s(self) -> float:
        """Credit kept at most."""
        return MOST_STEPS * self.plain_s

    def step_table_s(self, step: Taken) -> float:
        """Tabled time of a step: of its longest draft, or of the very drafts where each token has a price."""
        packed = self.forecast.packed
        if packed is None:
            return float(self.forecast.table_s[step.longest])
        return packed.table_s(step.drafted)

    def shape(self, step: Taken) -> tuple[int, int]:
        """What engines plan a step by."""
        size = step.longest
        if self.forecast.packed is not None:
            size = sum([length for _, length, _ in step.drafted])
        return self.batch.num_live, size


class Settled:
    """Decisions to draft nothing, by situation; the oldest makes room."""

    def __init__(self) -> None:
        self._decisions: dict[Hashable, Decision] = {}

    def keep(self, situation: Hashable, decision: Decision) -> None:
        """What holds whenever rows are in such a situation again."""
        while len(self._decisions) >= MAX_SETTLED:
            del self._decisions[next(iter(self._decisions))]
        self._decisions[situation] = decision

    def find(self, situation: Hashable) -> Decision | None:
        """The decision for such a situation; None where one is due."""
        decision = self._decisions.get(situation)
        return None if decision is None or decision.num_uses >= SETTLED_FOR else decision

    def clear(self) -> None:
        """What never paid may pay."""
        self._decisions.clear()


def best_longest(
    forecast: Forecast,
    kept: int | None,
    settings: Settings,
    *,
    doubt: float = 0.0,
    is_refilled: bool = False,
) -> int:
    """The longest draft to take; ``kept``, the one in use, keeps its place until another promises a margin more.

    Args:
        forecast: for the rows.
        kept: None for none.
        settings: of the controller.
        doubt: of the acceptance, of whose benefit drafts are given ``settings.hope`` times as much.
        is_refilled: whether other requests wait for the rows' slots, so that the batch stays as large.
    """
    figures, (width, num_rows) = forecast.figures, forecast.gammas.shape
    lead = settings.lead if num_rows > 1 and not is_refilled else 0.0
    if doubt and width > 1:
        # What that many more kept of every row's first draft would bring.
        hope = settings.hope * max(doubt - LEAST_DOUBT, 0.0)
        lead -= hope * num_rows / float(figures[choice_loops.FIXED_TOKENS, 1])
    in_use = width if kept is None else kept
    return choice_loops.pick(figures, forecast.floor, in_use, lead, settings.margin)
