"""What each choice of gammas would bring a batch: tokens and seconds of its next step.

Expected tokens are 1 per row plus the survival of each drafted position; seconds come from the cost
table. A step's time depends on the longest draft (draft calls in lockstep, one verification as wide
as the widest row), so every longest draft G is tried, and below it each row takes the positions
that pay for their own share: those whose survival exceeds the rate of the batch times what a token
costs the row. Rows with a gamma of their own keep it, and what it costs is there anyway.

Nothing here looks at noise or at a draft that is not verified yet: a choice depends on what was
revealed, on costs, and on the clock, and so leaves the law of the answer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.core.acceptance import Rates
from runtime.core.costs import CostTable, RowKind, monotone

Ints = npt.NDArray[np.int64]
KINDS = tuple(RowKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the controller behaves; shares are of time.

    Attributes:
        margin: another longest draft is taken only where it promises this share more.
        lead: share that drafts must promise beyond plain decoding where several rows decode: rows that
            run ahead leave early, and the others go on in a smaller batch, at a higher price per token.
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
    lead: float = 0.03
    horizon: int = 64
    probe_every: int = 1024
    probe_share: float = 0.005
    lost_share: float = 0.005
    trial_share: float = 0.01
    explore_trials: int = 8
    explore_steps: int = 2
    cost_share: float = 0.005
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
        num_live: rows of the engine call, decoding or not.
        num_cached: tokens of the longest row so far.
        time_left_s: until the earliest deadline; None without one.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What every longest draft would bring; entry G of each array is for G = 0..max_gamma.

    Attributes:
        tokens: [G + 1] expected emitted tokens of the step.
        seconds: [G + 1] expected time of the step; infinite where it is not allowed.
        table_s: [G + 1] the same as the table has it, for every G.
        gammas: [G + 1, n] each row's gamma.
        floor: longest draft of rows of a fixed gamma.
        fixed_tokens: [G + 1] expected tokens if every row took G, or its cap.
        fixed_s: [G + 1] expected time then.
    """

    tokens: Rates
    seconds: Rates
    table_s: Rates
    gammas: Ints
    floor: int
    fixed_tokens: Rates
    fixed_s: Rates

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
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        max_shared_missing: int,
        settings: Settings,
        chunk: int = 256,
    ) -> None:
        self._table = table
        self._max_gamma = max_gamma
        self._longest = np.arange(max_gamma + 1)
        self.shared = max_shared_missing
        self.chunk = chunk
        self._settings = settings
        rows = [table.host.rows[kind] for kind in KINDS]
        self._row_s = np.array([row.row_s for row in rows])
        self._token_s = np.array([row.token_s for row in rows])
        self._known: dict[tuple[int, int], tuple[Rates, float]] = {}

    def forecast(self, batch: Batch, scales: Rates) -> Forecast:
        """Tokens, seconds and gammas for every longest draft.

        Args:
            batch: at least one row.
            scales: [G + 1] measured over tabled time, by longest draft.
        """
        num_rows = len(batch.caps)
        floor = int((batch.caps * batch.is_fixed).max()) if batch.is_fixed.any() else 0
        ceiling = int(batch.caps.max())
        engine_s = self._engine_s(batch)
        least_s = np.maximum(engine_s, engine_s[floor]) if floor else engine_s
        token_s = self._token_s[batch.kinds]
        once_s = self._catch_up_s(batch)
        every = np.arange(num_rows)
        kept = np.zeros((num_rows, self._max_gamma + 1))
        np.cumsum(batch.survival, axis=1, out=kept[:, 1:])
        pay = num_rows / float(engine_s[0] * scales[0])
        gammas = self._gammas(batch, pay, token_s, once_s)
        for is_last in (False, True):
            table_s = least_s + gammas @ token_s
            if once_s is not None:
                table_s += (gammas > 0) @ once_s
            seconds = monotone(table_s * scales)
            seconds[ceiling + 1 :] = np.inf
            seconds[:floor] = np.inf
            self._heed_deadline(batch, seconds, floor)
            tokens = num_rows + kept[every, gammas].sum(axis=1)
            # At the best rate that these gammas reach, fewer or more may pay.
            pay = float((tokens / seconds).max())
            if is_last:
                break
            better = self._gammas(batch, pay, token_s, once_s)
            if (better == gammas).all():
                break
            gammas = better
        capped = np.minimum(self._longest[:, None], batch.caps)
        return Forecast(
            tokens=tokens,
            seconds=seconds,
            table_s=table_s,
            gammas=gammas,
            floor=floor,
            fixed_tokens=num_rows + kept[every, capped].sum(axis=1),
            fixed_s=(engine_s + capped @ token_s) * scales,
        )

    def _engine_s(self, batch: Batch) -> Rates:
        """[G + 1] tabled seconds of a step but for what its draft tokens cost their rows."""
        verify_s, call_s = self._curves(batch.num_live, batch.num_cached)
        engine_s = verify_s + (self._table.host.step_s + float(self._row_s[batch.kinds].sum()))
        if (batch.uses_model & (batch.caps > 0)).any():
            engine_s += self._longest * call_s
        return engine_s

    def catch_up_s(self, num_missing: int) -> float:
        """Seconds to feed the draft model what one row misses, beyond what is fed along anyway."""
        table = self._table.catch_up
        if table is None or num_missing <= self.shared:
            return 0.0
        return table.extend_s(1, num_missing - 1, table.capacity)

    def catch_up_all_s(self, batch: Batch, gammas: Ints) -> float:
        """Seconds to feed it all that rows which are to draft miss."""
        fed = batch.num_missing[(gammas > 0) & batch.uses_model & ~batch.is_fixed]
        return sum(self.catch_up_s(int(missing)) for missing in fed)

    def _gammas(self, batch: Batch, pay: float, token_s: Rates, once_s: Rates | None) -> Ints:
        """[G + 1, n] the positions that pay at ``pay`` tokens per second, for every longest draft.

        Survival falls with the position, so that those which pay are the first ones.
        """
        price = (pay * token_s)[:, None]
        most = np.minimum((batch.survival > price).sum(axis=1), batch.caps)
        gammas: Ints = np.minimum(most, self._longest[:, None])
        if once_s is not None:
            gained = np.zeros((len(most), self._max_gamma + 1))
            np.cumsum(batch.survival - price, axis=1, out=gained[:, 1:])
            pays = gained[np.arange(len(most)), gammas] > pay * once_s
            gammas = np.where(pays, gammas, 0)
        if batch.is_fixed.any():
            gammas = np.where(batch.is_fixed, batch.caps, gammas)
        return gammas

    def _catch_up_s(self, batch: Batch) -> Rates | None:
        """[n] seconds per step that catching up costs a row that goes on drafting after it; None for none."""
        lagging = batch.num_missing > self.shared
        table = self._table.catch_up
        if table is None or not lagging.any():
            return None
        lagging &= batch.uses_model & ~batch.is_fixed & (batch.caps > 0)
        tokens, seconds = table.tokens, table.seconds[0]
        missing = batch.num_missing - 1
        steps = np.clip(batch.num_remaining, 1, self._settings.horizon)
        beyond_s = np.maximum(missing - tokens[-1], 0) * (seconds[-1] / tokens[-1])
        once_s: Rates = (np.interp(missing, tokens, seconds) + beyond_s) / steps * lagging
        return once_s

    def _curves(self, num_live: int, num_cached: int) -> tuple[Rates, float]:
        """[G + 1] seconds to verify every longest draft, and seconds of one draft call."""
        capacity = self._table.capacity_for(num_cached + self._max_gamma + 1)
        known = self._known.get((num_live, capacity))
        if known is None:
            verify_s = [
                self._table.target.extend_s(num_live, gamma + 1, capacity)
                for gamma in range(self._max_gamma + 1)
            ]
            draft = self._table.draft
            call_s = 0.0 if draft is None else draft.extend_s(num_live, 1, capacity)
            known = np.array(verify_s), call_s + self._table.host.call_s
            self._known[(num_live, capacity)] = known
        return known

    def _heed_deadline(self, batch: Batch, seconds: Rates, floor: int) -> None:
        """Where a shorter step still meets the earliest deadline, no longer one is allowed."""
        left = batch.time_left_s
        if left is not None and seconds[floor] <= left:
            seconds[seconds > left] = np.inf
