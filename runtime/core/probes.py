"""When steps with drafts are interrupted by one without, which measures what plain decoding takes.

What drafts gain is small where much depends on it: then a probe costs next to nothing, and so it comes
often. Where forecasts promise much, that alone proves nothing: probes stay frequent until the account
says so, too, and are frequent anew once it does no longer.
"""

from __future__ import annotations

from runtime.core.decision import Decision
from runtime.core.forecast import Forecast, Settings

# Gain of drafts, as a share, below which a probe is not held to cost less.
LEAST_GAIN = 0.02
# Steps with drafts before the first probe, doubled each time up to the usual distance; at most while no gain is
# proven; and the fraction of the usual distance that they begin with once one is.
FIRST_PROBE, UNPROVEN, EARLIER = 4, 128, 16
PROVEN, DOUBTED = 0.75, 0.5
"""Shares of the most that an account may hold, from which on a gain is, and below which it is no longer: the most grows
with a plain step's time, and a machine whose steps take a third longer refutes nothing."""


class Probes:
    """Counts steps with drafts; its owner is the worker's thread."""

    def __init__(self) -> None:
        self._since = 0
        self._wanted = FIRST_PROBE
        self._is_proven = False

    def is_next(self, decision: Decision) -> bool:
        """Whether the next step is a probe; called once per step with drafts in use."""
        distance = self._distance(decision)
        self._since += 1
        if self._since <= distance:
            return False
        self._since, self._wanted = 0, 2 * distance
        return True

    def num_before(self, decision: Decision) -> int:
        """Steps with drafts until the next probe, as things stand."""
        return max(0, self._distance(decision) - self._since)

    def skip(self, num_steps: int) -> None:
        """So many steps with drafts were taken that were not asked about."""
        self._since += num_steps

    def _distance(self, decision: Decision) -> int:
        was_proven = self._is_proven
        least = DOUBTED if was_proven else PROVEN
        self._is_proven = decision.account.credit_s >= least * decision.most_s
        if was_proven and not self._is_proven:
            self._wanted = FIRST_PROBE
        usual = decision.probe_every
        if self._is_proven:
            return min(max(self._wanted, usual // EARLIER), usual)
        return min(self._wanted, usual, UNPROVEN)


def probe_distance(forecast: Forecast, best: int, settings: Settings) -> int:
    """Steps with drafts between two probes, so that these cost their share of the time.

    Args:
        forecast: for the rows.
        best: longest draft in use.
        settings: of the controller.
    """
    gain = max(forecast.rate(best) / forecast.rate(forecast.floor) - 1.0, LEAST_GAIN)
    distance = gain / max(settings.probe_share, 1e-9)
    return int(min(max(distance, FIRST_PROBE), settings.probe_every))
