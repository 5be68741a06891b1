"""What a decision computes, written with numpy as the formulas read: what its compiled loops are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from outrider.runtime.gamma.acceptance import LEAST_RATE, MOST_RATE, Fading, Rates, Round
from outrider.runtime.gamma.costs import CostTable, RowKind, monotone
from outrider.runtime.gamma.forecast import Batch, Settings


class Rows:
    """A batch by the names of its facts."""

    def __init__(self, batch: Batch) -> None:
        caps, is_fixed, uses_model, self.kinds, self.num_missing, self.num_remaining = batch.facts
        self.caps, self.is_fixed, self.uses_model = caps, is_fixed > 0, uses_model > 0
        self.survival, self.num_live = batch.survival, batch.num_live
        self.num_cached, self.time_left_s = batch.num_cached, batch.time_left_s


class NumpyForecast:
    """The arrays of ``Forecast`` for every longest draft."""

    def __init__(
        self, table: CostTable, batch: Batch, scales: Rates, *, shared: int, horizon: int
    ) -> None:
        self.num_rows, self.max_gamma = batch.survival.shape
        batch = Rows(batch)
        self.batch, self.longest = batch, np.arange(self.max_gamma + 1)
        costs = [table.host.rows[kind] for kind in RowKind]
        self.token_s = np.array([one.token_s for one in costs])[batch.kinds]
        engine_s = self.engine_s(table, sum(costs[kind].row_s for kind in batch.kinds))
        self.floor = int((batch.caps * batch.is_fixed).max())
        least_s = np.maximum(engine_s, engine_s[self.floor]) if self.floor else engine_s
        self.once_s = catch_up_s(table, batch, shared, horizon)
        kept = np.cumsum(np.pad(batch.survival, ((0, 0), (1, 0))), axis=1)
        every = np.arange(self.num_rows)
        gammas = self.paying(self.num_rows / (engine_s[0] * scales[0]))
        for _ in range(2):
            emitted = (gammas > 0) * (1.0 + kept[every, gammas])
            self.table_s = least_s + gammas @ self.token_s + emitted @ self.once_s
            seconds = monotone(self.table_s * scales)
            seconds[batch.caps.max() + 1 :] = np.inf
            seconds[: self.floor] = np.inf
            left_s = batch.time_left_s
            if seconds[self.floor] <= left_s:
                seconds[seconds > left_s] = np.inf
            self.tokens, self.seconds = self.num_rows + kept[every, gammas].sum(axis=1), seconds
            self.gammas = gammas
            gammas = self.paying((self.tokens / seconds).max())
        capped = np.minimum(self.longest[:, None], batch.caps)
        fixed_s = (engine_s + capped @ self.token_s) * scales
        self.fixed = np.stack([self.num_rows + kept[every, capped].sum(axis=1), fixed_s])
        fixed_rows = np.flatnonzero(batch.is_fixed)
        self.plain_tokens = self.num_rows + kept[fixed_rows, batch.caps[fixed_rows]].sum()

    def engine_s(self, table: CostTable, rows_s: float) -> Rates:
        batch = self.batch
        capacity = table.capacity_for(batch.num_cached + self.max_gamma + 1)
        verify_s = [table.target.extend_s(batch.num_live, 1 + g, capacity) for g in self.longest]
        engine_s = np.array(verify_s) + table.host.step_s + rows_s
        if (batch.uses_model & (batch.caps > 0)).any():
            draft_s = table.draft.extend_s(batch.num_live, 1, capacity)
            engine_s += self.longest * (draft_s + table.host.call_s)
        return engine_s

    def paying(self, pay: float) -> np.ndarray:
        batch = self.batch
        price = (pay * self.token_s)[:, None]
        most = np.minimum((batch.survival > price).sum(axis=1), batch.caps)
        gammas = np.minimum(most, self.longest[:, None])
        gained = np.cumsum(np.pad(batch.survival - price, ((0, 0), (1, 0))), axis=1)
        every = np.arange(self.num_rows)
        emitted = 1.0 + np.cumsum(np.pad(batch.survival, ((0, 0), (1, 0))), axis=1)
        pays = gained[every, gammas] > pay * self.once_s * emitted[every, gammas]
        return np.where(batch.is_fixed, batch.caps, np.where(pays, gammas, 0))

    def best(self, in_use: int | None, lead: float, margin: float) -> int:
        rates = self.tokens / self.seconds
        rates[self.floor] *= 1.0 + lead * (self.num_rows > 1)
        best = int(rates.argmax())
        if in_use is None or rates[in_use] <= 0.0 or rates[best] > rates[in_use] * (1.0 + margin):
            return best
        return in_use

    def other(self, doubt: Rates, best: int, margin: float) -> int | None:
        rates = self.tokens / self.seconds
        hopes = rates * np.exp(doubt)
        hopes[[0, best]] = 0.0
        return int(hopes.argmax()) if hopes.max() > rates[best] * (1.0 + margin) else None


def catch_up_s(table: CostTable, batch: Rows, shared: int, horizon: int) -> Rates:
    """[n] seconds of catching up, per token emitted."""
    lagging = (batch.num_missing > shared) & batch.uses_model & ~batch.is_fixed
    seconds = feeding_s(table, batch.num_missing)
    return seconds / np.clip(batch.num_remaining, 1, horizon) * (lagging & (batch.caps > 0))


def feeding_s(table: CostTable, num_missing: np.ndarray) -> Rates:
    """[n] seconds to feed the draft model what rows miss, but for the last token of each."""
    (line_s,), tokens = table.catch_up.seconds, table.catch_up.tokens
    beyond_s = np.maximum(num_missing - 1 - tokens[-1], 0) * (line_s[-1] / tokens[-1])
    seconds: Rates = np.interp(num_missing - 1, tokens, line_s) + beyond_s
    return seconds


def exploration(
    table: CostTable,
    batch: Batch,
    fixed: Rates,
    settings: Settings,
    *,
    shared: int,
    chunk: int,
) -> tuple[list[int], float, int] | None:
    """Gammas, cost and steps of what is tried while nothing is drafted."""
    rows = Rows(batch)
    missing = np.where(rows.uses_model, rows.num_missing, 0)
    lasts = rows.num_remaining > settings.explore_trials + missing // chunk
    may = np.flatnonzero(~rows.is_fixed & (rows.caps > 0) & lasts)
    if not len(may):
        return None
    may = may[np.argsort(missing[may], kind="stable")]
    missing = missing[may]
    count = np.arange(1, len(may) + 1)
    fed = np.cumsum(np.where(missing > shared, missing - 1, 0))
    steps = np.maximum(-(-settings.explore_trials // count), settings.explore_steps)
    steps += np.maximum(-(-fed // chunk), 1) - 1
    once_s = np.cumsum(np.where(missing > shared, feeding_s(table, missing), 0.0))
    plain_s, longer_s = fixed[1, :2].tolist()
    longer_s -= plain_s
    gained_s = np.cumsum(rows.survival[may, 0]) * plain_s / batch.num_live
    least_s = max(0.05 * longer_s, 0.01 * plain_s)
    cost_s = once_s + steps * np.minimum(np.maximum(longer_s - gained_s, least_s), plain_s)
    num_tried = int((cost_s / (count * steps)).argmin()) + 1
    gammas = np.where(rows.is_fixed, rows.caps, 0)
    gammas[may[:num_tried]] = 1
    return gammas.tolist(), float(cost_s[num_tried - 1]), int(steps[num_tried - 1])


class NumpyBook:
    """The estimates of ``AcceptanceBook``."""

    def __init__(self, num_rows: int, max_gamma: int, num_groups: int) -> None:
        self.fading = Fading()
        self.group_of = np.zeros(num_rows, dtype=np.int64)
        self.rows = np.zeros((2, num_rows, max_gamma))
        self.traffic = np.zeros((2, num_groups, max_gamma))
        self.row_shares = np.zeros((3, num_rows, max_gamma))
        self.traffic_shares = np.zeros((3, num_groups, max_gamma))

    def record(self, rounds: Sequence[Round]) -> None:
        positions = np.arange(self.rows.shape[2])
        told = [one for one in rounds if one.num_asked]
        for one in told:
            for evidence in (self.rows, self.row_shares):
                evidence[:, one.row] *= self.fading.row_decay
            for evidence in (self.traffic, self.traffic_shares):
                evidence[:, self.group_of[one.row]] *= self.fading.traffic_decay
        for one in told:
            counts = np.array([one.num_drafted, one.num_called, one.num_asked])
            self.row_shares[:, one.row] += positions < counts[:, None]
            self.traffic_shares[:, self.group_of[one.row]] += positions < counts[:, None]
            reached = min(one.num_accepted + 1, one.num_asked)
            hits = (positions < one.num_accepted).astype(float)
            hits[: len(one.overlaps)] = one.overlaps
            for evidence, owner in ((self.rows, one.row), (self.traffic, self.group_of[one.row])):
                evidence[0, owner] += hits
                evidence[1, owner] += positions < reached

    def traffic_rates(self) -> Rates:
        fading, (hits, trials) = self.fading, self.traffic
        prior = fading.first_weight * fading.first_rate
        pooled = (hits.sum(axis=1) + prior) / (trials.sum(axis=1) + fading.first_weight)
        weight = fading.position_weight
        return np.clip((hits + weight * pooled[:, None]) / (trials + weight), LEAST_RATE, MOST_RATE)

    def shares(self) -> Rates:
        """[2, num_rows, G] proposed, and called for, of what is asked for."""
        weight, usual = self.fading.position_weight, np.ones((2, self.traffic.shape[1]))
        of_traffic = np.empty((2, *self.traffic.shape[1:]))
        for position in range(self.traffic.shape[2]):
            *counts, asked = self.traffic_shares[:, :, position]
            usual = of_traffic[:, :, position] = (counts + weight * usual) / (asked + weight)
        weight, (*counts, asked) = self.fading.traffic_weight, self.row_shares
        shares = (counts + weight * of_traffic[:, self.group_of]) / (asked + weight)
        return np.minimum.accumulate(shares, axis=2)

    def rates(self) -> Rates:
        fading, (hits, trials) = self.fading, self.rows
        traffic = self.traffic_rates()[self.group_of]
        expected, mean = (trials * traffic).sum(axis=1), traffic.mean(axis=1)
        good, bad = fading.traffic_weight * mean, fading.traffic_weight * (1.0 - mean)
        found, total = hits.sum(axis=1), trials.sum(axis=1)
        factor = (found + good) / (expected + good) * (total - expected + bad)
        factor /= np.maximum(total - found, 0.0) + bad
        odds = traffic / (1.0 - traffic) * factor[:, None]
        weight = fading.position_weight
        rates = (odds / (1.0 + odds) * weight + hits) / (weight + trials)
        return np.clip(rates, LEAST_RATE, MOST_RATE)


class NumpyFilter:
    """The Kalman filter of ``StepTimes`` for one load, in matrices."""

    def __init__(self, prior: Rates, noise: float) -> None:
        self.prior, self.noise = prior, noise
        self.mean, self.covariance = np.zeros(len(prior)), prior.copy()

    def learn(self, longest: int, ratios: Sequence[float]) -> None:
        count = len(ratios)
        fresh = 2e-4 * count
        self.covariance = (1.0 - fresh) * self.covariance + fresh * self.prior
        self.covariance[0, 0] += min(0.02**2 * count, 0.3**2)
        self.mean[1:] *= 1.0 - fresh
        looks = np.zeros(len(self.mean))
        looks[[0, 1 + longest]] = 1.0
        expected = float(looks @ self.mean)
        seen, variance = self.look(np.array(ratios), math.exp(expected))
        gain = self.covariance @ looks / (looks @ self.covariance @ looks + variance)
        self.mean = np.clip(self.mean + gain * (seen - expected), -math.log(10), math.log(10))
        self.covariance = self.covariance - np.outer(gain, looks @ self.covariance)

    def look(self, ratios: Rates, usual: float) -> tuple[float, float]:
        count = len(ratios)
        held = np.minimum(ratios, 8.0 * max(usual, ratios.min()))
        mean = held.mean()
        apart = held.std(ddof=1) / mean if count > 1 else abs(held[0] - usual) / usual
        scatter = min(apart, 8.0)
        self.noise += min(0.5, 0.03 * count) * (scatter - self.noise)
        self.noise = max(0.03, self.noise)
        variance = max(self.noise, scatter if count > 1 else 0.0) ** 2 / count
        return math.log(mean) + variance / 2.0, variance

    def doubt(self, longest: int) -> Rates:
        to_log = np.eye(len(self.mean) - 1) - np.eye(len(self.mean) - 1)[longest]
        variances = np.diagonal(to_log @ self.covariance[1:, 1:] @ to_log.T)
        return np.sqrt(np.maximum(variances, 0.0))
