"""What the slots of one beam search hold in the target's cache, and how texts get there.

A slot holds whatever was fed to it last, kept or not. What is to be fed next goes to the slot that begins as it does;
where two texts begin as the same slot does, one of them gets a copy of it in another slot:

    before   slot a: prompt A x y      slot b: prompt B z
    wanted   prompt A x w, prompt A x v
    after    slot a: prompt A x . (w is fed)   slot b: prompt A x . (copied; v is fed)

Invariants:

* C1  A slot is copied over only if nothing is wanted of it: every source is fed in place too, so no copy overwrites
  what another one needs.
* C2  Text that follows the prompt is held only behind the whole of it.
* C3  All that is fed is settled (I5 of ``engines.base``): what a slot has in common with a text counts only where the
  slot may be cut there.
* C4  Where a source was read, every slot has it: whoever holds no text of the search's can be fed all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.engines.base import Engine, FloatArray, Source, Span
from outrider.engines.rounds import do_nothing

Tail = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Text of a slot: its leading ``num_tokens``, of which ``tail`` are those behind the prompt."""

    num_tokens: int = 0
    tail: Tail = ()


class BeamCache:
    """The slots of one search.

    Args:
        engine: shared with others.
        prompt: at least one token.
        slots: of the search; its owner changes entries where rows move, after ``move``.
    """

    def __init__(self, engine: Engine, prompt: Tail, slots: list[int]) -> None:
        self.engine = engine
        self.slots = slots
        self._prompt = prompt
        self._held = [Held()] * len(slots)

    @property
    def lengths(self) -> list[int]:
        """Tokens each slot holds."""
        return [held.num_tokens for held in self._held]

    def forget(self) -> None:
        """The cache was lost: begin anew."""
        self._held = [Held()] * len(self.slots)

    def move(self, member: int, destination: int) -> None:
        """Copy what a member's slot holds to a slot of nobody's, its source too.

        Raises:
            EngineError: it could not be copied.
        """
        length = self._held[member].num_tokens
        if length or self.engine.limits.max_source:
            self.engine.move_slot(self.slots[member], destination, length)

    def read(self, source: Tail) -> None:
        """Read a source for all slots: once, and the others get it from the first. What they held is forgotten.

        Raises:
            EngineError: it could not be read or shared; no slot can be fed before it was.
        """
        self.forget()
        first, *others = self.slots
        self.engine.read([Source(slot=first, tokens=source)])
        if others:
            self.engine.share_source(first, others)

    def prompt_span(self, length: int) -> Span:
        """The next ``length`` tokens of the prompt, for the first slot."""
        start = self._held[0].num_tokens
        tokens = self._prompt[start : start + length]
        return Span(
            slot=self.slots[0],
            start=start,
            tokens=tokens,
            num_logits=0,
            num_settled=len(tokens),
        )

    def note_fed(self, member: int, num_tokens: int, tail: Tail) -> None:
        """A member's slot now holds ``num_tokens`` of the prompt and ``tail``."""
        num_behind = max(0, num_tokens - len(self._prompt))
        self._held[member] = Held(num_tokens, tail[:num_behind])

    def place(self, tails: Sequence[Tail]) -> list[Feed]:
        """Give every text the slot that holds the most of it, copying where two want the same one.

        Args:
            tails: texts behind the prompt, at most one per slot. The logits of each one's last token are wanted.

        Raises:
            EngineError: a slot could not be copied.
        """
        members: list[int] = []
        copies: list[tuple[int, int]] = []
        taken: set[int] = set()
        for index, tail in enumerate(tails):
            shared = [self._num_shared(member, tail) for member in range(len(self.slots))]
            best = max(range(len(shared)), key=lambda m: (shared[m], m not in taken, -m))
            if best in taken:
                copies.append((index, best))
            taken.add(best)
            members.append(best)
        free = (member for member in range(len(self.slots)) if member not in taken)
        for index, source in copies:
            members[index] = next(free)
            length = self._num_shared(source, tails[index])
            if length:
                self.engine.move_slot(self.slots[source], self.slots[members[index]], length)
            self.note_fed(members[index], length, self._held[source].tail)
        return [Feed(self, member, tail) for member, tail in zip(members, tails, strict=True)]

    def pending(self, feed: Feed) -> tuple[int, Tail]:
        """Where the feed goes on, and the tokens still to feed."""
        start = self._num_shared(feed.member, feed.tail)
        num_prompt = len(self._prompt)
        if start >= num_prompt:
            return start, feed.tail[start - num_prompt :]
        return start, self._prompt[start:] + feed.tail

    def _num_shared(self, member: int, tail: Tail) -> int:
        """Leading tokens of a slot to keep for the prompt and ``tail``, whose last token is fed always."""
        held = self._held[member]
        low, high = 0, min(len(held.tail), len(tail))
        # Slices compare at C's speed, and mostly all of it is shared.
        if held.tail[:high] == tail[:high]:
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            if held.tail[low:middle] == tail[low:middle]:
                low = middle
            else:
                high = middle - 1
        num_shared = min(held.num_tokens, len(self._prompt)) + low
        num_shared = min(num_shared, len(self._prompt) + len(tail) - 1)
        return num_shared if num_shared >= self.engine.first_start(self.slots[member]) else 0


@dataclass(frozen=True, slots=True)
class Feed:
    """A text on its way into a slot.

    Attributes:
        member: which of the search's slots.
        tail: behind the prompt.
    """

    cache: BeamCache
    member: int
    tail: Tail


def feed_all(
    engine: Engine,
    feeds: Sequence[Feed],
    lengths: Mapping[int, int],
    beat: Callable[[], None] = do_nothing,
) -> list[FloatArray]:
    """Feed texts that were placed, of any searches together.

    Args:
        engine: that of all feeds.
        feeds: at least one.
        lengths: per slot of any search, the tokens it holds; slots between those fed are left as they are.
        beat: called after every extend but the last, which long arrears take.

    Returns:
        Per feed [V] float32 behind its last token, valid until the next extend.

    Raises:
        EngineError: the backend failed; the slots of all searches are undefined.
    """
    held = dict(lengths)
    while True:
        spans: dict[int, Span] = {}
        pending = [feed.cache.pending(feed) for feed in feeds]
        is_last = all(len(tokens) <= engine.limits.max_extend for _, tokens in pending)
        for feed, (start, tokens) in zip(feeds, pending, strict=True):
            # Long arrears go ahead by themselves, all but what the last extend is for.
            fed = tokens if is_last else tokens[:-1][: engine.limits.max_extend]
            slot = feed.cache.slots[feed.member]
            spans[slot] = Span(
                slot=slot, start=start, tokens=fed, num_logits=int(is_last), num_settled=len(fed)
            )
            held[slot] = start + len(fed)
        first = min(spans)
        block = [
            spans.get(slot) or Span(slot=slot, start=held[slot], tokens=(), num_logits=0)
            for slot in range(first, max(spans) + 1)
        ]
        logits = engine.extend(block)
        for feed in feeds:
            slot = feed.cache.slots[feed.member]
            feed.cache.note_fed(feed.member, held[slot], feed.tail)
        if is_last:
            return [logits[feed.cache.slots[feed.member] - first, 0] for feed in feeds]
        beat()
