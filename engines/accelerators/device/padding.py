"""Rows that a call is padded with, so that the same shapes come again and what was recorded of them is used."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import Span
from outrider.engines.bundle.plans import Profile, Shape

# A step is padded by less than half; on a GPU, where reading the weights takes the time, that is little.
_ROW_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def row_sizes(max_batch: int) -> tuple[int, ...]:
    """Ascending numbers of rows of an engine with so many slots; the last is all of them."""
    return (*(size for size in _ROW_SIZES if size < max_batch), max_batch)


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

    ``sizes`` ascend, and empty ones take any number. The profile must hold the padded shape too, and every padded row
    needs room for it in its slot, whose valid tokens are ``lengths``.
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
