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
        horizon: steps over which feeding the draft model what it missed is expected to pay.
        probe_every: steps with drafts between two without, which measure what drafts gain.
        explore_share: of the time of steps without drafts, spent on finding out whether drafts
            would be kept by now.
        hopeful_share: the same while the times known leave room for a gain.
        explore_steps: steps of one such attempt.
        cost_share: of the decoding time, spent on choosing at most while the rows stay the same.
    """

    margin: float = 0.01
    horizon: int = 64
    probe_every: int = 128
    explore_share: float = 0.005
    hopeful_share: float = 0.01
    explore_steps: int = 6
    cost_share: float = 0.005


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
        fixed_tokens: [G + 1] expected tokens if every row took G, or its cap.
        fixed_s: [G + 1] expected time then.
    """

    tokens: Rates
    seconds: Rates
    table_s: Rates
    gammas: Ints
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
    """

    def __init__(
        self, table: CostTable, *, max_gamma: int, max_shared_missing: int, settings: Settings
    ) -> None:
        self._table = table
        self._max_gamma = max_gamma
        self.shared = max_shared_missing
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
        verify_s, call_s = self._curves(batch.num_live, batch.num_cached)
        token_s = self._token_s[batch.kinds]
        base_s = self._table.host.step_s + float(self._row_s[batch.kinds].sum())
        uses_model = bool((batch.uses_model & (batch.caps > 0)).any())
        longest = np.arange(self._max_gamma + 1)
        engine_s = base_s + verify_s + longest * (call_s if uses_model else 0.0)
        floor = int((batch.caps * batch.is_fixed).max())
        ceiling = int(batch.caps.max())
        once_s = self._catch_up_s(batch)
        every = np.arange(len(batch.caps))
        kept = np.zeros((len(every), self._max_gamma + 1))
        np.cumsum(batch.survival, axis=1, out=kept[:, 1:])
        pay = len(every) / float(engine_s[0] * scales[0])
        gammas = self._gammas(batch, pay, token_s, once_s)
        for is_last in (False, True):
            drafted_s = (gammas * token_s + (gammas > 0) * once_s).sum(axis=1)
            table_s = np.maximum(engine_s, engine_s[floor]) + drafted_s
            seconds = monotone(table_s * scales)
            seconds[ceiling + 1 :] = np.inf
            seconds[:floor] = np.inf
            self._heed_deadline(batch, seconds, floor)
            tokens = len(every) + kept[every, gammas].sum(axis=1)
            # At the best rate that these gammas reach, fewer or more may pay.
            pay = float((tokens / seconds).max())
            if is_last or np.array_equal(
                better := self._gammas(batch, pay, token_s, once_s), gammas
            ):
                break
            gammas = better
        capped = np.minimum(longest[:, None], batch.caps)
        return Forecast(
            tokens=tokens,
            seconds=seconds,
            table_s=table_s,
            gammas=gammas,
            fixed_tokens=len(every) + kept[every, capped].sum(axis=1),
            fixed_s=(engine_s + (capped * token_s).sum(axis=1)) * scales,
        )

    def catch_up_s(self, num_missing: int) -> float:
        """Seconds to feed the draft model what one row misses, beyond what is fed along anyway."""
        table = self._table.catch_up
        if table is None or num_missing <= self.shared:
            return 0.0
        return table.extend_s(1, num_missing - 1, table.capacity)

    def _gammas(self, batch: Batch, pay: float, token_s: Rates, once_s: Rates) -> Ints:
        """[G + 1, n] the positions that pay at ``pay`` tokens per second, for every longest draft.

        Survival falls with the position, so that those which pay are the first ones.
        """
        worth = (batch.survival > pay * token_s[:, None]).sum(axis=1)
        most = np.where(batch.is_fixed, batch.caps, np.minimum(worth, batch.caps))
        longest = np.arange(self._max_gamma + 1)[:, None]
        gammas = np.where(batch.is_fixed, most, np.minimum(most, longest))
        if once_s.any():
            net = np.cumsum(batch.survival - pay * token_s[:, None], axis=1)
            gained = np.concatenate([np.zeros((len(most), 1)), net], axis=1)
            pays = gained[np.arange(len(most)), gammas] > pay * once_s
            gammas = np.where(pays | batch.is_fixed, gammas, 0)
        return gammas

    def _catch_up_s(self, batch: Batch) -> Rates:
        """[n] seconds per step that catching up costs a row that goes on drafting after it."""
        lagging = batch.uses_model & ~batch.is_fixed & (batch.caps > 0)
        lagging &= batch.num_missing > self.shared
        once_s = np.zeros(len(batch.caps))
        table = self._table.catch_up
        if table is None or not lagging.any():
            return once_s
        tokens, seconds = table.tokens, table.seconds[0]
        missing = batch.num_missing[lagging] - 1
        steps = np.clip(batch.num_remaining[lagging], 1, self._settings.horizon)
        beyond_s = np.maximum(missing - tokens[-1], 0) * (seconds[-1] / tokens[-1])
        once_s[lagging] = (np.interp(missing, tokens, seconds) + beyond_s) / steps
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
