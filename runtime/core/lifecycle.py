"""The life of a request as a table: what may happen to it in which state."""

from __future__ import annotations

from enum import Enum, auto

from outrider.engines.base import SpeculativeError


class State(Enum):
    """Where a request is in its life."""

    QUEUED = auto()
    READING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()
    FAILED = auto()


class RequestEvent(Enum):
    """What can happen to a request."""

    ADMITTED = auto()
    ADMITTED_WITH_SOURCE = auto()
    SOURCE_READ = auto()
    PROMPT_COMPUTED = auto()
    STOPPED = auto()
    ENDED_BY_ERROR = auto()


LIFECYCLE: dict[tuple[State, RequestEvent], State] = {
    (State.QUEUED, RequestEvent.ADMITTED): State.PREFILLING,
    (State.QUEUED, RequestEvent.ADMITTED_WITH_SOURCE): State.READING,
    (State.QUEUED, RequestEvent.ENDED_BY_ERROR): State.FAILED,
    (State.READING, RequestEvent.SOURCE_READ): State.PREFILLING,
    (State.READING, RequestEvent.ENDED_BY_ERROR): State.FAILED,
    (State.PREFILLING, RequestEvent.PROMPT_COMPUTED): State.DECODING,
    (State.PREFILLING, RequestEvent.ENDED_BY_ERROR): State.FAILED,
    (State.DECODING, RequestEvent.STOPPED): State.FINISHED,
    (State.DECODING, RequestEvent.ENDED_BY_ERROR): State.FAILED,
}
"""Every legal transition; any other pair is a bug."""


class IllegalTransition(SpeculativeError):  # noqa: N818 - reads as what happened
    """A request was told something that cannot happen to it in its state."""
