"""How often gammas are chosen anew: what choosing takes stays a share of the decoding time."""

from __future__ import annotations

from outrider.runtime.gamma.forecast import Settings

# Share of a new decision's time in what the next one is held to take, and seconds that one counts for at
# most: one that was disturbed must not keep the next one away for long.
NEW_SHARE, MOST_S = 0.2, 0.01


class Pace:
    """Times of decisions and of the steps between them, in seconds; its owner is the worker's thread.

    Args:
        settings: of the controller.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._decision_s = self._since_s = self._own_s = self._total_s = 0.0

    @property
    def share(self) -> float:
        """Of the decoding time so far, spent on choosing."""
        return self._own_s / self._total_s if self._total_s else 0.0

    @property
    def rest_s(self) -> float:
        """Until it is time to think it over, while nothing is drafted; negative where it is past."""
        return self._decision_s / self._settings.idle_share - self._since_s

    @property
    def course_s(self) -> float:
        """The same while drafts are made."""
        return self._decision_s / self._settings.cost_share - self._since_s

    def serve(self, seconds: float) -> None:
        """Steps took so long."""
        self._since_s += seconds
        self._total_s += seconds

    def decide(self, took_s: float) -> None:
        """A decision took so long."""
        self._own_s += took_s
        self._decision_s += NEW_SHARE * (min(took_s, MOST_S) - self._decision_s)
        self._since_s = 0.0

    def may_decide(self, *, is_drafting: bool) -> bool:
        """Whether enough was served since the last decision."""
        return (self.course_s if is_drafting else self.rest_s) <= 0.0
