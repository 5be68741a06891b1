"""What each choice of gammas would bring a batch: tokens and seconds of its next step.

Expected tokens are 1 per row plus the survival of each drafted position; seconds come from the cost
table. A step's time depends on the longest draft (draft calls in lockstep, one verification as wide
as the widest row), so every longest draft G is tried, and below it each row takes the positions
that pay for their own share: those whose survival exceeds the rate of the batch times what a token
costs the row. Rows with a gamma of their own keep it, and what it costs is there anyway.

Where engines pack rows, a step's time depends on the total of tokens, and a draft call's on the rows that
still draft: then a position that is not likely to be kept costs what any other does, and each longest
draft takes the positions of the best rate (``core.packed_loops``).

Nothing here looks at noise or at a draft that is not verified yet: a choice depends on what was
revealed, on costs, and on the clock, and so leaves the law of the answer alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.core import choice_loops, packed_loops
from runtime.core.acceptance import Rates
from runtime.core.costs import CostTable, RowKind
from runtime.core.packed_prices import PackedPrices, PackedStep

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
        horizon: steps over which feeding the draft model what it missed is expected to pay.
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
    horizon: int = 64
    probe_every: int = 1024
    probe_share: float = 0.004
    lost_share: float = 0.005
    trial_share: float = 0.003
    explore_trials: int = 8
    explore_steps: int = 2
    cost_share: float = 0.0025
    idle_share: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows that decode in the next step.

    Attributes:
        caps: [n] most draft tokens each row may take; 0 for rows without drafts.
        is_fixed: [n] bool; a row with a gamma of its own takes its cap.
        uses_model: [n] bool, whether drafting for the row calls the draft model.
        kinds: [n] index into ``KINDS``.
        num_missing: [n] committed tokens that the draft model has not been fed.
        num_remaining: [n] tokens the row may still emit.
        survival: [n, G] from the acceptance book.
        doubt: standard deviation of the acceptance that the traffic shows.
        num_live: rows of the engine call, decoding or not.
        num_cached: tokens of the longest row so far.
        time_left_s: until the earliest deadline; None without one.
        is_refilled: whether other requests wait for the slots of those that end.
    """

    caps: Ints
    is_fixed: npt.NDArray[np.bool_]
    uses_model: npt.NDArray[np.bool_]
    kinds: Ints
    num_missing: Ints
    num_remaining: Ints
    survival: Rates
    num_live: int
    num_cached: int
    time_left_s: float | None = None
    doubt: float = 0.0
    is_refilled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What every longest draft would bring; entry G of each array is for G = 0..max_gamma.

    Attributes:
        figures: [5, G + 1] float64: the properties below.
        gammas: [G + 1, n] each row's gamma.
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

    def rate(self, longest: int) -> float:
        """Tokens per second of one of them."""
        return float(self.tokens[longest] / self.seconds[longest])


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
        facts = np.array(
            (
                batch.caps,
                batch.is_fixed,
                batch.uses_model,
                batch.kinds,
                batch.num_missing,
                batch.num_remaining,
            ),
            dtype=np.int64,
        )
        left_s = math.inf if batch.time_left_s is None else batch.time_left_s
        survival = np.ascontiguousarray(batch.survival)
        figures = np.empty((5, self._max_gamma + 1))
        gammas = np.zeros((self._max_gamma + 1, facts.shape[1]), dtype=np.int64)
        if not self._packs_rows:
            curves = self._curves(batch.num_live, batch.num_cached)
            floor, plain_tokens = choice_loops.predict(
                facts, survival, curves, self._prices, self._catch_up, scales, self._catching, left_s,
                figures, gammas,
            )  # fmt: skip
            plain_s = float(figures[choice_loops.TABLE_S, floor])
            return Forecast(
                figures=figures,
                gammas=gammas,
                floor=floor,
                plain_tokens=plain_tokens,
                plain_table_s=plain_s,
            )
        packed = self._packed_prices(batch.num_live, batch.num_cached)
        once_s = np.empty(facts.shape[1])
        choice_loops.price_catching_up(facts, self._catch_up, *self._catching, once_s)
        floor, plain_tokens, plain_s = packed_loops.predict(
            facts, survival, packed.verify_s, packed.calls_s, self._prices, once_s, scales, left_s,
            figures, gammas,
        )  # fmt: skip
        return Forecast(
            figures=figures,
            gammas=gammas,
            floor=floor,
            plain_tokens=plain_tokens,
            plain_table_s=plain_s,
            packed=PackedStep(packed, self._prices, batch.kinds, batch.uses_model),
        )

    def catch_up_each_s(self, num_missing: Ints) -> Rates:
        """[n] seconds to feed the draft model what each row misses, beyond what is fed along anyway.

        Args:
            num_missing: [n] tokens.
        """
        tokens, seconds = self._catch_up
        if not len(tokens):
            return np.zeros(len(num_missing))
        fed = num_missing - 1
        each_s = np.interp(fed, tokens, seconds)
        if len(tokens) > 1:
            last_slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
            each_s += np.maximum(fed - tokens[-1], 0.0) * last_slope
        each_s[num_missing <= self.shared] = 0.0
        return each_s

    def catch_up_all_s(self, batch: Batch, gammas: Ints) -> float:
        """Seconds to feed it all that rows which are to draft miss."""
        fed = batch.num_missing[(gammas > 0) & batch.uses_model & ~batch.is_fixed]
        return float(self.catch_up_each_s(fed).sum())

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
            known = PackedPrices.of(self._table, num_live, capacity, self._max_gamma)
            self._packed[(num_live, capacity)] = known
        return known
