"""What one step runs: a pure function of where every row stands.

A row with more than one uncomputed token is prefilling, with exactly one it is decoding. Each step
feeds at most one chunk of one prefilling row, the one admitted first, so that running streams wait
for one chunk at most; then every decoding row is verified together, each with its own gamma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.base import Span


class Progress(Protocol):
    """Where a live row stands between two steps.

    Attributes:
        order: admission number; smaller was admitted earlier.
        num_known: tokens that exist.
        num_computed: leading tokens whose keys and values are in the target's cache.
        num_remaining: tokens it may still emit, at least 1.
        gamma: draft tokens per step it asks for.
    """

    @property
    def order(self) -> int: ...  # noqa: D102
    @property
    def num_known(self) -> int: ...  # noqa: D102
    @property
    def num_computed(self) -> int: ...  # noqa: D102
    @property
    def num_remaining(self) -> int: ...  # noqa: D102
    @property
    def gamma(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds a step.

    Attributes:
        max_context: tokens of one slot.
        max_gamma: draft tokens of one row.
        prefill_chunk: prompt tokens of one step.
    """

    max_context: int
    max_gamma: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Feed ``length`` known tokens to one row; no logits are wanted."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step.

    Attributes:
        prefill: the chunk to feed first, if any.
        gammas: per live slot, draft tokens to verify at most; None for rows that do not decode.
    """

    prefill: Prefill | None
    gammas: tuple[int | None, ...]

    @property
    def has_decode(self) -> bool:
        """Whether any row decodes."""
        return any(gamma is not None for gamma in self.gammas)


def num_to_admit(queued: Sequence[int], num_free: int) -> int:
    """How many queued requests, oldest first, get their slots now.

    A request gets all its slots at once or none, and nobody overtakes the one that waits: what it waits for, the
    running ones give back, so it never waits for ever.

    Args:
        queued: slots that each queued request needs, oldest first.
        num_free: slots that are free.
    """
    for num_admitted, num_slots in enumerate(queued):
        if num_slots > num_free:
            return num_admitted
        num_free -= num_slots
    return len(queued)


def plan_step(rows: Sequence[Progress], limits: StepLimits, *, has_fed: bool = False) -> StepPlan:
    """Plan the next step of all live rows.

    Args:
        rows: row i holds slot i.
        limits: what bounds a step.
        has_fed: whether the step's chunk was fed before it began; it is given another one only where
            nobody would wait for it.

    Returns:
        A plan in which a row whose prefill ends this step decodes in the same step.
    """
    if has_fed and (plan := _plan_decode(rows, limits, None)).has_decode:
        return plan
    return _plan_decode(rows, limits, plan_prefill(rows, limits.prefill_chunk))


def plan_prefill(rows: Sequence[Progress], chunk: int) -> Prefill | None:
    """The chunk of prompt to feed next; rows that decode have no say in it."""
    waiting = [slot for slot, row in enumerate(rows) if row.num_known - row.num_computed > 1]
    if not waiting:
        return None
    slot = min(waiting, key=lambda candidate: rows[candidate].order)
    missing = rows[slot].num_known - 1 - rows[slot].num_computed
    return Prefill(slot=slot, length=min(missing, chunk))


def _plan_decode(rows: Sequence[Progress], limits: StepLimits, prefill: Prefill | None) -> StepPlan:
    gammas = tuple(
        _gamma(row, limits) if _num_missing(slot, row, prefill) == 1 else None
        for slot, row in enumerate(rows)
    )
    return StepPlan(prefill=prefill, gammas=gammas)


def _num_missing(slot: int, row: Progress, prefill: Prefill | None) -> int:
    fed = prefill.length if prefill is not None and prefill.slot == slot else 0
    return row.num_known - row.num_computed - fed


def _gamma(row: Progress, limits: StepLimits) -> int:
    """Leave room for the token that every verification adds, in the answer and in the slot."""
    bounds = (
        row.gamma,
        limits.max_gamma,
        row.num_remaining - 1,
        limits.max_context - row.num_known,
    )
    return max(0, min(bounds))


def decode_spans(
    starts: Sequence[int],
    fed: Sequence[tuple[int, ...] | None],
    *,
    trees: Mapping[int, tuple[int, ...]] | None = None,
) -> list[Span]:
    """Spans over the whole live prefix.

    Args:
        starts: per slot, the tokens that stay valid.
        fed: per slot, the tokens to feed, all of whose logits are wanted; None takes no part.
        trees: parents of the slots whose tokens form a tree.
    """
    parents = trees or {}
    return [
        Span(
            slot=slot,
            start=start,
            tokens=tokens or (),
            num_logits=len(tokens or ()),
            parents=parents.get(slot),
        )
        for slot, (start, tokens) in enumerate(zip(starts, fed, strict=True))
    ]
