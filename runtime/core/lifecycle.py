"""The life of a request as a table: what may happen to it in which state."""

from __future__ import annotations

from enum import Enum, auto

from outrider.engines.base import SpeculativeError


class State(Enum):
    """Where a request is in its life."""

    QUEUED = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()
    FAILED = auto()


class Happening(Enum):
    """What can happen to a request."""

    ADMITTED = auto()
    PROMPT_COMPUTED = auto()
    STOPPED = auto()
    ENDED_BY_ERROR = auto()


LIFECYCLE: dict[tuple[State, Happening], State] = {
    (State.QUEUED, Happening.ADMITTED): State.PREFILLING,
    (State.QUEUED, Happening.ENDED_BY_ERROR): State.FAILED,
    (State.PREFILLING, Happening.PROMPT_COMPUTED): State.DECODING,
    (State.PREFILLING, Happening.ENDED_BY_ERROR): State.FAILED,
    (State.DECODING, Happening.STOPPED): State.FINISHED,
    (State.DECODING, Happening.ENDED_BY_ERROR): State.FAILED,
}
"""Every legal transition; any other pair is a bug."""


class IllegalTransition(SpeculativeError):  # noqa: N818 - reads as what happened
    """A request was told something that cannot happen to it in its state."""
