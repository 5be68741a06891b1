"""Compares an engine's answers bit by bit: the claim that a row's logits do not depend on what runs beside it (I2).

Which kernels a library runs may change with its version. A bundle's certificate was made with one version. On another
the claim is confirmed here, on the machine that serves, or withdrawn. Kernels depend on shapes, not on values, so a
short text in the shapes that serving has decides it: token by token, in spans, beside other rows, as a tree. Where
there are sources, each text answers one of another length, which was read alone or beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from outrider.engines.base import Engine, FloatArray, Source, Span

# Tokens that are compared, fed one by one and as spans of drafts; of the chunk of prompt that they begin; and rows.
_NUM_TOKENS = 10
_WIDTHS = (2, 3, 5)
_NUM_LONG = 64
_MAX_ROWS = 3
# Sources have up to so many tokens, ids of any vocabulary.
_MOST_SOURCE = 19
# Read beside them once: neither a call's columns nor the room of sources may matter.
_LONG_SOURCE = 65
_SOURCE_IDS = 2


class BitEquality(Enum):
    """What is known of the claim."""

    NOT_CLAIMED = "not claimed"
    CERTIFIED = "certified"
    CONFIRMED = "confirmed"
    WITHDRAWN = "withdrawn"


def has_equal_bits(engine: Engine) -> bool:
    """Return whether an engine gives a text the same bits in all shapes; its slots are empty before and after."""
    limits = engine.limits
    longest = min(_NUM_LONG, limits.max_extend, limits.max_context)
    count = min(_NUM_TOKENS, longest)
    rows = [_text(row, count, limits.vocab_size) for row in range(min(_MAX_ROWS, limits.max_batch))]
    alone = [_in_spans(engine, [text], (1,) * count)[0] for text in rows]
    long = _in_spans(engine, [_text(0, longest, limits.vocab_size)], (longest,))
    ways = [[long[0][:count]], _in_spans(engine, rows[:1], _cut(count))]
    ways += [_in_spans(engine, rows, (count,)), _in_spans(engine, rows, _cut(count))]
    ways.append(_in_spans(engine, rows[::-1], _cut(count))[::-1])
    if limits.max_source and limits.max_batch > 1:
        few = rows[: limits.max_batch - 1]
        ways.append(_in_spans(engine, few, _cut(count), is_beside_long=True))
    nodes = min(count, limits.max_tree_nodes)
    if nodes >= 2:
        ways.append([_as_tree(engine, rows[0][:nodes])])
    engine.trim([])
    return all(
        np.array_equal(one[: len(other)].view(np.int32), other.view(np.int32))
        for way in ways
        for one, other in zip(alone, way, strict=False)
    )


def _text(row: int, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((7 * row + 3 * index + 1) % vocab_size for index in range(count))


def _cut(count: int) -> tuple[int, ...]:
    """Widths of spans that cover ``count`` tokens, the last one cut."""
    widths, left = [], count
    for width in _WIDTHS * count:
        if not left:
            break
        widths.append(min(width, left))
        left -= widths[-1]
    return tuple(widths)


def _in_spans(
    engine: Engine,
    texts: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    *,
    is_beside_long: bool = False,
) -> list[FloatArray]:
    """Return the logits of texts, each [T, V] float32, read and fed together in spans of these widths."""
    _read_sources(engine, texts, is_beside_long=is_beside_long)
    start, found = 0, list[FloatArray]()
    for width in widths:
        end = start + width
        # As much as may be is left open: it is what the next span's states are worked out from.
        max_open = engine.limits.max_open
        count = width if max_open is None else max(1, width - max_open)
        spans = [
            Span(
                slot=slot,
                start=start,
                tokens=text[start:end],
                num_logits=width,
                num_settled=count,
            )
            for slot, text in enumerate(texts)
        ]
        found.append(engine.extend(spans)[: len(texts), :width].copy())
        start = end
    return list(np.concatenate(found, axis=1))


def _read_sources(
    engine: Engine, texts: Sequence[tuple[int, ...]], *, is_beside_long: bool = False
) -> None:
    """Read a source for each text, the same whichever slot the text is in: of 1, 17 and 14 tokens."""
    most = engine.limits.max_source
    if most == 0:
        return
    lengths = [min(most, 1 + (text[0] - 1) * 5 % _MOST_SOURCE) for text in texts]
    if is_beside_long:
        lengths.append(min(most, _LONG_SOURCE))
    engine.read(
        [
            Source(slot=slot, tokens=tuple(index % _SOURCE_IDS for index in range(length)))
            for slot, length in enumerate(lengths)
        ]
    )


def _as_tree(engine: Engine, text: tuple[int, ...]) -> FloatArray:
    """Return the logits [T - 1, V] float32 of a tree's leading chain; its last token is a branch at the root."""
    _read_sources(engine, [text])
    parents = (*range(len(text) - 2), 0)
    span = Span(slot=0, start=0, tokens=text, num_logits=len(text), parents=parents)
    return engine.extend([span])[0, : len(text) - 1].copy()
