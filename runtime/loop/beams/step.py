"""One step of all beam searches: feed a prompt, or draft -> one pass of the target -> advance.

Beside ``runtime.loop.step``, which takes the requests of one row each: searches stand in slots of their own, so that
neither delays, moves or fails the other's rows. All searches share each extend. What a pass of the target yields is
decided by ``runtime.loop.beams.beam`` alone; a draft only adds hypotheses behind which the pass computes rows, so the
answer is that of the plain search.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.engines.base import Engine, EngineError, FloatArray
from outrider.engines.device.rounds import do_nothing
from outrider.engines.sampling.base import Continuations
from outrider.runtime.core.bisect_failures import bisect_failures
from outrider.runtime.core.events import Finished
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder
from outrider.runtime.loop.beams.beam import BeamDraft, chains_over, search
from outrider.runtime.loop.beams.cache import BeamCache, Feed, feed_all
from outrider.runtime.loop.beams.search import BeamSearch
from outrider.runtime.loop.result import Failure, StepResult

_MODEL = "model"
_TARGET, _DRAFT = 0, 1
Tail = tuple[int, ...]
Drafted = tuple[BeamSearch, BeamDraft]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParts:
    """What searches run on.

    Attributes:
        engines: the target and, where there is one, the draft.
        chunk: prompt tokens of one step.
        max_gamma: steps drafted for one pass at most.
        decoder: turns answers into text.
        beat: called as a step does what makes it longer than its like: it feeds texts again.
        clock: seconds.
    """

    engines: Sequence[Engine]
    chunk: int
    max_gamma: int
    decoder: Decoder
    beat: Callable[[], None] = do_nothing
    clock: Callable[[], float] = time.monotonic


class _NotFinite(Exception):  # noqa: N818 - reads as what was found
    """A row of the target's logits was not finite."""


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
        self._asked: dict[str, Exception | None] = {}
        self._searched: list[tuple[Request, Finished]] = []
        self._passes: list[tuple[int, int]] = []
        self._reads: list[tuple[int, float]] = []

    def run(self) -> StepResult:
        """Take the step."""
        self._read_or_feed()
        ready = [one for one in self._searches if one.is_searching]
        if ready:
            self._search([*zip(ready, self._draft(ready), strict=True)])
        return StepResult(
            failed=self._failed,
            alone=self._alone,
            is_sound=self._is_sound,
            asked=self._asked,
            searched=self._searched,
            passes=self._passes,
            reads=self._reads,
        )

    def _search(self, ready: Sequence[Drafted]) -> None:
        """Take a pass of the target for all searches that are ready, or several where it fails."""
        try:
            self._pass(ready)
        except Exception as error:  # the target's, or a bug: found out search by search
            logger.warning(
                "a pass for %d searches failed; trying parts", len(ready), exc_info=error
            )
            _, failed = bisect_failures(ready, self._pass_again)
            self._alone += [(one.request, error) for (one, _), error in failed]

    def _pass_again(self, ready: Sequence[Drafted]) -> None:
        self._parts.beat()
        self._pass(ready)

    def _pass(self, ready: Sequence[Drafted]) -> None:
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
                self._advance(one, feeds, logits)
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
        """Read a search's source with both models; where the target fails, once more."""
        request = one.request
        source, clock = request.spec.source_tokens, self._parts.clock
        target, *drafts = one.caches[: 1 + one.can_draft]
        began = clock()
        try:
            try:
                target.read(source)
            except Exception as error:  # the target's, or a bug
                logger.warning("reading a search's source failed; trying again", exc_info=error)
                self._parts.beat()
                began = clock()
                target.read(source)
        except Exception as error:  # whatever it may be, it came twice
            self._alone.append((request, error))
            return
        self._reads.append((len(source), clock() - began))
        try:
            for cache in drafts:
                cache.read(source)
        except EngineError as error:
            self._degrade([one], error)
        request.commit_read()

    def _feed_prompt(self, oldest: BeamSearch) -> None:
        """Feed a chunk of a search's prompt, all but its last token, to both models."""
        request = oldest.request
        length = min(self._parts.chunk, request.num_prompt - 1 - request.num_computed)
        end = request.num_computed + length
        target, *drafts = oldest.caches[: 1 + oldest.can_draft]
        try:
            self._feed_target(target, end)
        except Exception as error:  # whatever it may be, it came twice
            # Others may be fed beside its slots before they are given back.
            target.forget()
            self._alone.append((request, error))
            return
        self._is_sound = True
        try:
            for cache in drafts:
                self._feed_to(cache, end)
        except EngineError as error:
            self._degrade([oldest], error)
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

    def _draft(self, ready: Sequence[BeamSearch]) -> list[BeamDraft]:
        """Drafts of the searches that are ready, grown together; without any where the draft model fails."""
        drafts = [one.draft(self._parts.max_gamma) for one in ready]
        growing = [pair for pair in zip(ready, drafts, strict=True) if pair[1].is_growing]
        if growing:
            self._asked.setdefault(_MODEL, None)
        try:
            while growing:
                _grow(growing, _lengths(self._searches, _DRAFT))
                growing = [(one, draft) for one, draft in growing if draft.is_growing]
        except EngineError as error:
            self._degrade([one for one in self._searches if one.request.gamma], error)
            return [one.draft(0) for one in ready]
        return drafts

    def _verify(
        self, ready: Sequence[Drafted]
    ) -> tuple[list[tuple[BeamSearch, list[Feed], list[FloatArray]]], list[Failure]]:
        """One pass of the target over all chains.

        Returns:
            Per search what was fed and the logits, and the searches whose slots could not be copied.

        Raises:
            EngineError: the target failed; the caches of all searches are undefined.
        """
        placed: list[tuple[BeamSearch, list[Feed]]] = []
        unplaced: list[Failure] = []
        for one, draft in ready:
            num_live, length = len(one.state.live), len(one.state.live[0].tokens)
            ends = chains_over(draft.wanted, num_live, len(one.slots), one.rules.num_beams)
            try:
                feeds = one.caches[_TARGET].place(ends, [len(end) - length + 1 for end in ends])
            except EngineError as error:
                unplaced.append((one.request, error))
                continue
            placed.append((one, feeds))
        if not placed:
            return [], unplaced
        engine = self._parts.engines[_TARGET]
        every = [feed for _, feeds in placed for feed in feeds]
        lengths = _lengths(self._searches, _TARGET)
        logits = feed_all(engine, every, lengths, self._parts.beat)
        borders = [0]
        for _, feeds in placed:
            borders.append(borders[-1] + len(feeds))
        return [
            (one, feeds, logits[begin:end])
            for (one, feeds), (begin, end) in zip(placed, pairwise(borders), strict=True)
        ], unplaced

    def _advance(
        self, one: BeamSearch, feeds: Sequence[Feed], logits: Sequence[FloatArray]
    ) -> None:
        """As many steps of a search as the pass is good for; a row that is not finite ends the request."""
        places: dict[Tail, tuple[int, int]] = {}
        for index, feed in enumerate(feeds):
            first = len(feed.tail) - feed.num_wanted + 1
            for column in range(feed.num_wanted):
                places.setdefault(feed.tail[: first + column], (index, column))

        def row_after(tokens: Tail) -> Continuations | None:
            if tokens not in places:
                return None
            index, column = places[tokens]
            row = one.continuations(logits[index][column], tokens, one.rules.row_size)
            if row is None:
                raise _NotFinite
            return row

        try:
            one.state, used = search(one.state, row_after, one.rules)
        except _NotFinite:
            self._failed.append((one.request, None))
            return
        num_steps = len({len(tokens) for tokens in used})
        num_drafted = max(feed.num_wanted for feed in feeds) - 1
        one.request.stats.record(
            gamma=num_drafted, num_accepted=num_steps - 1, num_emitted=num_steps, num_fallbacks=0
        )
        self._passes.append((num_drafted, num_steps - 1))
        if one.state.is_over and one.state.finished:
            self._searched.append((one.request, one.finished(self._parts.decoder)))
        elif one.state.is_over:
            self._failed.append((one.request, None))

    def _degrade(self, searches: Sequence[BeamSearch], error: EngineError) -> None:
        """Go on without the draft model, which failed and lost what it held of these."""
        self._asked[_MODEL] = error
        for one in searches:
            one.caches[_DRAFT].forget()
            one.request.degrade()

    def _lose_target(self) -> None:
        """Have all searches feed the target from the beginning, those whose prompt is being fed included."""
        for one in self._searches:
            one.caches[_TARGET].forget()
            if one.request.state in (State.READING, State.PREFILLING):
                one.request.lose_cache()


def _grow(growing: Sequence[tuple[BeamSearch, BeamDraft]], lengths: dict[int, int]) -> None:
    """One more step of every draft: one extend of the draft model."""
    placed = [
        one.caches[_DRAFT].place([beam.tokens for beam in draft.beams], [1] * len(draft.beams))
        for one, draft in growing
    ]
    found = iter(feed_all(growing[0][0].caches[_DRAFT].engine, [*_flat(placed)], lengths))
    for one, draft in growing:
        vocab_size = one.caches[_TARGET].engine.limits.vocab_size
        rows = [
            one.continuations(next(found)[0, :vocab_size], beam.tokens, one.draft_row_size)
            for beam in draft.beams
        ]
        known = [row for row in rows if row is not None]
        if len(known) == len(rows):
            draft.grow(known)
        else:
            draft.stop()


def _lengths(searches: Sequence[BeamSearch], index: int) -> dict[int, int]:
    """Per slot of any search, the tokens it holds in one engine."""
    return {
        slot: length
        for one in searches
        for slot, length in zip(one.slots, one.caches[index].lengths, strict=True)
    }


def _flat(lists: Iterable[Iterable[Feed]]) -> Iterable[Feed]:
    return (one for each in lists for one in each)
