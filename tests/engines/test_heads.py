"""A head as an engine: the pairs that its graph is fed, and where their features come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines import heads
from outrider.engines.base import EngineError, EngineLimits, FloatArray, Span
from outrider.engines.heads import HeadEngine
from outrider.engines.reference.scripted import ScriptedEngine

from tests.mutants import assert_caught

SIZE = 2
LIMITS = EngineLimits(max_batch=3, max_context=32, max_extend=8, vocab_size=10, reads_features=SIZE)


class Target:
    """Features of token t of a slot are (t, slot), as far as it has computed."""

    num_computed = 32

    def features(self, slot: int, start: int, end: int) -> FloatArray:
        rows = [(t, slot) if t < self.num_computed else (0, 0) for t in range(start, end)]
        return np.array(rows, np.float32).reshape(-1, SIZE)


class Graph(ScriptedEngine):
    """A head's graph that keeps the spans it was given; what it recycles is (100 + place, slot)."""

    def __init__(self) -> None:
        super().__init__(lambda prefix: np.arange(10, dtype=np.float32) * prefix[-1], LIMITS)
        self.fed: list[list[tuple[int, tuple[int, ...], list[list[float]]]]] = []

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.fed.append(
            [(one.start, one.tokens, one.features.tolist()) for one in spans]  # type: ignore[union-attr]
        )
        return super().extend(spans)

    def recycled(self, slot: int) -> FloatArray:
        return np.array([100 + len(self.tokens_of(slot)), slot], np.float32)


def opened() -> tuple[HeadEngine, Graph]:
    graph = Graph()
    return HeadEngine(graph, Target()), graph


def span(start: int, *tokens: int, slot: int = 0, wanted: int = 1, settled: int = 0) -> Span:
    return Span(slot=slot, start=start, tokens=tokens, num_logits=wanted, num_settled=settled)


def test_a_token_is_read_with_the_feature_of_the_token_before() -> None:
    engine, graph = opened()
    engine.extend([span(0, 7, 8, 9, wanted=0, settled=3)])
    engine.extend([span(3, 1, 2, settled=2)])
    assert graph.fed == [
        [(0, (8, 9), [[0, 0], [1, 0]])],
        [(2, (1, 2), [[2, 0], [3, 0]])],
    ]


def test_drafted_tokens_are_read_with_what_the_head_answered_before() -> None:
    engine, graph = opened()
    logits = engine.extend([span(0, 7, 8, settled=2)])
    assert logits[0, 0].argmax() == 9
    engine.extend([span(2, 9)])
    engine.extend([span(3, 4)])
    # Fed again once they are settled: the target has computed them by then.
    engine.extend([span(2, 9, 4, 5, settled=3)])
    assert graph.fed[1:] == [
        [(1, (9,), [[101, 0]])],
        [(2, (4,), [[102, 0]])],
        [(1, (9, 4, 5), [[1, 0], [2, 0], [3, 0]])],
    ]


def test_rows_read_their_own_features_and_idle_rows_none() -> None:
    engine, graph = opened()
    engine.extend(
        [span(0, 1, 2, settled=2), span(0, wanted=0, slot=1), span(0, 3, 4, 5, slot=2, settled=3)]
    )
    assert graph.fed == [
        [(0, (2,), [[0, 0]]), (0, (), []), (0, (4, 5), [[0, 2], [1, 2]])],
    ]


def test_a_text_of_one_token_is_drafted_behind_and_read_anew_when_it_has_grown() -> None:
    engine, graph = opened()
    engine.extend([span(0, 7, settled=1)])
    engine.extend([span(1, 8, settled=1)])
    assert graph.fed == [[(0, (7,), [[0, 0]])], [(0, (8,), [[0, 0]])]]
    assert graph.tokens_of(0) == (8,)
    with pytest.raises(EngineError, match="num_logits 2"):
        engine.extend([span(0, 7, 8, wanted=2, settled=2)])


def test_slots_are_moved_and_trimmed_by_the_texts_lengths_and_not_copied_out() -> None:
    engine, graph = opened()
    engine.extend([span(0, 1, 2, 3, 4, wanted=0, settled=4)])
    engine.move_slot(0, 1, 3)
    assert graph.tokens_of(1) == (2, 3)
    engine.move_slot(0, 2, 0)
    assert graph.tokens_of(2) == ()
    engine.trim([2, None, 0])
    assert [graph.tokens_of(slot) for slot in range(3)] == [(2,), (), ()]
    assert engine.token_bytes == 0
    for refused in (
        lambda: engine.read_slot(0, 0, 1),
        lambda: engine.write_slot(0, 0, np.zeros((1, 1), np.float32)),
        lambda: engine.read([]),
        lambda: engine.share_source(0, [1]),
    ):
        with pytest.raises(EngineError, match=r"of a head|no encoder"):
            refused()


MUTANTS = {
    "the token's own feature": (
        "features(span.slot, first - 1, first - 1 + settled)",
        "features(span.slot, first, first + settled)",
        test_a_token_is_read_with_the_feature_of_the_token_before,
    ),
    "the first token is read beside nothing": (
        "first = max(span.start, int(len(span.tokens) > 1))",
        "first = span.start",
        test_a_token_is_read_with_the_feature_of_the_token_before,
    ),
    "of another slot": (
        "self.target.features(span.slot, first",
        "self.target.features(0, first",
        test_rows_read_their_own_features_and_idle_rows_none,
    ),
    "recycled features stay": (
        "span.start + span.num_settled - first",
        "span.start + span.num_settled - first - (span.start > 0)",
        test_drafted_tokens_are_read_with_what_the_head_answered_before,
    ),
    "the target's feature for a drafted token": (
        "        elif first and tokens:\n            features[0] = self.engine.recycled(span.slot)",
        "        elif first and tokens:\n            features[0] = self.target.features(span.slot, first - 1, first)",
        test_drafted_tokens_are_read_with_what_the_head_answered_before,
    ),
    "moved by the text's whole length": (
        "self.engine.move_slot(source, destination, max(length - 1, 0))",
        "self.engine.move_slot(source, destination, length)",
        test_slots_are_moved_and_trimmed_by_the_texts_lengths_and_not_copied_out,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, heads, old, new, killer, (AssertionError, EngineError))
