"""What one step runs: a pure function of where every row stands.

A row with more than one uncomputed token is prefilling, with exactly one it is decoding. Tokens that a constraint has
forced behind that one do not count: they are fed with it. Each step feeds at
most one chunk of prompt, so that running streams wait for one chunk at most, and nobody's
first token waits longer for prompts beside its own: of the row admitted first, and of neighbours that
miss about as much and fit into the chunk with it. Where rows decode, which wait for it, a chunk is narrower: just wide
enough that its tokens cost no more than in a wide one. Prompts that are scored, for which a call computes logits of
every token, join one another alone. Then every decoding row is verified together, each with its own gamma.

Where the host judges (``StepLimits.answers_prompts``), the chunk that ends a prompt takes its last token too, and the
row's first token comes out of that call: the row decodes from the next step on. A row whose prompt is one token, or has
one left behind its chunks, decodes at once, as rows do.

Of a model with an encoder, a row first reads its source, whole: running streams wait for it. A step has one read or
one chunk, for the row admitted first. A row whose decoder prefix is one token decodes in the step of its read.

Of the completions of one prompt one row, their leader, is fed; the others wait, and begin where its prompt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.runtime.core.request import Request

MOST_PADDING = 16
"""Tokens that a row is padded by at most to be fed in one call with others.

A little more than the tokens that a call of one's own costs beside them, since who joins also begins a step earlier:
on two cores, with the demo pair, eight prompts of 16 tokens take 24 ms one by one and 15 ms together, eight of 64
tokens 64 and 55 ms, so that a call costs as much as about a dozen tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds a step.

    Attributes:
        max_context: tokens of one slot.
        max_gamma: draft tokens of one row.
        max_depth: of one row, with what stands behind them.
        prefill_chunk: prompt tokens of one step, padding included.
        prefill_rows: rows that one step feeds prompts to, or reads sources for.
        answers_prompts: whether a chunk that ends a prompt yields the first token of the answer; else all of the
            prompt but its last token is fed, and that decodes.
        read_tokens: source tokens of one step, padding included; one source is read whatever its length.
        scored_chunk: as ``prefill_chunk``, of prompts whose tokens all want their logits.
        shared_chunk: likewise of a step in which as many rows decode as have prompts to be fed, if that is less: those
            of a burst are read in wide calls, and running streams keep short pauses.
    """

    max_context: int
    max_gamma: int
    max_depth: int
    prefill_chunk: int
    prefill_rows: int = 1
    answers_prompts: bool = False
    read_tokens: int = 512
    scored_chunk: int = 128
    shared_chunk: int = 256

    def chunk(self, *, is_scored: bool, is_shared: bool) -> int:
        """Return the prompt tokens of a step; ``is_shared``: at least as many rows decode as have prompts to be fed."""
        most = self.scored_chunk if is_scored else self.prefill_chunk
        return min(most, self.shared_chunk) if is_shared else most


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Feed known tokens to neighbouring rows in one call.

    Attributes:
        slot: the first of them.
        lengths: tokens of each, at least 1.
    """

    slot: int
    lengths: tuple[int, ...]

    def length_of(self, slot: int) -> int:
        """Tokens that a slot is fed; 0 for those that take no part."""
        index = slot - self.slot
        return self.lengths[index] if 0 <= index < len(self.lengths) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step.

    Attributes:
        prefill: the chunk to feed first, if any.
        gammas: per live slot, draft tokens to verify at most; None for rows that do not decode.
        read: slots whose sources to read first; empty for none.
    """

    prefill: Prefill | None
    gammas: tuple[int | None, ...]
    read: range = range(0)

    @property
    def has_decode(self) -> bool:
        """Whether any row decodes."""
        return self.gammas.count(None) < len(self.gammas)


def num_to_admit(queued: Iterable[int], num_free: int) -> int:
    """How many queued requests, oldest first, get their slots now.

    A request gets all its slots at once or none, and nobody overtakes the one that waits: what it waits for, the
    running ones give back, so it never waits for ever.

    Args:
        queued: slots that each queued request needs, at least 1, and each group for all of its completions, oldest
            first. Not read behind the first that waits.
        num_free: slots that are free.
    """
    num_admitted = 0
    for num_slots in queued:
        if num_slots > num_free:
            break
        num_free -= num_slots
        num_admitted += 1
    return num_admitted


def plan_step(rows: Sequence[Request], limits: StepLimits, *, has_fed: bool = False) -> StepPlan:
    """Plan the next step of all live rows.

    Args:
        rows: row i holds slot i.
        limits: what bounds a step.
        has_fed: whether the step's chunk was fed before it began; it is given another one only where
            nobody would wait for it.

    Returns:
        A plan in which a row that misses one token behind this step's chunk decodes in the same step.
    """
    gammas = _gammas(rows, limits, None)
    if None not in gammas or (has_fed and gammas.count(None) < len(gammas)):
        return StepPlan(prefill=None, gammas=gammas)
    read = plan_read(rows, limits)
    if read:
        gammas = _with_leaders(rows, _gammas(rows, limits, None, read))
        return StepPlan(prefill=None, gammas=gammas, read=read)
    prefill = plan_prefill(rows, limits)
    gammas = _with_leaders(rows, _gammas(rows, limits, prefill))
    return StepPlan(prefill=prefill, gammas=gammas)


def plan_read(rows: Sequence[Request], limits: StepLimits) -> range:
    """The slots whose sources to read next; none while a row admitted earlier has a prompt to feed."""
    lengths = {
        slot: row.cache.num_unread
        for slot, row in enumerate(rows)
        if row.cache.num_unread and row.group.leader is None
    }
    if not lengths:
        return range(0)
    fed = [slot for slot, row in enumerate(rows) if _num_missing(row) > 1]
    oldest = min({*fed, *lengths}, key=lambda slot: rows[slot].order)
    if oldest not in lengths:
        return range(0)
    return alike_neighbours(
        oldest,
        lengths,
        rank=lambda slot: rows[slot].order,
        most_tokens=limits.read_tokens,
        most_rows=limits.prefill_rows,
    )


def plan_prefill(rows: Sequence[Request], limits: StepLimits) -> Prefill | None:
    """The chunk of prompt to feed next; of rows that decode it is only asked whether there are any."""
    missing = {
        slot: missing + limits.answers_prompts
        for slot, row in enumerate(rows)
        if not row.cache.num_unread
        and row.group.leader is None
        and (missing := _num_missing(row) - 1) > 0
    }
    if not missing:
        return None
    oldest = min(missing, key=lambda slot: rows[slot].order)
    is_scored = rows[oldest].is_scored
    num_decoding = sum(not row.cache.num_unread and _num_missing(row) == 1 for row in rows)
    chunk = limits.chunk(
        is_scored=is_scored,
        is_shared=num_decoding >= len(missing),
    )
    lengths = {
        slot: min(length, chunk, _num_to_end(rows[slot]) or length)
        for slot, length in missing.items()
        if rows[slot].is_scored == is_scored
    }
    slots = alike_neighbours(
        oldest,
        lengths,
        rank=lambda slot: rows[slot].order,
        most_tokens=chunk,
        most_rows=limits.prefill_rows,
    )
    return Prefill(slot=slots.start, lengths=tuple(lengths[slot] for slot in slots))


def alike_neighbours(
    slot: int,
    lengths: Mapping[int, int],
    *,
    rank: Callable[[int], int],
    most_tokens: int,
    most_rows: int,
) -> range:
    """Slots around one of them that are worth one call together.

    Args:
        slot: is among them whatever the bounds.
        lengths: by slot, the tokens to feed; slots that are fed nothing are left out.
        rank: of two neighbours the one with the smaller rank joins first.
        most_tokens: of the call, padding included.
        most_rows: of the call.
    """
    taken = range(slot, slot + 1)
    shortest = longest = lengths[slot]
    while len(taken) < most_rows:
        joining = None
        for side in sorted((s for s in (taken.start - 1, taken.stop) if s in lengths), key=rank):
            bounds = min(shortest, lengths[side]), max(longest, lengths[side])
            is_alike = bounds[1] - bounds[0] <= MOST_PADDING
            if is_alike and bounds[1] * (len(taken) + 1) <= most_tokens:
                joining, (shortest, longest) = side, bounds
                break
        if joining is None:
            break
        taken = range(min(taken.start, joining), max(taken.stop, joining + 1))
    return taken


def _gammas(
    rows: Sequence[Request], limits: StepLimits, prefill: Prefill | None, read: range = range(0)
) -> tuple[int | None, ...]:
    """Return each row's gamma, which leaves room for the token that every verification adds; None where it waits."""
    gammas: list[int | None] = []
    for slot, row in enumerate(rows):
        fed = 0 if prefill is None else prefill.length_of(slot)
        is_unread = row.cache.num_unread and slot not in read
        sequence, gamma = row.sequence, row.speculation.gamma
        num_fed = row.cache.num_computed + fed
        if is_unread or sequence.num_known - sequence.num_pending - num_fed != 1:
            gammas.append(None)
        elif gamma == 0:
            gammas.append(0)
        else:
            gammas.append(max(0, min(gamma, limits.max_gamma, draft_room(row, limits.max_context))))
    return tuple(gammas)


def draft_room(row: Request, max_context: int) -> int:
    """Return the draft tokens that a row has room for, and for the token that every verification adds."""
    return min(row.sequence.num_remaining - 1, max_context - row.sequence.num_known)


def _num_to_end(row: Request) -> int:
    """Return the tokens before the place where a chunk of the prompt is to end; 0 behind it."""
    return max(0, row.cache.chunk_end - row.cache.num_computed)


def _num_missing(row: Request) -> int:
    """Return the known tokens that the target's cache misses, but for those that the constraint forced."""
    sequence = row.sequence
    return sequence.num_known - sequence.num_pending - row.cache.num_computed


def _with_leaders(
    rows: Sequence[Request], gammas: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Return the gammas with those of their leaders for rows that have one: they decode from the same step on."""
    return tuple(
        gamma if row.group.leader is None else gammas[rows.index(row.group.leader)]
        for row, gamma in zip(rows, gammas, strict=True)
    )
