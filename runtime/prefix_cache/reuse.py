"""What engines have computed of earlier texts, and how requests that begin alike are spared it.

A prompt is kept as soon as it was fed, and the whole text when its request ends: all of it but the last token, whose
keys were never computed. A prompt is looked up when its turn to be fed comes, so that one of several that arrive
together is fed, and the others find it. Target and draft model have texts of their own (``runtime.prefix_cache.tree``),
since a request may find the one and not the other; they share one budget.

What is kept has the bits that feeding would give: of a text that was verified as a tree, only what stands before the
first side branch. So answers are what they would have been:

* Greedy and seed-stable answers that are not lenient depend on the target's logits alone, and where gamma is chosen, no
  more is promised.
* Of other requests with a fixed gamma, answers depend on where each draft begins. Such a request finds no more than
  leaves it its way to the first token, and the draft model reads its prompt as if nothing were kept.

A model with recurrent layers goes on from a text only where its state is kept too: at the end of a text, of the last
chunk but one of a prompt, and where a prompt was found to part from an earlier one; the chunk ends there.

Not for beam searches, nor for models with an encoder, whose caches depend on the source too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.engines.base import Engine, EngineError, FloatArray, SlotState
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.prefix_cache.tree import PrefixTree

logger = logging.getLogger(__name__)

WORTH_A_STATE = 64
"""Tokens that two texts share behind the last state that is kept, and that are worth one where they part."""
FEWEST = 16
"""Tokens that are worth looking for: a call costs as much as about a dozen (``runtime.core.scheduler``)."""
_COPIED_PER_FED = 16
"""Copied tokens that a step counts as one that is fed, so that streams never wait longer than for a chunk.

Of a 125M target they take a hundredth (256 tokens 28 ms, fed 3.6 s, on a busy machine); models have larger caches, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounts:
    """What the cache of prefixes did since the start.

    Attributes:
        num_queried: tokens of prompts that were looked for.
        num_found: of them, those that were not computed again.
        num_bytes: in use.
        num_evicted: pieces of texts that others have replaced.
    """

    num_queried: int = 0
    num_found: int = 0
    num_bytes: int = 0
    num_evicted: int = 0


class Prefixes:
    """Keeps and finds texts of one worker; for its thread.

    Args:
        engines: the target and, where there is one, the draft; each can read and write slots.
        max_bytes: of all that is kept.
        chunk: prompt tokens that a step feeds at most.
        has_whole_draft: whether a slot of the draft holds its text from the first token on.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        max_bytes: int,
        chunk: int,
        has_whole_draft: Callable[[int], bool] = lambda slot: True,
    ) -> None:
        self._engines, self._has_whole_draft = engines, has_whole_draft
        self._chunk = chunk
        self._tree = PrefixTree(max_bytes)
        # Looked up already, and not yet kept.
        self._fed: dict[str, Request] = {}
        # Of these, tokens at the last chunk's end that was kept.
        self._ends: dict[str, int] = {}
        self._num_queried = self._num_found = 0

    @property
    def counts(self) -> PrefixCounts:
        """Figures since the start; callable from any thread."""
        return PrefixCounts(
            num_queried=self._num_queried,
            num_found=self._num_found,
            num_bytes=self._tree.num_bytes,
            num_evicted=self._tree.num_evicted,
        )

    def prepare(self, live: Sequence[Request]) -> None:
        """Keep prompts that were fed, and look for those that are about to be; ``live[i]`` holds slot i."""
        for name, request in list(self._fed.items()):
            if request.state is not State.PREFILLING:
                del self._fed[name]
                self._ends.pop(name, None)
                if request.state is State.DECODING:
                    self.keep(request)
            elif self._engines[0].state_bytes:
                self._keep_chunk(name, request)
        waiting = [
            one for one in live if one.state is State.PREFILLING and one.group.leader is None
        ]
        room = self._chunk
        for request in sorted(waiting, key=lambda one: one.order):
            if room <= 0:
                return
            if not request.cache.num_computed:
                # Again where it was not its turn after all: more may be kept by now.
                self._reuse(request)
                room -= request.cache.num_cached // _COPIED_PER_FED
            self._fed[request.spec.internal_id] = request
            room -= request.sequence.num_known - request.cache.num_computed

    def _keep_chunk(self, name: str, request: Request) -> None:
        """Keep the state at the end of a chunk that leaves another alone, or where texts were seen to part."""
        end, num_left = request.cache.num_computed, request.sequence.num_known
        num_left -= end
        is_last = num_left <= self._chunk or end == request.cache.chunk_end
        is_new = end and end != request.cache.num_cached and self._ends.get(name) != end
        if is_new and is_last:
            self._ends[name] = end
            self.keep(request)

    def keep_finished(self, requests: Sequence[Request]) -> None:
        """Keep the texts of those that ended well; the caches of others may be lost."""
        for request in requests:
            if request.state is State.FINISHED:
                self.keep(request)

    def keep(self, request: Request) -> None:
        """Keep what is computed of the text of a request that holds a slot and whose caches are sound."""
        scope, slot = request.spec.cache_scope, request.slot
        if not scope or slot is None or request.spec.beams is not None:
            return
        cache = request.cache
        lengths = (min(cache.num_computed, cache.num_exact), cache.draft_computed)
        for index, (engine, length) in enumerate(zip(self._engines, lengths, strict=False)):
            if engine.state_bytes:
                # A state stands behind what was settled alone.
                settled = engine.first_start(slot)
                length = settled if settled <= length else 0
            if length < FEWEST or (index and not self._has_whole_draft(slot)):
                continue
            text, read = request.sequence.tokens[:length], partial(engine.read_slot, slot)
            state = partial(_state_of, engine, slot, length) if engine.state_bytes else None
            try:
                self._tree.insert((index, scope), text, read, engine.token_bytes, state)
            except Exception:  # the engine's, or too little memory: nobody depends on it
                logger.warning("a text could not be kept", exc_info=True)

    def _reuse(self, request: Request) -> None:
        """Give a row that was fed nothing what is kept of its prompt, where that is worth a copy."""
        spec, num_prompt = request.spec, request.sequence.num_known
        if not spec.cache_scope or spec.num_prompt_logprobs is not None:
            return
        if spec.internal_id not in self._fed:
            self._num_queried += num_prompt
        needs_way = _depends_on_drafts(request)
        found = self._find(0, request)
        length = found.length
        if request.group.followers:
            # They are given its slot behind the chunk that ends the prompt.
            length = min(length, num_prompt - 2)
        if needs_way or request.group.followers:
            length = num_usable(length, num_prompt, self._chunk)
        elif found.num_cached >= length + WORTH_A_STATE:
            # Texts part there, so that a third one may.
            request.cache.chunk_end = found.num_cached
        if self._write(0, request, found, length):
            request.commit_cached(length)
            self._num_found += length
        is_drafted = len(self._engines) > 1 and request.speculation.gamma > 0 and not needs_way
        if is_drafted and not request.cache.draft_computed:
            found = self._find(1, request)
            if self._write(1, request, found, found.length):
                request.commit_draft_cache(found.length)

    def _find(self, index: int, request: Request) -> _Found:
        """Return what is kept of a prompt but its last token, which is fed so that there are logits."""
        scope = (index, request.spec.cache_scope)
        tokens = request.sequence.tokens[: request.sequence.num_known - 1]
        if self._engines[index].state_bytes:
            return _Found(*self._tree.find_state(scope, tokens))
        pieces = self._tree.find(scope, tokens)
        return _Found(pieces, None, sum(piece.shape[-2] for piece in pieces))

    def _write(self, index: int, request: Request, found: _Found, length: int) -> bool:
        """Write the first tokens that were found to a row; False where they are too few, or the engine failed."""
        slot, start, engine = request.slot, 0, self._engines[index]
        assert slot is not None
        if length < FEWEST or (engine.state_bytes and length < found.length):
            return False
        try:
            for values in found.pieces:
                values = values[..., : length - start, :]
                engine.write_slot(slot, start, values)
                start += values.shape[-2]
            if found.state is not None:
                engine.write_state(slot, SlotState(length=length, values=found.state))
        except Exception:  # the row is fed from its beginning instead
            logger.warning("a text that was kept could not be used", exc_info=True)
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Found:
    """What is kept of a text.

    Attributes:
        pieces: arrays of consecutive tokens.
        state: behind the last of them; None of a model without recurrent layers, or where nothing is kept.
        num_cached: tokens that are kept, those behind the state too.
    """

    pieces: Sequence[FloatArray]
    state: FloatArray | None
    num_cached: int

    @property
    def length(self) -> int:
        """Tokens of the pieces."""
        return sum(piece.shape[-2] for piece in self.pieces)


def _state_of(engine: Engine, slot: int, length: int) -> FloatArray:
    """Return the state of a slot's first ``length`` tokens.

    Raises:
        EngineError: it is of others.
    """
    found = engine.read_state(slot)
    if found.length != length:
        raise EngineError(f"slot {slot}: a state of {found.length} tokens, not {length}")
    return found.values


def num_usable(length: int, num_prompt: int, chunk: int) -> int:
    """Return how many of the tokens found leave a prompt its way to the first token of the answer.

    That comes with the chunk that ends the prompt, without a draft, or from the next step, where one token is left
    behind the chunks (``runtime.core.scheduler``).

    Args:
        length: tokens found, fewer than ``num_prompt``.
        num_prompt: tokens of the prompt, two at least.
        chunk: tokens of a chunk.
    """
    if chunk == 1 or num_prompt % chunk == 1:
        return length - length % chunk
    length = min(length, num_prompt - 2)
    return length - int((num_prompt - length) % chunk == 1)


def _depends_on_drafts(request: Request) -> bool:
    """Return whether an answer that its seed and its request alone decide depends on where its drafts begin."""
    spec, speculation = request.spec, request.speculation
    if speculation.gamma == 0 or speculation.is_adaptive:
        return False
    is_lenient = spec.speculation.mode is ExactnessMode.LENIENT
    if not is_lenient and spec.params.is_greedy:
        return False
    return spec.speculation.mode is not ExactnessMode.SEED_STABLE
