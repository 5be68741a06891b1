"""Texts get into the slots of a search whatever the slots held before, with as little fed as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines.base import EngineError, EngineLimits, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.loop.beams.cache import BeamCache, Tail, feed_all

from tests.runtime.loop.beams.test_step import TARGET, V

PROMPT = (1, 2, 3)
LIMITS = EngineLimits(max_batch=6, max_context=96, max_extend=8, vocab_size=V)


class Counting(ScriptedEngine):
    """Counts what is fed and copied."""

    num_fed = 0
    num_copied = 0

    def extend(self, spans: Sequence[Span]) -> np.ndarray:
        self.num_fed += sum(len(one.tokens) for one in spans)
        return super().extend(spans)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.num_copied += 1
        super().move_slot(source, destination, length)


def filled(slots: Sequence[int] = (1, 2, 3)) -> tuple[Counting, BeamCache]:
    engine = Counting(TARGET, LIMITS)
    cache = BeamCache(engine, PROMPT, list(slots))
    engine.extend([cache.prompt_span(2)])
    cache.note_fed(0, 2, ())
    engine.num_fed = 0
    return engine, cache


def feed(cache: BeamCache, tails: Sequence[Tail]) -> None:
    """Place and feed, and hold every row against the text's own."""
    lengths = dict(zip(cache.slots, cache.lengths, strict=True))
    feeds = cache.place(tails)
    lengths = dict(zip(cache.slots, cache.lengths, strict=True))
    found = feed_all(cache.engine, feeds, lengths)
    assert len({one.member for one in feeds}) == len(tails)
    for row, tail in zip(found, tails, strict=True):
        np.testing.assert_array_equal(row, TARGET(PROMPT + tail))


def test_children_of_one_parent_copy_it_and_feed_one_token_each() -> None:
    engine, cache = filled()
    feed(cache, [()])
    assert (engine.num_fed, engine.num_copied) == (1, 0)
    feed(cache, [(4,), (5,), (0,)])
    assert (engine.num_fed, engine.num_copied) == (4, 2)
    feed(cache, [(5, 1), (4, 2), (0, 3)])
    assert (engine.num_fed, engine.num_copied) == (7, 2), "in place, in any order"
    feed(cache, [(4, 2, 1), (4, 2, 2), (5, 1, 0)])
    assert (engine.num_fed, engine.num_copied) == (10, 3)


def test_what_was_fed_and_not_kept_is_used_where_it_fits() -> None:
    engine, cache = filled()
    feed(cache, [(4, 1, 2), (5,)])
    engine.num_fed = 0
    feed(cache, [(4, 1, 2), (4, 1, 5)])
    assert engine.num_fed == 1 + 1, "a row that is wanted again is fed again"
    assert engine.num_copied == 2


def test_slots_between_those_fed_keep_what_they_hold() -> None:
    engine, cache = filled()
    feed(cache, [(4,), (5,), (0,)])
    feed(cache, [(4, 1), (0, 1)])
    engine.num_fed = 0
    feed(cache, [(5, 2)])
    assert engine.num_fed == 1


def test_arrears_longer_than_a_span_are_fed_in_pieces() -> None:
    engine, cache = filled()
    rng = np.random.default_rng(0)
    long = tuple(int(token) for token in rng.integers(0, V, 37))
    feed(cache, [long, (4,)])
    assert engine.num_extends == 1 + 5
    feed(cache, [(*long, 1), (4, 4), long[:20]])


@pytest.mark.parametrize("seed", range(5))
def test_any_texts_in_any_order_have_their_own_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine, cache = filled((2, 0, 1, 3))
    parents: list[Tail] = [()]
    for _ in range(25):
        tails: list[Tail] = []
        while len(tails) < rng.integers(1, 5):
            parent = parents[int(rng.integers(0, len(parents)))]
            kept = parent[: int(rng.integers(max(0, len(parent) - 2), len(parent) + 1))]
            tail = (*kept, *(int(t) for t in rng.integers(0, V, rng.integers(0, 3))))
            tails.append(tail)
        tails = [tail[:60] for tail in dict.fromkeys(tails)]
        feed(cache, tails)
        if rng.random() < 0.1:
            cache.forget()
            engine.trim([])
        parents = tails
        for slot, held in zip(cache.slots, cache._held, strict=True):
            assert (
                engine.tokens_of(slot)[: held.num_tokens] == (PROMPT + held.tail)[: held.num_tokens]
            )


def test_a_slot_that_cannot_be_copied_is_told() -> None:
    class Immovable(ScriptedEngine):
        def move_slot(self, source: int, destination: int, length: int) -> None:
            raise EngineError("cannot move")

    cache = BeamCache(Immovable(TARGET, LIMITS), PROMPT, [0, 1])
    feed(cache, [()])
    with pytest.raises(EngineError, match="cannot move"):
        cache.place([(4,), (5,)])
