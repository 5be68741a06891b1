"""The suite every engine passes; ``test_contract.py`` runs it for each backend."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError, FloatArray, Span

MakeEngine = Callable[[], Engine]


def make_tokens(engine: Engine, count: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(0, engine.limits.vocab_size, count))


def span(slot: int, start: int, tokens: Sequence[int] = (), num_logits: int | None = None) -> Span:
    """A span that wants all its logits unless told otherwise."""
    wanted = len(tokens) if num_logits is None else num_logits
    return Span(slot=slot, start=start, tokens=tuple(tokens), num_logits=wanted)


def wanted_logits(engine: Engine, spans: Sequence[Span]) -> list[FloatArray]:
    """Per span its wanted rows [num_logits, V], copied, padding cut off."""
    logits = engine.extend(spans)
    assert logits.dtype == np.float32
    assert logits.shape[0] == len(spans)
    assert logits.shape[1] >= max(one.num_logits for one in spans)
    assert logits.shape[2] == engine.limits.vocab_size
    return [logits[row, : one.num_logits].copy() for row, one in enumerate(spans)]


def extend_one(engine: Engine, slot: int, start: int, tokens: Sequence[int]) -> FloatArray:
    return wanted_logits(engine, [span(slot, start, tokens)])[0]


def check_copies(engine: Engine, tokens: tuple[int, ...]) -> None:
    """Wherever a text is split: its beginning copied from another slot, its rest has the bits of the whole."""
    size = min(engine.limits.max_extend, 5)

    def fed(slot: int, start: int) -> FloatArray:
        parts = [
            extend_one(engine, slot, at, tokens[at : at + size])
            for at in range(start, len(tokens), size)
        ]
        return np.concatenate(parts)

    expected = fed(1, 0)
    values = engine.read_slot(1, 0, len(tokens))
    for length in range(len(tokens)):
        engine.write_slot(0, 0, values[..., :length, :])
        np.testing.assert_array_equal(fed(0, length), expected[length:])


class Comparison:
    """How logits are compared: ``atol`` is 0 where bits must agree."""

    atol = 0.0

    def assert_same(self, found: FloatArray, expected: FloatArray) -> None:
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=self.atol)


class EngineContract(Comparison):
    """Tests of one backend.

    Subclasses give ``make_engine``: fresh engines with at least 3 slots, 9 tokens a span and 32 a
    slot, V >= 8; and ``atol``.
    """

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> Engine:
        return make_engine()

    def test_pieces_equal_one_extend(self, engine: Engine) -> None:
        tokens = make_tokens(engine, 9, seed=0)
        whole = extend_one(engine, 0, 0, tokens)
        for cuts in ((0, 1, 9), (0, 4, 5, 6, 9), (0, 8, 9)):
            pieces = [
                extend_one(engine, 1, begin, tokens[begin:end])
                for begin, end in itertools.pairwise(cuts)
            ]
            self.assert_same(np.concatenate(pieces), whole)

    def test_different_prefixes_give_different_logits(self, engine: Engine) -> None:
        first = extend_one(engine, 0, 0, (1, 2, 3))
        second = extend_one(engine, 0, 0, (2, 2, 3))
        assert np.abs(first - second).max(axis=1).min() > 1e-4

    def test_wanted_logits_are_the_last_ones(self, engine: Engine) -> None:
        tokens = make_tokens(engine, 7, seed=1)
        whole = extend_one(engine, 0, 0, tokens)
        for num_logits in (1, 2, 6):
            found = wanted_logits(engine, [span(0, 0, tokens, num_logits)])[0]
            self.assert_same(found, whole[-num_logits:])

    def test_a_truncated_slot_goes_on_as_if_never_longer(self, engine: Engine) -> None:
        kept, rejected = make_tokens(engine, 5, seed=2), make_tokens(engine, 9, seed=3)
        tail = make_tokens(engine, 3, seed=4)
        expected = extend_one(engine, 1, 0, kept + tail)[-3:]
        extend_one(engine, 0, 0, kept)
        extend_one(engine, 0, 5, rejected)
        self.assert_same(extend_one(engine, 0, 5, tail), expected)

    def test_an_empty_span_truncates_too(self, engine: Engine) -> None:
        extend_one(engine, 0, 0, make_tokens(engine, 6, seed=5))
        wanted_logits(engine, [span(0, 2)])
        with pytest.raises(EngineError, match="beyond its 2 valid tokens"):
            engine.extend([span(0, 3, (1,))])

    def test_rows_of_a_ragged_batch_equal_rows_alone(self, engine: Engine) -> None:
        prefixes = [make_tokens(engine, 2 + 3 * row, seed=6 + row) for row in range(3)]
        tails = [make_tokens(engine, count, seed=9 + count) for count in (5, 1, 3)]
        alone = []
        for prefix, tail in zip(prefixes, tails, strict=True):
            extend_one(engine, 2, 0, prefix)
            alone.append(extend_one(engine, 2, len(prefix), tail))
        wanted_logits(engine, [span(row, 0, tokens, 0) for row, tokens in enumerate(prefixes)])
        together = wanted_logits(
            engine,
            [span(row, len(prefixes[row]), tokens) for row, tokens in enumerate(tails)],
        )
        for found, expected in zip(together, alone, strict=True):
            self.assert_same(found, expected)

    @pytest.mark.parametrize("num_rows", [2, 3])
    def test_single_tokens_of_a_batch_equal_wider_spans(
        self, engine: Engine, num_rows: int
    ) -> None:
        """Plain decoding of several rows, one of them from its first token on, against one chain each."""
        starts = (4, 0, 7)[:num_rows]
        texts = [make_tokens(engine, 12, seed=46 + row) for row in range(num_rows)]
        expected = [self.from_scratch(engine, text) for text in texts]
        prefixes = [span(row, 0, texts[row][: starts[row]], 0) for row in range(num_rows)]
        engine.extend(prefixes)
        for step in range(5):
            places = [start + step for start in starts]
            spans = [span(row, at, texts[row][at : at + 1]) for row, at in enumerate(places)]
            for row, found in enumerate(wanted_logits(engine, spans)):
                self.assert_same(found, expected[row][places[row] : places[row] + 1])

    def test_any_contiguous_range_of_slots_may_extend(self, engine: Engine) -> None:
        tokens = make_tokens(engine, 4, seed=20)
        expected = extend_one(engine, 0, 0, tokens)
        found = wanted_logits(engine, [span(1, 0, tokens), span(2, 0, tokens[:2])])
        self.assert_same(found[0], expected)
        self.assert_same(found[1], expected[:2])

    def test_an_empty_span_leaves_every_row_as_it_was(self, engine: Engine) -> None:
        prefix, tail = make_tokens(engine, 6, seed=21), make_tokens(engine, 2, seed=22)
        expected = extend_one(engine, 2, 0, prefix + tail)[-2:]
        wanted_logits(engine, [span(0, 0, prefix, 0), span(1, 0, prefix, 0)])
        wanted_logits(engine, [span(0, 6), span(1, 6, make_tokens(engine, 9, seed=23), 1)])
        wanted_logits(engine, [span(0, 6), span(1, 6)])
        for slot in (0, 1):
            self.assert_same(extend_one(engine, slot, 6, tail), expected)

    def test_a_moved_slot_goes_on_like_its_source(self, engine: Engine) -> None:
        prefix, tail = make_tokens(engine, 7, seed=24), make_tokens(engine, 2, seed=25)
        extend_one(engine, 2, 0, prefix)
        extend_one(engine, 0, 0, make_tokens(engine, 9, seed=26))
        engine.move_slot(2, 0, 5)
        moved = extend_one(engine, 0, 5, tail)
        self.assert_same(moved, extend_one(engine, 2, 5, tail))
        engine.move_slot(0, 0, 5)
        self.assert_same(extend_one(engine, 0, 5, tail), moved)

    def test_slots_forked_from_one_go_on_apart(self, engine: Engine) -> None:
        """What beams do: children of one parent copy its text, each over another text, and go on together."""
        prefix = make_tokens(engine, 8, seed=32)
        tails = [make_tokens(engine, count, seed=33 + count) for count in (3, 2, 4)]
        lengths = (8, 8, 5)
        texts = [prefix[:length] + tail for length, tail in zip(lengths, tails, strict=True)]
        expected = [self.from_scratch(engine, text) for text in texts]
        extend_one(engine, 0, 0, prefix)
        extend_one(engine, 1, 0, make_tokens(engine, 9, seed=38))
        extend_one(engine, 2, 0, make_tokens(engine, 3, seed=39))
        for destination in (1, 2):
            engine.move_slot(0, destination, lengths[destination])
        found = wanted_logits(
            engine, [span(slot, lengths[slot], tail) for slot, tail in enumerate(tails)]
        )
        for slot, length in enumerate(lengths):
            self.assert_same(found[slot], expected[slot][length:])

    def test_forks_of_random_texts_equal_extends_from_scratch(self, engine: Engine) -> None:
        """Generations of beams in slots 0 and 1: each child takes the prefix of either parent."""
        rng = np.random.default_rng(43)
        held = [make_tokens(engine, 5, seed=44), make_tokens(engine, 7, seed=45)]
        for slot in (0, 1):
            extend_one(engine, slot, 0, held[slot])
        for _ in range(8):
            parent = int(rng.integers(0, 2))
            length = int(rng.integers(len(held[parent]) - 2, len(held[parent]) + 1))
            engine.move_slot(parent, 1 - parent, length)
            held[1 - parent] = held[parent][:length]
            tails = [
                make_tokens(engine, int(rng.integers(1, 3)), int(rng.integers(1e9))) for _ in held
            ]
            spans = [span(slot, len(held[slot]), tails[slot]) for slot in (0, 1)]
            found = wanted_logits(engine, spans)
            held = [text + tail for text, tail in zip(held, tails, strict=True)]
            for slot in (0, 1):
                count = len(tails[slot])
                self.assert_same(found[slot], self.from_scratch(engine, held[slot])[-count:])

    @pytest.fixture
    def copying(self, engine: Engine) -> Engine:
        """The engine, where its slots are read and written; an engine that says they are not refuses both."""
        if engine.state_bytes:
            pytest.skip("its texts go on with their states: StateContract")
        if engine.token_bytes:
            return engine
        with pytest.raises(EngineError, match="are not read"):
            engine.read_slot(0, 0, 1)
        with pytest.raises(EngineError, match="are not written"):
            engine.write_slot(0, 0, np.zeros((1, 1), np.float32))
        pytest.skip("its slots are neither read nor written")

    def test_a_slot_written_with_what_was_read_goes_on_like_its_source(
        self, copying: Engine
    ) -> None:
        """For every split point, over a longer text, in one piece and in two, and whatever was extended since."""
        tokens, tail = make_tokens(copying, 9, seed=47), make_tokens(copying, 2, seed=48)
        whole = self.from_scratch(copying, tokens + tail)
        extend_one(copying, 2, 0, tokens)
        values = copying.read_slot(2, 0, 9)
        pieces = [copying.read_slot(2, 0, 4), copying.read_slot(2, 4, 9)]
        assert values.dtype == np.float32
        assert values.shape[-2] == 9
        assert values.nbytes == 9 * copying.token_bytes
        np.testing.assert_array_equal(np.concatenate(pieces, axis=-2), values)
        for length in range(10):
            extend_one(copying, 0, 0, make_tokens(copying, 9, seed=49 + length))
            copying.write_slot(0, 0, values[..., :length, :])
            if length < 9:
                with pytest.raises(EngineError, match=f"beyond its {length} valid"):
                    copying.extend([span(0, length + 1, (1,))])
            found = extend_one(copying, 0, length, (tokens + tail)[length:][:9])
            self.assert_same(found, whole[length:][:9])
        copying.write_slot(1, 0, pieces[0])
        copying.write_slot(1, 4, pieces[1][..., :3, :])
        self.assert_same(extend_one(copying, 1, 7, tokens[7:]), whole[7:9])

    def test_what_was_read_is_a_copy(self, copying: Engine) -> None:
        tokens = make_tokens(copying, 5, seed=60)
        expected = extend_one(copying, 0, 0, tokens)
        values = copying.read_slot(0, 0, 4)
        extend_one(copying, 0, 0, make_tokens(copying, 9, seed=61))
        copying.write_slot(1, 0, values)
        extend_one(copying, 1, 0, make_tokens(copying, 9, seed=62))
        copying.write_slot(0, 0, values)
        self.assert_same(extend_one(copying, 0, 4, tokens[4:]), expected[4:])

    def test_impossible_copies_are_refused_before_anything_changes(self, copying: Engine) -> None:
        tokens = make_tokens(copying, 4, seed=63)
        expected = extend_one(copying, 1, 0, tokens)[3:]
        extend_one(copying, 0, 0, tokens[:3])
        values = copying.read_slot(0, 0, 3)
        context = copying.limits.max_context
        for arguments, message in (
            ((99, 0, 1), "slots are"),
            ((0, 0, 4), "slot 0 holds 3"),
            ((0, 2, 1), "slot 0 holds 3"),
        ):
            with pytest.raises(EngineError, match=message):
                copying.read_slot(*arguments)
        too_many = np.concatenate([values] * (context // 3 + 1), axis=-2)
        for slot, start, written, message in (
            (-1, 0, values, "slots are"),
            (0, 4, values, "beyond its 3 valid tokens"),
            (0, 0, too_many, "limit max_context"),
            (0, 0, values[0], "a token's is"),
            (0, 0, values[..., :0], "a token's is"),
        ):
            with pytest.raises(EngineError, match=message):
                copying.write_slot(slot, start, written)
        self.assert_same(extend_one(copying, 0, 3, tokens[3:]), expected)

    def test_trimming_keeps_what_is_kept_and_forgets_the_rest(self, engine: Engine) -> None:
        prefixes = [make_tokens(engine, 5, seed=40), make_tokens(engine, 7, seed=41)]
        tail = make_tokens(engine, 3, seed=42)
        expected = [extend_one(engine, 2, 0, prefix[:5] + tail)[-3:] for prefix in prefixes]
        for slot, prefix in enumerate(prefixes):
            extend_one(engine, slot, 0, prefix)
        engine.trim([9, 5])
        with pytest.raises(EngineError, match="beyond its 5 valid tokens"):
            engine.extend([span(1, 6, (1,))])
        with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
            engine.extend([span(2, 1, (1,))])
        for slot in (0, 1):
            self.assert_same(extend_one(engine, slot, 5, tail), expected[slot])
        engine.trim([])
        with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
            engine.extend([span(0, 1, (1,))])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [((0, 99, 0), "slots are"), ((-1, 0, 0), "slots are"), ((0, 1, 4), "slot 0 holds 3")],
    )
    def test_an_impossible_move_is_refused(
        self, engine: Engine, arguments: tuple[int, int, int], message: str
    ) -> None:
        extend_one(engine, 0, 0, (1, 2, 3))
        with pytest.raises(EngineError, match=message):
            engine.move_slot(*arguments)

    def test_a_slot_fills_to_its_last_token_beside_others(self, engine: Engine) -> None:
        limits = engine.limits
        tokens = make_tokens(engine, limits.max_context, seed=27)
        for begin in range(0, limits.max_context - 1, limits.max_extend):
            end = min(begin + limits.max_extend, limits.max_context - 1)
            extend_one(engine, 0, begin, tokens[begin:end])
        beside = tokens[: limits.max_extend]
        found = wanted_logits(
            engine, [span(0, limits.max_context - 1, tokens[-1:]), span(1, 0, beside)]
        )
        self.assert_same(found[1], extend_one(engine, 2, 0, beside))
        if limits.max_context % limits.max_extend:
            begin = limits.max_context - limits.max_context % limits.max_extend
            self.assert_same(found[0][-1], extend_one(engine, 0, begin, tokens[begin:])[-1])

    def test_a_random_trace_equals_extends_from_scratch(self, engine: Engine) -> None:
        rng = np.random.default_rng(28)
        held: list[tuple[int, ...]] = [(), ()]
        for _ in range(12):
            spans = []
            for slot in (0, 1):
                start = int(rng.integers(max(0, len(held[slot]) - 4), len(held[slot]) + 1))
                room = min(9, 32 - start)
                tokens = make_tokens(engine, int(rng.integers(0, room + 1)), int(rng.integers(1e9)))
                spans.append(span(slot, start, tokens, min(len(tokens), 2)))
                held[slot] = held[slot][:start] + tokens
            found = wanted_logits(engine, spans)
            for slot in (0, 1):
                count = spans[slot].num_logits
                self.assert_same(
                    found[slot], self.from_scratch(engine, held[slot])[len(held[slot]) - count :]
                )

    def from_scratch(self, engine: Engine, tokens: tuple[int, ...]) -> FloatArray:
        """Logits [n, V] after every token, computed in slot 2."""
        size = engine.limits.max_extend
        parts = [
            extend_one(engine, 2, begin, tokens[begin : begin + size])
            for begin in range(0, len(tokens), size)
        ]
        return np.concatenate([np.zeros((0, engine.limits.vocab_size), np.float32), *parts])

    def broken_spans(self, engine: Engine) -> list[tuple[list[Span], str]]:
        """Extends that break one rule each, for an engine whose slot 0 holds 3 tokens."""
        limits = engine.limits
        too_many = make_tokens(engine, limits.max_extend + 1, seed=29)
        return [
            ([], "at least one span"),
            ([span(limits.max_batch, 0, (1,))], "outside 0"),
            ([span(-1, 0, (1,))], "outside 0"),
            ([span(0, 3, (1,)), span(2, 0, (1,))], "must be consecutive"),
            ([span(0, 3, (1,)), span(0, 3, (1,))], "must be consecutive"),
            ([span(0, -1, (1,))], "start -1 must be >= 0"),
            ([span(0, 4, (1,))], "beyond its 3 valid tokens"),
            ([span(0, 0, too_many)], "limit max_extend"),
            ([span(0, 0, (1, 2), 3)], "num_logits 3 must be 0..2"),
            ([span(0, 0, (1, 2), -1)], "num_logits -1 must be"),
            ([span(0, 0, (limits.vocab_size,))], "token id"),
            ([span(0, 0, (-1,))], "token id"),
        ]

    def test_broken_spans_are_refused_before_anything_changes(self, engine: Engine) -> None:
        prefix = make_tokens(engine, 3, seed=30)
        expected = extend_one(engine, 1, 0, (*prefix, 1))[-1:]
        extend_one(engine, 0, 0, prefix)
        for spans, message in self.broken_spans(engine):
            with pytest.raises(EngineError, match=message):
                engine.extend(spans)
        self.assert_same(extend_one(engine, 0, 3, (1,)), expected)

    def test_a_full_slot_is_refused(self, engine: Engine) -> None:
        limits = engine.limits
        for begin in range(0, limits.max_context, limits.max_extend):
            count = min(limits.max_extend, limits.max_context - begin)
            engine.extend([span(0, begin, make_tokens(engine, count, seed=31), 0)])
        with pytest.raises(EngineError, match="limit max_context"):
            engine.extend([span(0, limits.max_context, (1,))])

    def test_a_closed_engine_refuses(self, engine: Engine) -> None:
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            engine.extend([span(0, 0, (1,))])
