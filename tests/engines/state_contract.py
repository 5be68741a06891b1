"""What engines of models with recurrent layers keep besides (I5 of ``engines.base``); their ``max_open`` is 4."""

import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError, FloatArray, SlotState, Span

from tests.engines.contract import Comparison, MakeEngine, make_tokens

MAX_OPEN = 4


def settled(slot: int, start: int, tokens: tuple[int, ...], count: int | None = None) -> Span:
    """A span that wants all its logits and settles all its tokens unless told otherwise."""
    return Span(
        slot=slot,
        start=start,
        tokens=tokens,
        num_logits=len(tokens),
        num_settled=len(tokens) if count is None else count,
    )


class Texts:
    """Slots of an engine, what they hold, and the logits that were found of it.

    Args:
        engine: its first slots are used.
        num_slots: of them.
    """

    def __init__(self, engine: Engine, num_slots: int) -> None:
        self.engine = engine
        self.tokens: list[tuple[int, ...]] = [()] * num_slots
        self.found: list[list[FloatArray]] = [[] for _ in range(num_slots)]

    def cut(self, slot: int, length: int) -> None:
        self.tokens[slot] = self.tokens[slot][:length]
        del self.found[slot][length:]

    def extend(self, spans: list[Span], kept: list[int]) -> None:
        """Run spans, of which these many tokens are kept."""
        logits = self.engine.extend(spans)
        for row, (span, count) in enumerate(zip(spans, kept, strict=True)):
            self.cut(span.slot, span.start)
            self.tokens[span.slot] += span.tokens[:count]
            self.found[span.slot] += [logits[row, index].copy() for index in range(count)]

    def copy(self, source: int, destination: int) -> None:
        self.engine.move_slot(source, destination, len(self.tokens[source]))
        self.tokens[destination] = self.tokens[source]
        self.found[destination] = list(self.found[source])


class StateContract(Comparison):
    """Tests of one backend.

    Subclasses give ``make_engine``: fresh engines with 3 slots at least, 9 tokens a span and 32 a slot, V >= 8,
    ``max_open`` 4; and ``atol``.
    """

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> Engine:
        return make_engine()

    @pytest.fixture
    def alone(self, make_engine: MakeEngine) -> Engine:
        """Another one, for texts fed token by token."""
        return make_engine()

    def expected(self, alone: Engine, text: tuple[int, ...]) -> list[FloatArray]:
        return [
            alone.extend([settled(0, at, (token,))])[0, 0].copy() for at, token in enumerate(text)
        ]

    def check(self, texts: Texts, alone: Engine) -> int:
        """Compare what was found with texts fed token by token; return the number of tokens."""
        for text, found in zip(texts.tokens, texts.found, strict=True):
            if text:
                self.assert_same(np.stack(found), np.stack(self.expected(alone, text)))
        return sum(map(len, texts.tokens))

    def test_an_engine_with_states_has_no_trees(self, engine: Engine) -> None:
        limits = engine.limits
        assert (limits.max_open, limits.max_tree_nodes) == (MAX_OPEN, 0)

    @pytest.mark.parametrize("num_open", range(MAX_OPEN + 1))
    def test_a_text_written_with_its_state_goes_on_in_another_engine(
        self, engine: Engine, alone: Engine, num_open: int
    ) -> None:
        """Whatever was open behind it, over a longer text, in one piece and in two."""
        prefix, drafts = make_tokens(engine, 7, seed=1), make_tokens(engine, num_open, seed=2)
        texts, others = Texts(engine, 2), Texts(alone, 3)
        texts.extend([settled(0, 0, prefix[:3])], [3])
        texts.extend([settled(0, 3, prefix[3:] + drafts, 4)], [4])
        state = engine.read_state(0)
        assert (state.length, state.values.nbytes) == (7, engine.state_bytes)
        values = engine.read_slot(0, 0, 7)
        texts.extend(
            [settled(0, 7, (5, 5), 1), settled(1, 0, (9 % engine.limits.vocab_size,) * 9)], [2, 9]
        )
        for slot, cut in ((1, 7), (2, 3)):
            others.extend([settled(slot, 0, make_tokens(engine, 9, seed=3), 5 + slot)], [9])
            alone.write_slot(slot, 0, values[..., :cut, :])
            if cut < 7:
                alone.write_slot(slot, cut, values[..., cut:, :])
            with pytest.raises(EngineError, match="start 7 is before"):
                alone.extend([settled(slot, 7, (1,))])
            alone.write_state(slot, state)
            assert alone.first_start(slot) == 7
            others.tokens[slot], others.found[slot] = texts.tokens[0][:7], texts.found[0][:7]
        spans = [settled(slot, 7, (3, 1, 4)[:count], 1) for slot, count in ((1, 3), (2, 2))]
        others.extend(spans, [2, 1])
        others.extend([settled(1, 9, (2, 2)), settled(2, 8, (7,))], [2, 1])
        self.check(others, engine)

    def test_states_of_other_texts_are_refused(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match="no settled text"):
            engine.read_state(0)
        engine.extend([settled(0, 0, (1, 2), 0), settled(1, 0, (1, 2, 3), 2)])
        with pytest.raises(EngineError, match="no settled text"):
            engine.read_state(0)
        with pytest.raises(EngineError, match="slots are 0"):
            engine.read_state(-1)
        state, values = engine.read_state(1), engine.read_slot(1, 0, 3)
        with pytest.raises(EngineError, match="not 2 tokens that were written"):
            engine.write_state(1, state)
        engine.write_slot(0, 0, values)
        with pytest.raises(EngineError, match="not 2 tokens that were written"):
            engine.write_state(0, state)
        with pytest.raises(EngineError, match="no settled text"):
            engine.read_state(0)
        engine.write_slot(0, 0, values[..., :2, :])
        with pytest.raises(EngineError, match="a state of shape"):
            engine.write_state(0, SlotState(length=2, values=state.values[:0]))
        engine.write_state(0, state)
        with pytest.raises(EngineError, match="not 2 tokens that were written"):
            engine.write_state(0, state)
        engine.extend([settled(0, 0, (5,)), settled(1, 0, ())])

    @pytest.mark.parametrize("seed", range(4))
    def test_texts_of_random_spans_and_rejections_are_those_fed_token_by_token(
        self, engine: Engine, alone: Engine, seed: int
    ) -> None:
        """Chunks, verifications, chains of drafts, idle rows, cuts, restarts and copies, rows side by side."""
        rng, num_slots, checked = np.random.default_rng(seed), 3, 0
        texts = Texts(engine, num_slots)
        for _ in range(40):
            spans, kept = [], []
            for slot in range(num_slots):
                start, floor = len(texts.tokens[slot]), engine.first_start(slot)
                kind = rng.choice(
                    ["verify", "chain", "chunk", "idle", "cut"], p=[0.5, 0.2, 0.1, 0.1, 0.1]
                )
                if start > 20:
                    checked += self.check(texts, alone)
                    texts.cut(slot, 0)
                    start, floor, kind = 0, 0, "chunk"
                if kind == "cut":
                    start = int(rng.integers(floor, start + 1))
                room = MAX_OPEN - (start - floor)
                assert 0 <= room <= MAX_OPEN
                count, num_settled = 1 + int(rng.integers(0, MAX_OPEN + 1)), 1
                if kind == "chunk":
                    count = num_settled = int(rng.integers(1, 10))
                elif kind == "idle" or (kind == "chain" and not room):
                    count = num_settled = 0
                elif kind == "chain":
                    count, num_settled = int(rng.integers(1, room + 1)), 0
                tokens = make_tokens(engine, count, int(rng.integers(1 << 30)))
                spans.append(settled(slot, start, tokens, num_settled))
                kept.append(int(rng.integers(num_settled, count + 1)))
            texts.extend(spans, kept)
            if rng.random() < 0.1:
                source, destination = map(int, rng.integers(0, num_slots, 2))
                texts.copy(source, destination)
        assert checked + self.check(texts, alone) > 100

    @pytest.mark.parametrize("num_kept", range(MAX_OPEN + 1))
    @pytest.mark.parametrize("count", range(1, MAX_OPEN + 2))
    def test_any_place_of_rejection_then_any_span(
        self, engine: Engine, alone: Engine, num_kept: int, count: int
    ) -> None:
        prefix, drafts, rest = (make_tokens(engine, n, seed=n) for n in (6, MAX_OPEN, 16))
        texts = Texts(engine, 1)
        texts.extend([settled(0, 0, prefix)], [6])
        texts.extend([settled(0, 6, (3, *drafts), 1)], [1 + num_kept])
        for step in range(3):
            start = len(texts.tokens[0])
            tokens = rest[step * count : (step + 1) * count]
            texts.extend([settled(0, start, tokens, 1)], [len(tokens)])
        self.check(texts, alone)

    def test_the_first_start_is_what_was_settled(self, engine: Engine) -> None:
        assert engine.first_start(1) == 0
        engine.extend([settled(0, 0, (1, 2, 3, 4)), settled(1, 0, (1, 2, 3, 4), 0)])
        assert [engine.first_start(slot) for slot in range(2)] == [4, 0]
        engine.extend([settled(0, 4, (5, 6, 7), 1), settled(1, 3, (5, 6, 7), 2)])
        assert [engine.first_start(slot) for slot in range(2)] == [5, 5]
        engine.extend([settled(0, 6, ()), settled(1, 0, ())])
        assert [engine.first_start(slot) for slot in range(2)] == [5, 0]

    def test_a_start_before_it_is_refused_and_changes_nothing(
        self, engine: Engine, alone: Engine
    ) -> None:
        texts = Texts(engine, 2)
        texts.extend([settled(0, 0, (1, 2, 3)), settled(1, 0, (4, 5, 6))], [3, 3])
        texts.extend([settled(0, 3, (4, 5, 6), 1), settled(1, 3, (7, 1), 0)], [3, 2])
        for start in (1, 3):
            with pytest.raises(EngineError, match=f"slot 0: start {start} is before its 4 settled"):
                engine.extend([settled(0, start, (1,)), settled(1, 5, (1,))])
        texts.extend([settled(0, 5, (2, 2), 1), settled(1, 4, (3,))], [2, 1])
        self.check(texts, alone)

    @pytest.mark.parametrize(("start", "count", "num_settled"), [(5, 4, 0), (4, 5, 0), (5, 6, 1)])
    def test_more_open_tokens_than_there_may_be_are_refused(
        self, engine: Engine, alone: Engine, start: int, count: int, num_settled: int
    ) -> None:
        texts = Texts(engine, 1)
        texts.extend([settled(0, 0, (1, 2, 3, 4))], [4])
        texts.extend([settled(0, 4, (5,), 0)], [1])
        with pytest.raises(
            EngineError, match=r"slot 0: 5 tokens would be open, limit max_open = 4"
        ):
            engine.extend([settled(0, start, (1,) * count, num_settled)])
        texts.extend([settled(0, start, (1,) * (count - 1), num_settled)], [count - 1])
        self.check(texts, alone)

    @pytest.mark.parametrize("count", [-1, 3])
    def test_what_is_settled_lies_in_the_span(self, engine: Engine, count: int) -> None:
        with pytest.raises(EngineError, match=r"num_settled -?\d must be 0..2"):
            engine.extend([settled(0, 0, (1, 2), count)])

    def test_a_copy_is_cut_where_its_source_may_be(self, engine: Engine, alone: Engine) -> None:
        texts = Texts(engine, 2)
        texts.extend([settled(0, 0, (1, 2, 3, 4)), settled(1, 0, (5,) * 9)], [4, 9])
        texts.extend([settled(0, 4, (5, 6, 7), 1), settled(1, 9, ())], [3, 0])
        with pytest.raises(EngineError, match="slot 0 has 5 settled ones"):
            engine.move_slot(0, 1, 4)
        engine.move_slot(0, 1, 6)
        texts.tokens[1], texts.found[1] = texts.tokens[0][:6], texts.found[0][:6]
        texts.extend([settled(0, 7, (1,)), settled(1, 5, (2, 3), 1)], [1, 2])
        self.check(texts, alone)
        engine.move_slot(0, 1, 0)
        assert engine.first_start(1) == 0
        with pytest.raises(EngineError, match="beyond its 0 valid"):
            engine.extend([settled(1, 1, (1,))])

    def test_trimming_below_what_is_settled_forgets_the_slot(
        self, engine: Engine, alone: Engine
    ) -> None:
        texts = Texts(engine, 3)
        spans = [settled(slot, 0, (1, 2, 3, 4, 5, slot), 3) for slot in range(3)]
        texts.extend(spans, [6, 6, 6])
        engine.trim([2, 4])
        for slot, length in enumerate((0, 4, 0)):
            texts.cut(slot, length)
            with pytest.raises(EngineError, match=f"beyond its {length} valid"):
                engine.extend([settled(slot, length + 1, (1,))])
        assert [engine.first_start(slot) for slot in range(3)] == [0, 3, 0]
        texts.extend(
            [settled(slot, len(texts.tokens[slot]), (7, 7)) for slot in range(3)], [2, 2, 2]
        )
        self.check(texts, alone)
