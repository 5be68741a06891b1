"""Bounds what drafts can lose: measured step times, plain probes, and a budget.

Plain decoding is the baseline. Every step earns a small share of its time; a step with drafts pays what it lost against
plain decoding as measured, or adds what it gained. Drafts are made, and tried, out of this budget only, so that after
any time T

    lost <= first budget + share * T + what one step and one catching up can overdraw,

whatever the forecasts say, where one step counts for ``MOST_LOST`` plain ones at most (a budget over a baseline as in
conservative bandits: Wu et al. 2016, arXiv 1602.04282).
"""

from __future__ import annotations

from dataclasses import dataclass

# Reasoned, not tuned; held by test_bounded_loss.py on a virtual clock, judged in docs/measurements.md.
LOST_SHARE = 0.005  # of the time served, that drafts may lose: the bound that the documents state
FIRST_STEPS = 16.0  # plain steps: the budget of a load that is new
MOST_STEPS = 64.0  # plain steps: the budget at most, however much drafts gain
TRY_STEPS = 8  # of one try: 8 judged drafts move a request's estimate half of the way
IDLE_STEPS = 24  # of a try, in which nothing was drafted: they are not counted
FIRST_PROBE = 64  # steps with drafts before the first probe: the table does for plain until then
PROBE_EVERY, PROBE_STEPS = 512, 6  # steps with drafts between two probes, and plain steps of one
SETTLING_STEPS = 4  # of a probe, not timed: right behind drafts they take up to a third longer
PAYBACK_STEPS = 32  # steps over which catching up is charged while drafts go on
MOST_LOST = 2.0  # plain steps that one step may be charged: beyond, the machine was elsewhere
KNOWN_STEPS = 16  # measurements of a length from which on a change is taken for the machine's
LEAST_UPDATE = 0.03  # weight of one measurement among many
MOST_RATIO = 8.0  # at which a measurement is cut


class Ratios:
    """Measured over tabled seconds of a step, by power of two of rows and longest draft."""

    def __init__(self) -> None:
        # The ratio, and the number of measurements.
        self._known: dict[tuple[int, int], tuple[float, int]] = {}

    def add(self, num_rows: int, longest: int, ratio: float) -> None:
        """Count one measured step; once a length is well known, a change of it moves all others by the same factor."""
        key, ratio = (load_of(num_rows), longest), min(ratio, MOST_RATIO)
        before, count = self._known.get(key, (ratio, 0))
        after = before + max(LEAST_UPDATE, 1.0 / (count + 1)) * (ratio - before)
        if count >= KNOWN_STEPS:
            factor = after / before
            self._known = {one: (value * factor, n) for one, (value, n) in self._known.items()}
        self._known[key] = after, count + 1

    def of(self, num_rows: int, longest: int) -> float:
        """Return the ratio of one longest draft, or of the nearest that was measured; 1 where none was."""
        load = load_of(num_rows)
        if (load, longest) in self._known:
            return self._known[load, longest][0]
        # As a list: reports are made on other threads.
        lengths = [length for one, length in list(self._known) if one == load]
        nearest = min(lengths, key=lambda one: (abs(one - longest), one), default=longest)
        return self._known.get((load, nearest), (1.0, 0))[0]


@dataclass(slots=True)
class Budget:
    """Seconds that drafts may lose under one load.

    Attributes:
        left_s: of the budget; negative where it was overdrawn.
        is_open: drafts that are expected to gain may be made. False from when the budget ran out until a step with
            drafts gains.
        saved_s: of the first budget and of what was earned since, without what drafts have lost: tries are paid from
            this, never from a gain.
    """

    left_s: float
    is_open: bool = True
    saved_s: float = 0.0


class Budgets:
    """One budget per power of two of rows: what one load gains is not spent on another."""

    def __init__(self) -> None:
        self._by_load: dict[int, Budget] = {}
        # Seconds of catching up that drafts have not paid back yet.
        self._invested_s = 0.0

    def of(self, num_rows: int, plain_s: float) -> Budget:
        """Return the budget of about so many rows, whose plain step takes ``plain_s``."""
        first_s = FIRST_STEPS * plain_s
        return self._by_load.setdefault(load_of(num_rows), Budget(first_s, saved_s=first_s))

    def plain(
        self,
        budget: Budget,
        seconds: float,
        plain_s: float,
        caught_s: float = 0.0,
        *,
        goes_on: bool,
    ) -> None:
        """Add the share that a step without drafts earns.

        Catching up, in this step for ``caught_s`` and before, is charged in full unless drafts go on after it.
        """
        self._invested_s += caught_s
        earned_s = LOST_SHARE * seconds
        budget.left_s = min(budget.left_s + earned_s, MOST_STEPS * plain_s)
        budget.saved_s += earned_s
        if not goes_on:
            budget.left_s -= self._invested_s
            budget.saved_s = max(0.0, budget.saved_s - self._invested_s)
            self._invested_s = 0.0

    def drafted(
        self, budget: Budget, seconds: float, lost_s: float, caught_s: float, plain_s: float
    ) -> None:
        """Charge a step with drafts for ``lost_s`` against plain decoding, or add what it gained.

        The seconds of catching up, ``caught_s``, are no part of ``lost_s``: they are charged over the steps that are
        to pay them back.
        """
        self._invested_s += caught_s
        due_s = self._invested_s / PAYBACK_STEPS
        self._invested_s -= due_s
        lost_s = min(lost_s, MOST_LOST * plain_s)
        budget.left_s += LOST_SHARE * seconds - lost_s - due_s
        budget.left_s = min(budget.left_s, MOST_STEPS * plain_s)
        budget.saved_s = max(0.0, budget.saved_s - max(0.0, lost_s) - due_s)
        if budget.left_s < 0.0:
            budget.is_open = False
        elif lost_s < 0.0:
            budget.is_open = True


def load_of(num_rows: int) -> int:
    """Return the power of two of rows that share ratios and budgets."""
    return (num_rows - 1).bit_length()
