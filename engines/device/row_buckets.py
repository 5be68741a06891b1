"""Numbers of rows that calls are padded to, so that what is recorded of a step is met again.

A padded row is the slot behind the last one, extended from where its valid tokens end: what is written
there nobody sees, whoever holds the slot, and its logits are left out. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import Span
from outrider.engines.bundle.plans import Profile, Shape

# A step is padded by less than half; on a GPU, where reading the weights takes the time, that is little.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def row_sizes(max_batch: int) -> tuple[int, ...]:
    """Ascending numbers of rows of an engine with so many slots; the last is all of them."""
    return (*(size for size in _SIZES if size < max_batch), max_batch)


def padding_rows(
    spans: Sequence[Span],
    shape: Shape,
    *,
    sizes: Sequence[int],
    lengths: Sequence[int],
    capacity: int,
    profile: Profile,
) -> list[Span]:
    """Rows to run behind the spans; none where no size fits.

    Args:
        spans: of neighbouring slots.
        shape: of the call without padding.
        sizes: numbers of rows, ascending; empty for any.
        lengths: valid tokens of every slot.
        capacity: S of the cache, in which padded rows need room too.
        profile: that holds the shape; it must hold the padded one.
    """
    size = next((size for size in sizes if size >= len(spans)), len(spans))
    first = spans[0].slot + len(spans)
    slots = range(first, spans[0].slot + size)
    has_room = slots.stop <= len(lengths) and all(
        lengths[slot] + shape.tokens <= capacity for slot in slots
    )
    if not has_room or profile.broken_limits(shape._replace(batch=size)):
        return []
    return [Span(slot=slot, start=lengths[slot], tokens=(), num_logits=0) for slot in slots]
