"""What rows need before they decode: the target reads their sources, and is fed their prompts.

A chunk of prompt is fed in this step, and ahead of time that of the next. It is of one prompt or of several that
neighbour and miss about as much, in one call (``runtime.core.scheduler``).
Where the host judges, a chunk that ends a prompt yields the answer's first token, drawn as in a step without drafts.
Of a prompt that is scored, every chunk asks for all its logits, and leaves the log-probabilities of the tokens behind
them with the request. Such a chunk is not fed ahead: its logits come to the host.

While the device runs a round, the host knows already what the next step feeds first: which prompts those
are does not depend on any verdict, for rows that decode have none left to feed. So that chunk is
planned, uploaded and enqueued behind the round, and the device has work while the host commits:

    host     enqueue round | plan, feed ahead | wait | commit | enqueue round ...
    device   ... round ........................| chunk of prompt ......| round ...

Of a group, the completions of one prompt, the leader alone is fed. When its prompt is computed its slot is copied to
those of the others, and each gets its own first token, from the same logits where the chunk yields one.

A source is read before its row is fed anything: alone, or with neighbours about as long, in one call. It cannot be cut
into chunks, so that the rows that decode wait for all of it.

Invariants:

* P1  A step has one chunk or one read of rows at most, whenever it was fed, and one of a beam search: streams wait for
  these, and for what the draft model reads and is fed of the same kind.
* P2  What was fed ahead counts only once its round went well: a failed round leaves every cache undefined.
* P3  So do first tokens: they are committed with those of the step that they belong to, and where its verification
  fails, their prompts are fed again and give the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from outrider.engines.base import Engine, EngineError, FloatArray, Source, Span
from outrider.engines.rounds import do_nothing
from outrider.engines.sampling.base import Sampler, Verdict
from outrider.engines.sampling.draws import in_place, raw_logprobs
from outrider.runtime.core.bisect_failures import bisect_failures
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import Prefill, StepLimits, plan_prefill
from outrider.runtime.loop.drafting import NO_DRAFT, row_to_judge

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What came of feeding a chunk.

    Attributes:
        first_verdicts: by slot, the verdicts on the first tokens of rows whose prompts it ended; still to commit.
        num_fed: requests whose prompts were fed.
        failed: requests that could not be fed, not even alone, and the error; they begin anew or end.
    """

    first_verdicts: Sequence[tuple[int, Verdict]] = ()
    num_fed: int = 0
    failed: Sequence[tuple[Request, Exception]] = ()


NOTHING_FED = PrefillResult()
End = tuple[Request, int]
"""A request that is fed, and its leading tokens that are then computed."""


class PromptFeeder:
    """Feeds the prompts of one target; the worker's thread owns it.

    Args:
        target: what is fed.
        sampler: draws first tokens where the limits have chunks answer prompts.
        limits: of a step.
        beat: called for every row that is fed again and every chunk of it, which make a step longer than its like.
    """

    def __init__(
        self,
        target: Engine,
        sampler: Sampler,
        limits: StepLimits,
        beat: Callable[[], None] = do_nothing,
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._limits = limits
        self._beat = beat
        self._ahead: list[End] = []
        self._error: Exception | None = None
        self._has_fed = False

    def feed(self, live: Sequence[Request], planned: Prefill) -> PrefillResult:
        """Feed the next tokens of some prompts; ``live[i]`` holds slot i."""
        ends = _ends(live, planned)
        failed: list[tuple[End, Exception]] = []
        try:
            done = [self._feed(ends)]
        except Exception as error:  # the target's, the sampler's, or a bug: found out row by row
            logger.warning("feeding %d prompts failed; trying parts", len(ends), exc_info=error)
            done, failed = bisect_failures(ends, self._feed_anew)
        for (request, _), _ in failed:
            request.lose_cache()
        return PrefillResult(
            first_verdicts=[verdict for verdicts in done for verdict in verdicts],
            num_fed=len(ends) - len(failed),
            failed=[(request, error) for (request, _), error in failed],
        )

    def _feed(self, ends: Sequence[End]) -> list[tuple[int, Verdict]]:
        """Feed neighbours and move their pointers; return the verdicts on first tokens by slot."""
        logits = self._target.extend(_spans(ends))
        for leader, end in ends:
            if leader.group.followers:
                fork(self._target, leader, end)
        rows = [
            replace(
                request.undrafted
                if request.constraint is None
                else row_to_judge(request, NO_DRAFT),
                index=index,
            )
            for index, (leader, end) in enumerate(ends)
            if end == leader.sequence.num_known
            for request in (leader, *leader.group.followers)
        ]
        if ends[0][0].is_scored:
            logits = _score(ends, logits)
        verdicts = self._sampler.judge(logits, rows) if rows else ()
        for request, end in ends:
            request.commit_prefill(end)
        return [(row.slot, one) for row, one in zip(rows, verdicts, strict=True)]

    def _feed_anew(self, ends: Sequence[End]) -> list[tuple[int, Verdict]]:
        for request, _ in ends:
            self.feed_again(request)
        return self._feed(ends)

    def feed_again(self, request: Request) -> None:
        """Compute a row's cache anew as far as it was computed, after a call that left it undefined.

        Raises:
            EngineError: the target failed.
        """
        assert request.slot is not None
        self._beat()
        for start in range(0, request.cache.num_computed, self._limits.prefill_chunk):
            end = min(start + self._limits.prefill_chunk, request.cache.num_computed)
            tokens = tuple(request.sequence.history[start:end].tolist())
            span = Span(
                slot=request.slot, start=start, tokens=tokens, num_logits=0, num_settled=len(tokens)
            )
            self._target.extend([span])
            self._beat()

    def feed_ahead(self, live: Sequence[Request]) -> None:
        """Enqueue the next step's chunk behind a round that is under way; ``live[i]`` holds slot i."""
        planned = plan_prefill(live, self._limits)
        # Logits would be waited for, and with them the round.
        if planned is None or live[planned.slot].is_scored:
            return
        self._ahead = _ends(live, planned)
        try:
            self._target.extend(_spans(self._ahead))
        except Exception as error:  # the step that would have fed it finds out whose fault it is
            logger.warning("feeding %d prompts ahead failed", len(self._ahead), exc_info=error)
            self._error = error

    def commit_ahead(self) -> None:
        """Count what was fed behind a round that went well; prompts that could not be fed begin anew."""
        fed, error = self._ahead, self._error
        self._forget()
        for request, end in fed:
            if error is None:
                if request.group.followers:
                    fork(self._target, request, end)
                request.commit_prefill(end)
            else:
                request.lose_cache()
        self._has_fed = bool(fed) and error is None

    def take_fed(self) -> bool:
        """Return whether the step that begins has had its chunk; what belongs to no round is forgotten."""
        has_fed, self._has_fed = self._has_fed, False
        self._forget()
        return has_fed

    def _forget(self) -> None:
        self._ahead, self._error = [], None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What came of reading sources.

    Attributes:
        reads: per call that went well, the source tokens and the seconds it took.
        failed: requests whose source could not be read, not even alone, and the error.
    """

    reads: Sequence[tuple[int, float]] = ()
    failed: Sequence[tuple[Request, Exception]] = ()


NOTHING_READ = ReadResult()


class SourceReader:
    """Reads the sources of one target; the worker's thread owns it.

    Args:
        target: reads them.
        beat: called before every read that is tried again, which makes a step longer than its like.
        clock: seconds.
    """

    def __init__(
        self, target: Engine, beat: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._target, self._beat, self._clock = target, beat, clock

    def read(self, live: Sequence[Request], slots: range) -> ReadResult:
        """Read the sources of neighbours; ``live[i]`` holds slot i."""
        requests = live[slots.start : slots.stop]
        failed: list[tuple[Request, Exception]] = []
        try:
            done = [self._read(requests)]
        except Exception as error:  # the target's, or a bug: found out row by row
            logger.warning("reading %d sources failed; trying parts", len(slots), exc_info=error)
            done, failed = bisect_failures(requests, self._read_again)
        return ReadResult(reads=done, failed=failed)

    def _read(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Read neighbours' sources, and move them on; return tokens and seconds."""
        began = self._clock()
        self._target.read([source_of(request) for request in requests])
        took_s = self._clock() - began
        # Where a copy raises, nobody has moved on, and all are read again.
        for request in requests:
            if request.group.followers:
                fork(self._target, request, 0)
        for request in requests:
            request.commit_read()
        return sum(len(request.spec.source_tokens) for request in requests), took_s

    def _read_again(self, requests: Sequence[Request]) -> tuple[int, float]:
        self._beat()
        return self._read(requests)


def fork(engine: Engine, leader: Request, end: int) -> None:
    """Copy a leader's slot to those of its followers, if the prompt is computed with its leading ``end`` tokens.

    A follower whose slot cannot be copied to reads for itself.
    """
    if end < leader.sequence.num_known - 1:
        return
    assert leader.slot is not None
    for follower in leader.group.followers:
        assert follower.slot is not None
        try:
            engine.move_slot(leader.slot, follower.slot, end)
            follower.cache.num_cached = leader.cache.num_cached
        except EngineError:
            logger.exception("a prompt could not be copied; it is read again")
            follower.leave_group()


def source_of(request: Request) -> Source:
    """Return what an encoder reads for a request that holds a slot."""
    assert request.slot is not None
    return Source(slot=request.slot, tokens=request.spec.source_tokens)


def _spans(ends: Sequence[End]) -> list[Span]:
    """Return spans of neighbours that are fed without a wait, but for those that end a prompt."""
    spans = []
    for request, end in ends:
        assert request.slot is not None
        start, sequence = request.cache.num_computed, request.sequence
        tokens = tuple(sequence.history[start:end].tolist())
        spans.append(
            Span(
                slot=request.slot,
                start=start,
                tokens=tokens,
                num_logits=len(tokens) if request.is_scored else int(end == sequence.num_known),
                num_settled=len(tokens),
            )
        )
    return spans


def _score(ends: Sequence[End], logits: FloatArray) -> FloatArray:
    """Note the log-probabilities of the tokens behind those that were fed, and return the logits behind the last.

    Args:
        ends: scored requests, whose pointers have not moved yet.
        logits: [B, T, V] float32 of every token that was fed.

    Returns:
        [B, 1, V] float32.

    Raises:
        EngineError: a row of logits is not finite.
    """
    logits = in_place(logits)
    last = []
    for row, (request, end) in zip(logits, ends, strict=True):
        start, sequence = request.cache.num_computed, request.sequence
        num_top = request.spec.num_prompt_logprobs or 0
        found = row[: end - start]
        if not np.isfinite(found.max(axis=-1)).all():
            raise EngineError("logits of a prompt that is scored are not finite")
        behind = sequence.tokens[start + 1 : min(end + 1, sequence.num_prompt)].tolist()
        request.commit_scores(
            start,
            [raw_logprobs(found[index], token, num_top) for index, token in enumerate(behind)],
        )
        last.append(found[-1:])
    return np.stack(last)


def _ends(live: Sequence[Request], planned: Prefill) -> list[End]:
    """Return the requests that are fed."""
    requests = live[planned.slot : planned.slot + len(planned.lengths)]
    return [
        (request, request.cache.num_computed + length)
        for request, length in zip(requests, planned.lengths, strict=True)
    ]
