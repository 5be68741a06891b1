"""Feeds prompts to the target: the chunk of this step, and ahead of time that of the next.

While the device runs a round, the host knows already what the next step feeds first: which prompt is the
oldest does not depend on any verdict, for rows that decode have none left to feed. So that chunk is
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
from runtime.core.scheduler import plan_prefill


class PromptFeeder:
    """One target's; the worker's thread owns it.

    Args:
        target: what is fed.
        chunk: prompt tokens of one step.
    """

    def __init__(self, target: Engine, chunk: int) -> None:
        self._target = target
        self._chunk = chunk
        self._ahead: tuple[Request, int] | None = None
        self._error: EngineError | None = None
        self._has_fed = False

    def feed(self, request: Request, length: int) -> None:
        """Feed the next ``length`` tokens of a prompt.

        Raises:
            EngineError: the target failed; the request's cache is undefined.
        """
        request.commit_prefill(self._extend(request, length))

    def feed_ahead(self, live: Sequence[Request]) -> None:
        """Enqueue the next step's chunk behind a round that is under way; ``live[i]`` holds slot i."""
        planned = plan_prefill(live, self._chunk)
        if planned is None:
            return
        request = live[planned.slot]
        try:
            end = self._extend(request, planned.length)
        except EngineError as error:
            end, self._error = 0, error
        self._ahead = (request, end)

    def commit_ahead(self) -> list[tuple[Request, EngineError | None]]:
        """The round went well: what was fed behind it counts.

        Returns:
            The request whose prompt could not be fed, with the error.
        """
        fed, error = self._ahead, self._error
        self._ahead = self._error = None
        if fed is None:
            return []
        request, end = fed
        if error is not None:
            return [(request, error)]
        request.commit_prefill(end)
        self._has_fed = True
        return []

    def take_fed(self) -> bool:
        """Whether the step that begins has had its chunk; what belongs to no round is forgotten."""
        has_fed, self._has_fed = self._has_fed, False
        self._ahead = self._error = None
        return has_fed

    def _extend(self, request: Request, length: int) -> int:
        """Feed without a wait; leading tokens that are then computed."""
        assert request.slot is not None
        start, end = request.num_computed, request.num_computed + length
        tokens = tuple(request.history[start:end].tolist())
        self._target.extend([Span(slot=request.slot, start=start, tokens=tokens, num_logits=0)])
        return end
