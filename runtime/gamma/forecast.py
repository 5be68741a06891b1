"""What each choice of gammas would bring a batch: tokens and seconds of its next step.

Expected tokens are 1 per row plus the survival of each drafted position; seconds come from the cost
table. A step's time depends on the longest draft (draft calls in lockstep, one verification as wide
as the widest row), so every longest draft G is tried, and below it each row takes the positions
that pay for their own share: those whose survival exceeds the rate of the batch times what a token
costs the row. Rows with a gamma of their own keep it, and what it costs is there anyway.

Where engines pack rows, a step's time depends on the total of tokens that are proposed, which may be
fewer than are asked for, and a draft call's on the rows that still draft: then a position that is not
likely to be kept costs what any other does, and each longest draft takes the positions of the best rate
(``core.packed_loops``).

Nothing here looks at noise or at a draft that is not verified yet: a choice depends on what was
revealed, on costs, and on the clock, and so leaves the law of the answer alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma import choice_loops, feeding_loops, packed_loops
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.gamma.packed_prices import PackedPrices, PackedStep

Ints = npt.NDArray[np.int64]
KINDS = tuple(RowKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the controller behaves; shares are of time.

    Attributes:
        margin: another longest draft is taken only where it promises this share more.
        lead: share that drafts must promise beyond plain decoding where several rows decode and nobody waits for
            their slots: rows that run ahead leave early, and the others go on in a smaller batch, at a higher
            price per token.
        hope: standard deviations of the acceptance by which drafts that are made are given the benefit of the
            doubt: the first few tell little, and to find out again costs another catching up.
        horizon: tokens of an answer over which feeding the draft model what it missed is expected to pay, or all that
            are left if these are fewer.
        probe_every: steps with drafts between two probes at most, which measure what drafts gain.
        probe_share: of the time of steps with drafts, spent on probes.
        lost_share: of the time served, that may be lost against plain decoding (``core.account``).
        trial_share: of the time of steps with drafts, spent on drafts of another length while the
            times known leave room for a gain.
        explore_trials: drafts of one token that one exploration judges at least.
        explore_steps: steps that it takes at least.
        cost_share: of the decoding time, spent on choosing at most while the rows stay the same.
        idle_share: the same while nothing is drafted.
    """

    margin: float = 0.01
    lead: float = 0.06
    hope: float = 2.0
    horizon: int = 128
    probe_every: int = 1024
    probe_share: float = 0.004
    lost_share: float = 0.005
    trial_share: float = 0.003
    explore_trials: int = 8
    explore_steps: int = 2
    cost_share: float = 0.0025
    idle_share: float = 0.001


class Batch(NamedTuple):
    """The rows that decode in the next step.

    Attributes:
        facts: [6, n] int64, rows as ``choice_loops`` names them: most draft tokens that a request may take, 0 for none;
            whether its gamma is its own, so that it takes all of them; whether drafting for it calls the draft
            model; index into ``KINDS``; committed tokens that the draft model has not been fed; tokens that it may
            still emit.
        survival: [n, G] from the acceptance book.
        shares: [2, n, G] from there: of what is asked for, what is proposed, and what the draft model is called for.
        num_cached: tokens of the longest row so far.
        time_left_s: until the earliest deadline; infinite without one.
        doubt: standard deviation of the acceptance that the traffic shows.
        is_refilled: whether other requests wait for the slots of those that end.
    """

    facts: Ints
    survival: Rates
    shares: Rates
    num_cached: int
    time_left_s: float = math.inf
    doubt: float = 0.0
    is_refilled: bool = False

    @property
    def num_live(self) -> int:
        """Rows of the engine call, decoding or not."""
        return len(self.survival)


def may_draft(batch: Batch) -> bool:
    """Whether some row may draft that has no gamma of its own."""
    caps, is_fixed = batch.facts[choice_loops.CAP], batch.facts[choice_loops.IS_FIXED]
    return bool(caps[is_fixed == 0].any())


class Forecast(NamedTuple):
    """What every longest draft would bring; entry G of each array is for G = 0..max_gamma.

    Attributes:
        figures: [5, G + 1] float64: the properties below.
        gammas: [G + 1, n] each row's gamma; the first are those of a step in which only rows of a fixed gamma draft.
        floor: longest draft of rows of a fixed gamma.
        plain_tokens: that a step is expected to emit in which only rows of a fixed gamma draft.
        plain_table_s: tabled time of such a step.
        packed: what steps cost; None where the longest draft says it.
    """

    figures: Rates
    gammas: Ints
    floor: int
    plain_tokens: float
    plain_table_s: float
    packed: PackedStep | None = None

    @property
    def tokens(self) -> Rates:
        """[G + 1] expected emitted tokens of the step."""
        tokens: Rates = self.figures[choice_loops.TOKENS]
        return tokens

    @property
    def seconds(self) -> Rates:
        """[G + 1] expected time of the step; infinite where it is not allowed."""
        seconds: Rates = self.figures[choice_loops.SECONDS]
        return seconds

    @property
    def table_s(self) -> Rates:
        """[G + 1] the same as the table has it, for every G."""
        table_s: Rates = self.figures[choice_loops.TABLE_S]
        return table_s

    @property
    def fixed(self) -> Rates:
        """[2, G + 1] expected tokens and time if every row took G, or its cap."""
        fixed: Rates = self.figures[choice_loops.FIXED_TOKENS :]
        return fixed

    @property
    def rates(self) -> Rates:
        """[G + 1] tokens per second."""
        rates: Rates = self.tokens / self.seconds
        return rates


class Forecaster:
    """Turns a batch into a forecast under a cost table.

    Args:
        table: measured costs.
        max_gamma: G.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        settings: of the controller.
        chunk: tokens that rows are fed in one step to catch up, together.
        packs_rows: whether a step costs by the total of its tokens.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        max_shared_missing: int,
        settings: Settings,
        chunk: int = 256,
        packs_rows: bool = False,
    ) -> None:
        self._packs_rows = packs_rows
        self._table = table
        self._max_gamma = max_gamma
        self.shared = max_shared_missing
        self.chunk = chunk
        self._catching = max_shared_missing, settings.horizon
        rows = [table.host.rows[kind] for kind in KINDS]
        self._prices = np.array([[row.row_s for row in rows], [row.token_s for row in rows]])
        self._catch_up = np.empty((2, 0))
        if table.catch_up is not None:
            self._catch_up = np.array([table.catch_up.tokens, table.catch_up.seconds[0]])
        self._known: dict[tuple[int, int], Rates] = {}
        self._packed: dict[tuple[int, int], PackedPrices] = {}

    def forecast(self, batch: Batch, scales: Rates) -> Forecast:
        """Tokens, seconds and gammas for every longest draft.

        Args:
            batch: at least one row.
            scales: [G + 1] measured over tabled time, by longest draft.
        """
        facts, num_rows = batch.facts, batch.num_live
        figures = np.empty((5, self._max_gamma + 1))
        gammas = np.zeros((self._max_gamma + 1, num_rows), dtype=np.int64)
        once_s = np.empty(num_rows)
        feeding_loops.price_catching_up(facts, self._catch_up, *self._catching, once_s)
        if not self._packs_rows:
            curves = self._curves(num_rows, batch.num_cached)
            floor, plain_tokens = choice_loops.predict(
                facts, batch.survival, curves, self._prices, once_s, scales, batch.time_left_s, figures,
                gammas,
            )  # fmt: skip
            plain_s = float(figures[choice_loops.TABLE_S, floor])
            return Forecast(figures, gammas, floor, plain_tokens, plain_s)
        packed = self._packed_prices(num_rows, batch.num_cached)
        floor, plain_tokens, plain_s = packed_loops.predict(
            facts, batch.survival, batch.shares, packed.verify_s, packed.calls_s, self._prices, once_s, scales,
            batch.time_left_s, figures, gammas,
        )  # fmt: skip
        step = PackedStep(packed, facts)
        return Forecast(figures, gammas, floor, plain_tokens, plain_s, step)

    def feeding_s(self, num_missing: Ints) -> Rates:
        """[n] seconds to feed the draft model what rows miss, beyond what is fed along anyway.

        Args:
            num_missing: [n] tokens.
        """
        seconds = np.empty(len(num_missing))
        feeding_loops.price_feeding(num_missing, self._catch_up, self.shared, seconds)
        return seconds

    def _curves(self, num_live: int, num_cached: int) -> Rates:
        """[2, G + 1] seconds to verify every longest draft, and of its draft calls."""
        capacity = self._table.capacity_for(num_cached + self._max_gamma + 1)
        known = self._known.get((num_live, capacity))
        if known is None:
            host, draft = self._table.host, self._table.draft
            call_s = host.call_s + (draft.extend_s(num_live, 1, capacity) if draft else 0.0)
            lengths = range(self._max_gamma + 1)
            verify_s = [self._table.target.extend_s(num_live, 1 + g, capacity) for g in lengths]
            known = np.array(
                [[host.step_s + one for one in verify_s], [g * call_s for g in lengths]]
            )
            self._known[(num_live, capacity)] = known
        return known

    def _packed_prices(self, num_live: int, num_cached: int) -> PackedPrices:
        capacity = self._table.capacity_for(num_cached + self._max_gamma + 1)
        known = self._packed.get((num_live, capacity))
        if known is None:
            known = PackedPrices.of(self._table, self._prices, num_live, capacity, self._max_gamma)
            self._packed[(num_live, capacity)] = known
        return known
