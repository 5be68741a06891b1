"""What finding out, and being wrong, may cost: credit that bounds the loss by construction.

Plain decoding is the baseline. Each step earns a small share of its time as credit; each step with
drafts pays with what it lost against plain decoding, as measured, or adds what it gained. Drafts
are made, tried or taken up again only out of credit, so that after any time T

    lost <= first credit + share * T + what one step and one catching up can overdraw,

whatever forecasts believe (a budget over a baseline as in conservative bandits: Wu et al. 2016,
arXiv 1602.04282); plain decoding is taken to be as slow, against steps with drafts, as the last plain steps
in a row were. Out of credit a decision is due at once; steps that are told of together may overdraw
together. Feeding a draft model what it missed is an investment: it is charged over the
steps that are to pay it back, or at once where drafts end sooner.

An account per power of two of rows: what one load gains is not spent on another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Plain steps: credit of an account that is new, and at most while drafts gain.
FIRST_STEPS, MOST_STEPS = 8.0, 64.0
# Plain steps that drafts need besides catching up, to be taken up again after credit ran out.
REOPEN_STEPS = 4.0
# Steps over which catching up is charged while drafts go on.
PAYBACK_STEPS = 32.0
# Times what was saved when a try was put off, until it is thought of again.
MORE_SAVED = 1.2
MOST_LOST = 2.0
"""Plain steps that one step without catching up may be charged: beyond, the machine was elsewhere."""


@dataclass(slots=True)
class Account:
    """Credit of one load.

    Attributes:
        credit_s: seconds; negative where it was overdrawn.
        is_open: whether drafts may be made because they are expected to gain; closed where credit
            runs out, until a try gains, or the owner opens it.
        saved_s: what was earned since drafts were last made: drafts that are not expected to gain are
            paid from this, never from a past gain.
        retry_s: what must have been saved before the next try is thought of.
    """

    credit_s: float
    is_open: bool = True
    saved_s: float = 0.0
    retry_s: float = 0.0

    def can_try(self, cost_s: float) -> bool:
        """Whether drafts that are expected to cost so much may be tried."""
        return self.saved_s >= max(cost_s, self.retry_s) and self.credit_s >= cost_s

    def put_off(self) -> None:
        """These rows cannot be tried, or not at that cost: think of it later, and ever more rarely."""
        self.retry_s = MORE_SAVED * self.saved_s

    def settle(self, earned_s: float, lost_s: float, most_s: float) -> None:
        """One step is over.

        Args:
            earned_s: its share.
            lost_s: against plain decoding; negative for a gain.
            most_s: credit kept at most.
        """
        self.credit_s = min(self.credit_s + earned_s - lost_s, most_s)
        if self.credit_s < 0.0:
            self.is_open = False


class Accounts:
    """Accounts by load, and what was invested and is not paid back yet; its owner is the worker's thread.

    Args:
        share: of the time served, that may be lost.
    """

    def __init__(self, *, share: float) -> None:
        self._share = share
        self._by_load: dict[int, Account] = {}
        self._invested_s = 0.0
        self._investor: Account | None = None

    def of(self, num_rows: int, plain_s: float) -> Account:
        """The account of about so many rows, whose plain step takes ``plain_s``."""
        key = (num_rows - 1).bit_length()
        account = self._by_load.get(key)
        if account is None:
            account = self._by_load[key] = Account(FIRST_STEPS * plain_s)
        return account

    def wait_s(self, account: Account, cost_s: float) -> float:
        """Seconds of steps without drafts until drafts that are expected to cost so much can be tried."""
        missing_s = max(cost_s, account.retry_s) - account.saved_s
        missing_s = max(missing_s, cost_s - account.credit_s, 0.0)
        return missing_s / self._share if self._share else math.inf

    def settle_plain(
        self, account: Account, seconds: float, most_s: float, *, is_probe: bool = False
    ) -> None:
        """A step without drafts; what was invested before is lost to who did, unless drafts go on after it."""
        earned_s = self._share * seconds
        account.settle(earned_s, 0.0, most_s)
        if is_probe:
            return
        account.saved_s += earned_s
        if self._investor is not None:
            # Rows that ended may have left the others to another account: it has nothing to do with that.
            self._investor.settle(0.0, self._invested_s, math.inf)
            self._invested_s, self._investor = 0.0, None

    def settle_drafts(
        self, account: Account, seconds: float, lost_s: float, invested_s: float, most_s: float
    ) -> None:
        """A step with drafts.

        Args:
            account: to settle.
            seconds: of the step.
            lost_s: against plain decoding, catching up left out.
            invested_s: seconds of catching up.
            most_s: credit kept at most.
        """
        if invested_s:
            self._investor = account
        self._invested_s += invested_s
        due_s = self._invested_s / PAYBACK_STEPS
        self._invested_s -= due_s
        account.saved_s = account.retry_s = 0.0
        account.settle(self._share * seconds, lost_s + due_s, most_s)
        account.is_open |= lost_s < 0.0 and account.credit_s >= 0.0
