"""One step of all beam searches: feed a prompt, or one pass of the target -> advance.

Beside ``runtime.loop.step``, which takes the requests of one row each: searches stand in slots of their own, so that
neither delays, moves or fails the other's rows. All searches share each extend. What a pass of the target yields is
decided by ``runtime.loop.beams.beam`` alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.engines.base import Engine, EngineError, FloatArray
from outrider.engines.rounds import do_nothing
from outrider.engines.sampling.base import Continuations
from outrider.runtime.core.bisect_failures import bisect_failures
from outrider.runtime.core.events import Finished
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder
from outrider.runtime.loop.beams.beam import advance
from outrider.runtime.loop.beams.cache import BeamCache, Feed, feed_all
from outrider.runtime.loop.beams.search import BeamSearch
from outrider.runtime.loop.result import Failure, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParts:
    """What searches run on.

    Attributes:
        target: the engine.
        chunk: prompt tokens of one step.
        decoder: turns answers into text.
        beat: called as a step does what makes it longer than its like: it feeds texts again.
        clock: seconds.
    """

    target: Engine
    chunk: int
    decoder: Decoder
    beat: Callable[[], None] = do_nothing
    clock: Callable[[], float] = time.monotonic


def run_searches(parts: SearchParts, searches: Sequence[BeamSearch]) -> StepResult:
    """Run one step of all searches that hold slots, and return what it did."""
    return _SearchStep(parts, searches).run()


class _SearchStep:
    """One step, and what it did so far."""

    def __init__(self, parts: SearchParts, searches: Sequence[BeamSearch]) -> None:
        self._parts = parts
        self._searches = searches
        self._failed: list[Failure] = []
        self._alone: list[Failure] = []
        self._is_sound = False
        self._searched: list[tuple[Request, Finished]] = []
        self._num_passes = 0
        self._reads: list[tuple[int, float]] = []

    def run(self) -> StepResult:
        """Take the step."""
        self._read_or_feed()
        ready = [one for one in self._searches if one.is_searching]
        if ready:
            self._search(ready)
        return StepResult(
            failed=self._failed,
            alone=self._alone,
            is_sound=self._is_sound,
            searched=self._searched,
            num_search_passes=self._num_passes,
            reads=self._reads,
        )

    def _search(self, ready: Sequence[BeamSearch]) -> None:
        """Take a pass of the target for all searches that are ready, or several where it fails."""
        try:
            self._pass(ready)
        except Exception as error:  # the target's, or a bug: found out search by search
            logger.warning(
                "a pass for %d searches failed; trying parts", len(ready), exc_info=error
            )
            _, failed = bisect_failures(ready, self._pass_again)
            self._alone += [(one.request, error) for one, error in failed]

    def _pass_again(self, ready: Sequence[BeamSearch]) -> None:
        self._parts.beat()
        self._pass(ready)

    def _pass(self, ready: Sequence[BeamSearch]) -> None:
        """Take a pass of the target and advance its searches.

        Raises:
            EngineError: the target failed, and no search has advanced.
        """
        try:
            passes, unplaced = self._verify(ready)
        except Exception:
            # Slots of one search may stand among another's, so all of them were given to the call.
            self._lose_target()
            raise
        self._is_sound = self._is_sound or bool(passes)
        self._failed += unplaced
        for one, feeds, logits in passes:
            try:
                self._advance(one, [*_rows(one, feeds, logits)])
            except Exception as error:  # a bug in what becomes of one search's rows
                self._failed.append((one.request, error))

    def _read_or_feed(self) -> None:
        """Read the source, or feed a chunk of the prompt, of the oldest search that is not ready."""
        states = (State.READING, State.PREFILLING)
        waiting = [one for one in self._searches if one.request.state in states]
        oldest = min(waiting, key=lambda one: one.request.order, default=None)
        if oldest is None:
            return
        if oldest.request.state is State.READING:
            self._read_source(oldest)
        else:
            self._feed_prompt(oldest)

    def _read_source(self, one: BeamSearch) -> None:
        """Read a search's source; where the target fails, once more."""
        request = one.request
        source, clock = request.spec.source_tokens, self._parts.clock
        began = clock()
        try:
            try:
                one.cache.read(source)
            except Exception as error:  # the target's, or a bug
                logger.warning("reading a search's source failed; trying again", exc_info=error)
                self._parts.beat()
                began = clock()
                one.cache.read(source)
        except Exception as error:  # whatever it may be, it came twice
            self._alone.append((request, error))
            return
        self._reads.append((len(source), clock() - began))
        request.commit_read()

    def _feed_prompt(self, oldest: BeamSearch) -> None:
        """Feed a chunk of a search's prompt, all but its last token."""
        request = oldest.request
        num_computed = request.cache.num_computed
        length = min(self._parts.chunk, request.sequence.num_prompt - 1 - num_computed)
        end = num_computed + length
        try:
            self._feed_target(oldest.cache, end)
        except Exception as error:  # whatever it may be, it came twice
            # Others may be fed beside its slots before they are given back.
            oldest.cache.forget()
            self._alone.append((request, error))
            return
        self._is_sound = True
        request.commit_prefill(end)

    def _feed_target(self, target: BeamCache, end: int) -> None:
        """Feed as ``_feed_to`` does; where that fails, once more from the beginning."""
        try:
            self._feed_to(target, end)
        except Exception as error:  # the target's, or a bug
            logger.warning("feeding a search's prompt failed; trying again", exc_info=error)
            target.forget()
            self._parts.beat()
            self._feed_to(target, end)

    def _feed_to(self, cache: BeamCache, end: int) -> None:
        """Feed a search's first slot the prompt's tokens that it misses of its leading ``end``.

        Raises:
            EngineError: the engine failed; the slot is undefined.
        """
        while (held := cache.lengths[0]) < end:
            length = min(self._parts.chunk, end - held)
            cache.engine.extend([cache.prompt_span(length)])
            cache.note_fed(0, held + length, ())
            if held + length < end:
                self._parts.beat()

    def _verify(
        self, ready: Sequence[BeamSearch]
    ) -> tuple[list[tuple[BeamSearch, list[Feed], list[FloatArray]]], list[Failure]]:
        """One pass of the target behind all live hypotheses.

        Returns:
            Per search what was fed and the logits, and the searches whose slots could not be copied.

        Raises:
            EngineError: the target failed; the caches of all searches are undefined.
        """
        placed: list[tuple[BeamSearch, list[Feed]]] = []
        unplaced: list[Failure] = []
        for one in ready:
            try:
                feeds = one.cache.place([hypothesis.tokens for hypothesis in one.state.live])
            except EngineError as error:
                unplaced.append((one.request, error))
                continue
            placed.append((one, feeds))
        if not placed:
            return [], unplaced
        every = [feed for _, feeds in placed for feed in feeds]
        lengths = _lengths(self._searches)
        logits = iter(feed_all(self._parts.target, every, lengths, self._parts.beat))
        return [(one, feeds, [next(logits) for _ in feeds]) for one, feeds in placed], unplaced

    def _advance(self, one: BeamSearch, rows: Sequence[Continuations | None]) -> None:
        """Take a step of a search; a row that is not finite ends the request."""
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            self._failed.append((one.request, None))
            return
        one.state = advance(one.state, known, one.rules)
        one.request.stats.record(gamma=0, num_accepted=0, num_emitted=1, num_fallbacks=0)
        self._num_passes += 1
        if one.state.is_over and one.state.finished:
            self._searched.append((one.request, one.finished(self._parts.decoder)))
        elif one.state.is_over:
            self._failed.append((one.request, None))

    def _lose_target(self) -> None:
        """Have all searches feed the target from the beginning, those whose prompt is being fed included."""
        for one in self._searches:
            one.cache.forget()
            if one.request.state in (State.READING, State.PREFILLING):
                one.request.lose_cache()


def _rows(
    one: BeamSearch, feeds: Sequence[Feed], logits: Sequence[FloatArray]
) -> Iterator[Continuations | None]:
    """Yield what may follow each live hypothesis of a search."""
    for feed, row in zip(feeds, logits, strict=True):
        yield one.continuations(row, feed.tail)


def _lengths(searches: Sequence[BeamSearch]) -> dict[int, int]:
    """Return per slot of any search the tokens it holds."""
    return {
        slot: length
        for one in searches
        for slot, length in zip(one.slots, one.cache.lengths, strict=True)
    }
