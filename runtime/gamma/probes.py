"""When steps with drafts are interrupted by some without, which measure what plain decoding takes.

What drafts gain is small where much depends on it: then a probe costs next to nothing, and so it comes
often. Where forecasts promise much, that alone proves nothing: probes stay frequent until the account
says so, too, and are frequent anew once it does no longer.

The first plain steps behind drafts take up to a third longer than plain decoding does: drafts leave other
things in the processor's caches. So a probe is a few plain steps in a row, of which only the last ones are
timed (``core.observer``); a lone one would call drafts a gain that are a loss.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.runtime.gamma.decision import Decision
from outrider.runtime.gamma.trial_loops import FIRST_PROBE, SETTLING, TIMED

# Distances are doubled each time up to the usual one; at most while no gain is proven; and the fraction of the usual
# distance that they begin with once one is.
UNPROVEN, EARLIER = 512, 4
UNKNOWN = 2
"""Steps with drafts before the first probe where the time of a plain step over about so many rows was never taken."""
PROVEN, DOUBTED = 0.75, 0.5
"""Shares of the most that an account may hold, from which on a gain is, and below which it is no longer: the most grows
with a plain step's time, and a machine whose steps take a third longer refutes nothing."""


class Probes:
    """Counts steps with drafts; its owner is the worker's thread.

    Args:
        is_known: whether the time of a plain step over so many rows was ever taken.
    """

    def __init__(self, is_known: Callable[[int], bool]) -> None:
        self._is_known = is_known
        self._since = self._left = 0
        self._wanted = FIRST_PROBE
        self._is_proven = False
        # Numbers of rows that were probed: a clock too coarse for a step never takes the time of any.
        self._probed: set[int] = set()

    def is_next(self, decision: Decision) -> bool:
        """Whether the next step is of a probe; called once per step with drafts in use."""
        if not self._left:
            distance = self._distance(decision)
            self._since += 1
            if self._since <= distance:
                return False
            self._since, self._left = 0, SETTLING + TIMED
            self._wanted = max(FIRST_PROBE, 2 * distance)
            self._probed.add(len(decision.gammas))
        self._left -= 1
        return True

    def num_before(self, decision: Decision) -> int:
        """Steps with drafts until the next probe, as things stand."""
        return 0 if self._left else max(0, self._distance(decision) - self._since)

    def skip(self, num_steps: int) -> None:
        """So many steps with drafts were taken that were not asked about."""
        self._since += num_steps

    def _distance(self, decision: Decision) -> int:
        num_rows = len(decision.gammas)
        if num_rows not in self._probed and not self._is_known(num_rows):
            return UNKNOWN
        was_proven = self._is_proven
        least = DOUBTED if was_proven else PROVEN
        self._is_proven = decision.account.credit_s >= least * decision.most_s
        if was_proven and not self._is_proven:
            self._wanted = FIRST_PROBE
        usual = decision.probe_every
        if self._is_proven:
            return min(max(self._wanted, usual // EARLIER), usual)
        return min(self._wanted, usual, UNPROVEN)
