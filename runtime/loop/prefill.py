"""Feeds prompts to the target: the chunk of this step, and ahead of time that of the next.

A chunk is of one prompt or of several that neighbour and miss about as much, in one call (``core.scheduler``).
Where the host judges, a chunk that ends a prompt yields the answer's first token, drawn as in a step without drafts.

While the device runs a round, the host knows already what the next step feeds first: which prompts those
are does not depend on any verdict, for rows that decode have none left to feed. So that chunk is
planned, uploaded and enqueued behind the round, and the device has work while the host commits:

    host     enqueue round | plan, feed ahead | wait | commit | enqueue round ...
    device   ... round ........................| chunk of prompt ......| round ...

Invariants:

* P1  A step has one chunk at most, whenever it was fed: streams wait for one chunk.
* P2  What was fed ahead counts only once its round went well: a failed round leaves every cache undefined.
* P3  So do first tokens: they are committed with those of the step that they belong to, and where its verification
  fails, their prompts are fed again and give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.engines.base import Engine, EngineError, Span
from outrider.engines.sampling.base import Sampler, SamplingRow, Verdict
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import Prefill, StepLimits, plan_prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What came of feeding a chunk.

    Attributes:
        first_verdicts: by slot, the verdicts on the first tokens of rows whose prompts it ended; still to commit.
        failed: requests that could not be fed, and the error: their caches are undefined.
    """

    first_verdicts: Sequence[tuple[int, Verdict]] = ()
    failed: Sequence[tuple[Request, EngineError]] = ()


NOTHING_FED = PrefillResult()


class PromptFeeder:
    """Feeds the prompts of one target; the worker's thread owns it.

    Args:
        target: what is fed.
        sampler: draws first tokens where the limits have chunks answer prompts.
        limits: of a step.
    """

    def __init__(self, target: Engine, sampler: Sampler, limits: StepLimits) -> None:
        self._target = target
        self._sampler = sampler
        self._limits = limits
        self._ahead: list[tuple[Request, int]] = []
        self._error: EngineError | None = None
        self._has_fed = False

    def feed(self, live: Sequence[Request], planned: Prefill) -> PrefillResult:
        """Feed the next tokens of some prompts; ``live[i]`` holds slot i."""
        ends = _ends(live, planned)
        rows = [
            replace(request.undrafted, index=index)
            for index, (request, end) in enumerate(ends)
            if end == request.num_known
        ]
        try:
            verdicts = self._answered(self._spans(live, planned), rows)
        except EngineError as error:
            return PrefillResult(failed=[(request, error) for request, _ in ends])
        for request, end in ends:
            request.commit_prefill(end)
        return PrefillResult(
            first_verdicts=[(row.slot, one) for row, one in zip(rows, verdicts, strict=True)]
        )

    def _answered(self, spans: Sequence[Span], rows: Sequence[SamplingRow]) -> Sequence[Verdict]:
        """Feed spans, and return what the sampler draws behind some of them.

        Raises:
            EngineError: the target or the sampler failed.
        """
        logits = self._target.extend(spans)
        return self._sampler.judge(logits, rows) if rows else ()

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
        """Count what was fed behind a round that went well.

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
        """Return whether the step that begins has had its chunk; what belongs to no round is forgotten."""
        has_fed, self._has_fed = self._has_fed, False
        self._forget()
        return has_fed

    def _forget(self) -> None:
        self._ahead, self._error = [], None

    @staticmethod
    def _spans(live: Sequence[Request], planned: Prefill) -> list[Span]:
        """Return spans that are fed without a wait, but for those that end a prompt."""
        spans = []
        for slot, (request, end) in enumerate(_ends(live, planned), start=planned.slot):
            tokens = tuple(request.history[request.num_computed : end].tolist())
            spans.append(
                Span(
                    slot=slot,
                    start=request.num_computed,
                    tokens=tokens,
                    num_logits=int(end == request.num_known),
                )
            )
        return spans


def _ends(live: Sequence[Request], planned: Prefill) -> list[tuple[Request, int]]:
    """Return the requests that are fed, each with its leading tokens that are then computed."""
    requests = live[planned.slot : planned.slot + len(planned.lengths)]
    return [
        (request, request.num_computed + length)
        for request, length in zip(requests, planned.lengths, strict=True)
    ]
