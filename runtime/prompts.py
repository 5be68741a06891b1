"""Feeds prompts to the target: the chunk of this step, and ahead of time that of the next.

A chunk is of one prompt or of several that neighbour and miss about as much, in one call (``core.scheduler``).

While the device runs a round, the host knows already what the next step feeds first: which prompts those
are does not depend on any verdict, for rows that decode have none left to feed. So that chunk is
planned, uploaded and enqueued behind the round, and the device has work while the host commits:

    host     enqueue round | plan, feed ahead | wait | commit | enqueue round ...
    device   ... round ........................| chunk of prompt ......| round ...

Invariants:

* P1  A step has one chunk at most, whenever it was fed: streams wait for one chunk.
* P2  What was fed ahead counts only once its round went well: a failed round leaves every cache undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.base import Engine, EngineError, Span
from runtime.core.request import Request
from runtime.core.scheduler import Prefill, StepLimits, plan_prefill


class PromptFeeder:
    """One target's; the worker's thread owns it.

    Args:
        target: what is fed.
        limits: of a step.
    """

    def __init__(self, target: Engine, limits: StepLimits) -> None:
        self._target = target
        self._limits = limits
        self._ahead: list[tuple[Request, int]] = []
        self._error: EngineError | None = None
        self._has_fed = False

    def feed(self, live: Sequence[Request], planned: Prefill) -> list[tuple[Request, EngineError]]:
        """Feed the next tokens of some prompts; ``live[i]`` holds slot i.

        Returns:
            Where the target failed, the requests and its error: their caches are undefined.
        """
        try:
            self._target.extend(self._spans(live, planned))
        except EngineError as error:
            return [(request, error) for request, _ in _ends(live, planned)]
        for request, end in _ends(live, planned):
            request.commit_prefill(end)
        return []

    def feed_ahead(self, live: Sequence[Request]) -> None:
        """Enqueue the next step's chunk behind a round that is under way; ``live[i]`` holds slot i."""
        planned = plan_prefill(live, self._limits)
        if planned is None:
            return
        self._ahead = _ends(live, planned)
        try:
            self._target.extend(self._spans(live, planned))
        except EngineError as error:
            self._error = error

    def commit_ahead(self) -> list[tuple[Request, EngineError | None]]:
        """The round went well: what was fed behind it counts.

        Returns:
            The requests whose prompts could not be fed, with the error.
        """
        fed, error = self._ahead, self._error
        self._forget()
        if error is not None:
            return [(request, error) for request, _ in fed]
        for request, end in fed:
            request.commit_prefill(end)
        self._has_fed = bool(fed)
        return []

    def take_fed(self) -> bool:
        """Whether the step that begins has had its chunk; what belongs to no round is forgotten."""
        has_fed, self._has_fed = self._has_fed, False
        self._forget()
        return has_fed

    def _forget(self) -> None:
        self._ahead, self._error = [], None

    @staticmethod
    def _spans(live: Sequence[Request], planned: Prefill) -> list[Span]:
        """Spans that are fed without a wait."""
        spans = []
        for slot, (request, end) in enumerate(_ends(live, planned), start=planned.slot):
            tokens = tuple(request.history[request.num_computed : end].tolist())
            spans.append(Span(slot=slot, start=request.num_computed, tokens=tokens, num_logits=0))
        return spans


def _ends(live: Sequence[Request], planned: Prefill) -> list[tuple[Request, int]]:
    """Who is fed, and the leading tokens that are then computed."""
    requests = live[planned.slot : planned.slot + len(planned.lengths)]
    return [
        (request, request.num_computed + length)
        for request, length in zip(requests, planned.lengths, strict=True)
    ]
