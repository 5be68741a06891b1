"""The suite of sources: every engine over a model with an encoder passes it, beside the suites of texts."""

from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError, FloatArray, Source

from tests.engines.contract import (
    Comparison,
    EngineContract,
    MakeEngine,
    extend_one,
    span,
    wanted_logits,
)

# Slots of a contract's engine, and tokens of a source at least.
NUM_SLOTS, MAX_SOURCE = 8, 40
# Of sources in one call.
LENGTHS = (33, 1, 2, 40, 7, 1, 12, 3)


def source(slot: int, tokens: Sequence[int]) -> Source:
    return Source(slot=slot, tokens=tuple(tokens))


class SourceTests(Comparison):
    """Tests of one backend, whose engines have at least 8 slots and read sources of at least 40 tokens.

    ``source_ids`` are the ids below which every id is a source's token.
    """

    source_ids = 8

    @pytest.fixture
    def empty(self, make_engine: MakeEngine) -> Engine:
        return make_engine()

    def make_source(self, count: int, seed: int) -> tuple[int, ...]:
        rng = np.random.default_rng(seed)
        return tuple(int(token) for token in rng.integers(2, self.source_ids, count))

    def make_text(self, count: int, seed: int) -> tuple[int, ...]:
        return self.make_source(count, seed=seed + 1000)

    def answer(self, engine: Engine, slot: int, tokens: Sequence[int]) -> FloatArray:
        """Logits of a text in a slot that has its source."""
        return extend_one(engine, slot, 0, tokens)

    def alone(
        self, make_engine: MakeEngine, tokens: Sequence[int], text: Sequence[int]
    ) -> FloatArray:
        """Logits of a text that answers a source, by an engine that never read another."""
        engine = make_engine()
        engine.read([source(0, tokens)])
        return self.answer(engine, 0, text)

    def test_answers_depend_on_their_own_source(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3, 4)), source(1, (3, 3, 4))])
        found = wanted_logits(empty, [span(0, 0, (2, 3)), span(1, 0, (2, 3))])
        assert np.abs(found[0] - found[1]).max(axis=1).min() > 1e-5

    def test_sources_read_together_answer_as_alone(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        """Lengths 1, 2 and 33 among them; spans of 1, 2, 5 and 9 tokens."""
        sources = [self.make_source(count, seed=row) for row, count in enumerate(LENGTHS)]
        texts = [self.make_text(17, seed=row) for row in range(len(sources))]
        empty.read([source(slot, tokens) for slot, tokens in enumerate(sources)])
        pieces, start = [], 0
        for width in (1, 2, 5, 9):
            spans = [
                span(row, start, text[start : start + width]) for row, text in enumerate(texts)
            ]
            pieces.append(wanted_logits(empty, spans))
            start += width
        for row, (tokens, text) in enumerate(zip(sources, texts, strict=True)):
            expected = np.concatenate(
                [self.alone(make_engine, tokens, text[:9]), self.rest(make_engine, tokens, text)]
            )
            self.assert_same(np.concatenate([piece[row] for piece in pieces]), expected)

    def rest(
        self, make_engine: MakeEngine, tokens: Sequence[int], text: Sequence[int]
    ) -> FloatArray:
        engine = make_engine()
        engine.read([source(3, tokens)])
        extend_one(engine, 3, 0, text[:9])
        return extend_one(engine, 3, 9, text[9:])

    def test_a_source_is_read_beside_texts_that_go_on(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        tokens, text = self.make_source(6, seed=3), self.make_text(6, seed=4)
        expected = self.alone(make_engine, tokens, text)
        empty.read([source(1, tokens)])
        found = [extend_one(empty, 1, 0, text[:2])]
        empty.read(
            [
                source(0, self.make_source(40, seed=5)),
            ]
        )
        found.append(extend_one(empty, 1, 2, text[2:4]))
        empty.read([source(2, (2,)), source(3, self.make_source(39, seed=6))])
        found.append(extend_one(empty, 1, 4, text[4:]))
        self.assert_same(np.concatenate(found), expected)

    def test_reading_again_empties_the_text_and_forgets_a_longer_source(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        tokens, text = self.make_source(3, seed=7), self.make_text(4, seed=8)
        empty.read([source(0, self.make_source(40, seed=9))])
        extend_one(empty, 0, 0, self.make_text(6, seed=10))
        empty.read([source(0, tokens)])
        with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
            empty.extend([span(0, 1, (2,))])
        self.assert_same(self.answer(empty, 0, text), self.alone(make_engine, tokens, text))

    @pytest.mark.parametrize("length", [0, 3])
    def test_a_moved_slot_takes_its_source_along(
        self, empty: Engine, make_engine: MakeEngine, length: int
    ) -> None:
        tokens, text = self.make_source(4, seed=11), self.make_text(6, seed=12)
        expected = self.alone(make_engine, tokens, text)
        empty.read([source(0, tokens), source(1, self.make_source(9, seed=13))])
        extend_one(empty, 0, 0, text[:4])
        extend_one(empty, 1, 0, self.make_text(5, seed=14))
        empty.move_slot(0, 1, length)
        # The source slot's next source is not its copy's.
        empty.read([source(0, self.make_source(5, seed=15))])
        self.assert_same(extend_one(empty, 1, length, text[length:]), expected[length:])

    def test_a_moved_slot_without_a_source_leaves_none(self, empty: Engine) -> None:
        empty.read([source(1, (2, 3))])
        empty.move_slot(0, 1, 0)
        with pytest.raises(EngineError, match="slot 1 has no source"):
            empty.extend([span(1, 0, (2,))])

    def test_a_shared_source_is_read_by_all_and_texts_begin_anew(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        tokens, text = self.make_source(4, seed=16), self.make_text(4, seed=17)
        expected = self.alone(make_engine, tokens, text)
        empty.read([source(slot, self.make_source(8 + slot, seed=18)) for slot in range(4)])
        empty.read([source(2, tokens)])
        for slot in range(4):
            extend_one(empty, slot, 0, text[:2])
        empty.share_source(2, [0, 3])
        for slot in (0, 3):
            with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
                empty.extend([span(slot, 1, (2,))])
            self.assert_same(self.answer(empty, slot, text), expected)
        self.assert_same(extend_one(empty, 2, 2, text[2:]), expected[2:])

    @pytest.mark.parametrize(
        ("slot", "destinations", "message"),
        [
            (0, [1, -1], "slots are"),
            (99, [1], "slots are"),
            (0, [99], "slots are"),
            (2, [1], "slot 2 has no source"),
        ],
    )
    def test_an_impossible_share_is_refused(
        self, empty: Engine, slot: int, destinations: list[int], message: str
    ) -> None:
        empty.read([source(0, (2, 3)), source(1, (3, 4))])
        expected = self.answer(empty, 1, (2, 3))
        with pytest.raises(EngineError, match=message):
            empty.share_source(slot, destinations)
        self.assert_same(extend_one(empty, 1, 1, (3,)), expected[1:])

    def test_free_slots_lose_their_sources_and_others_keep_theirs(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        tokens, text = self.make_source(4, seed=19), self.make_text(4, seed=20)
        expected = self.alone(make_engine, tokens, text)
        empty.read([source(slot, tokens) for slot in range(4)])
        for slot in range(4):
            extend_one(empty, slot, 0, text[:3])
        empty.trim([2, 0, None])
        self.assert_same(extend_one(empty, 0, 2, text[2:]), expected[2:])
        self.assert_same(self.answer(empty, 1, text), expected)
        for slot in (2, 3):
            with pytest.raises(EngineError, match=f"slot {slot} has no source"):
                empty.extend([span(slot, 0, (2,))])

    def test_long_sources_that_have_gone_leave_the_others_as_they_were(
        self, empty: Engine, make_engine: MakeEngine
    ) -> None:
        """Capacity grows and shrinks beside a text that goes on."""
        most = empty.limits.max_source
        tokens, text = self.make_source(4, seed=21), self.make_text(9, seed=22)
        expected = self.alone(make_engine, tokens, text)
        empty.read([source(0, tokens)])
        found = [extend_one(empty, 0, 0, text[:1])]
        for at in range(1, 9):
            empty.read([source(1, self.make_source(most if at % 6 == 1 else 2, seed=at))])
            empty.trim([at])
            found.append(extend_one(empty, 0, at, text[at : at + 1]))
        self.assert_same(np.concatenate(found), expected)

    def test_tokens_need_a_source_and_empty_spans_do_not(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3))])
        expected = self.answer(empty, 0, (2, 3))
        with pytest.raises(EngineError, match="slot 1 has no source"):
            empty.extend([span(0, 0, (3,)), span(1, 0, (2,))])
        found = wanted_logits(empty, [span(0, 1, (3,)), span(1, 0)])
        self.assert_same(found[0], expected[1:])

    def broken_sources(self, engine: Engine) -> list[tuple[list[Source], str]]:
        """Reads that break one rule each."""
        limits = engine.limits
        too_long = (2,) * (limits.max_source + 1)
        return [
            ([], "at least one source"),
            ([source(limits.max_batch, (2,))], "outside 0"),
            ([source(-1, (2,))], "outside 0"),
            ([source(0, (2,)), source(2, (2,))], "must be consecutive"),
            ([source(0, (2,)), source(0, (2,))], "must be consecutive"),
            ([source(0, (2,)), source(1, ())], "slot 1: source of 0 tokens"),
            ([source(0, (2,)), source(1, too_long)], "slot 1: source of"),
            ([source(0, (-1,))], "token id of the source"),
            ([source(0, (2, 1 << 30))], "token id of the source"),
        ]

    def test_broken_sources_are_refused_before_anything_changes(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3, 4))])
        expected = self.answer(empty, 0, (2, 3))
        for sources, message in self.broken_sources(empty):
            with pytest.raises(EngineError, match=message):
                empty.read(sources)
        self.assert_same(extend_one(empty, 0, 1, (3,)), expected[1:])

    def test_a_closed_engine_reads_nothing(self, empty: Engine) -> None:
        empty.close()
        with pytest.raises(EngineError, match="closed"):
            empty.read([source(0, (2,))])


class SourceContract(SourceTests, EngineContract):
    """The same, and the suite of texts in slots that all have one source."""

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> Engine:
        engine = make_engine()
        tokens = self.make_source(5, seed=1)
        engine.read([source(slot, tokens) for slot in range(engine.limits.max_batch)])
        return engine
