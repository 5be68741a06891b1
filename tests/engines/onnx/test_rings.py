"""Rings: a layer with a window keeps as many columns as it must, and answers as one that keeps the whole text."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from outrider.engines import kv_cache, spans
from outrider.engines.base import Engine, EngineError
from outrider.engines.bundle import manifest
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.manifest import RingsEntry
from outrider.engines.determinism import has_equal_bits
from outrider.engines.onnx import rings as slot_rings
from outrider.engines.opening import open_engine
from outrider.export.graph import rings as ring_graphs

from tests import mutants
from tests.engines.contract import EngineContract, MakeEngine, make_tokens
from tests.engines.handmade import MAX_CONTEXT
from tests.engines.onnx.handmade_rings import (
    LEAST_COLUMNS,
    MAX_EXTEND,
    MAX_OPEN,
    WINDOW,
    write_rings_bundle,
)
from tests.engines.state_contract import StateContract, Texts, settled

NAN_TOKEN = 7
KINDS = ("packed", "padded")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    root = tmp_path_factory.mktemp("rings")
    sizes = {
        "packed": {},
        "padded": {"is_grouped": False},
        "whole": {"columns": 0},
        "poisoned": {"nan_token": NAN_TOKEN},
        # Its first capacity is smaller, the next is not.
        "wide": {"columns": 150},
        # Everything may stay open, as the suite of all engines leaves it.
        "open": {"columns": WINDOW + MAX_EXTEND + MAX_CONTEXT},
    }
    return {
        name: load_bundle(write_rings_bundle(root / name, **given)) for name, given in sizes.items()
    }


@pytest.mark.parametrize("kind", KINDS)
class TestRings(StateContract):
    @pytest.fixture
    def make_engine(self, bundles: dict[str, Bundle], kind: str) -> MakeEngine:
        return lambda: open_engine(bundles[kind], "target")

    def test_bits_are_equal_in_all_shapes(self, engine: Engine) -> None:
        assert has_equal_bits(engine)

    def test_answers_are_those_of_whole_caches(
        self, bundles: dict[str, Bundle], engine: Engine, kind: str
    ) -> None:
        """Over more than four turns of the ring, in chunks of every width; columns differ, and so does rounding."""
        assert engine.packs_rows == (kind == "packed")
        check_against_whole(engine, open_engine(bundles["whole"], "target"), (1, 2, 5, MAX_EXTEND))

    def test_open_tokens_and_padding_overwrite_nothing_that_is_seen(
        self, engine: Engine, alone: Engine
    ) -> None:
        """At every column: all that may be open, beside the widest chunk, then rejected."""
        check_every_column(engine, alone)


def check_against_whole(engine: Engine, whole: Engine, widths: tuple[int, ...]) -> None:
    """Feed a text in chunks of these widths to an engine with rings and to one without."""
    text = make_tokens(engine, 4 * LEAST_COLUMNS + 3, seed=2)
    for width in widths:
        for start in range(0, len(text), width):
            given = [settled(0, start, text[start : start + width])]
            count = len(given[0].tokens)
            found, expected = (one.extend(given)[0, :count] for one in (engine, whole))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def check_every_column(
    engine: Engine, alone: Engine, *, drafts: tuple[int, ...] = (1, 2, 3, 4)
) -> None:
    """Slot 0's text is a token longer each time, and drafts behind it are rejected."""
    text, other = make_tokens(engine, 2 * LEAST_COLUMNS + 1, seed=4), (5,) * MAX_EXTEND
    texts = Texts(engine, 1)
    for start in range(len(text)):
        spans = [settled(0, start, (text[start], *drafts), 1)]
        texts.extend(spans, [1])
        engine.extend([settled(0, start + 1 + len(drafts), ()), settled(1, 0, other)])
        assert engine.first_start(0) == start + 1
    assert StateContract().check(texts, alone) == len(text)


class TestAllOpen(EngineContract):
    @pytest.fixture
    def make_engine(self, bundles: dict[str, Bundle]) -> MakeEngine:
        return lambda: open_engine(bundles["open"], "target")


def test_a_ring_grows_to_its_columns_and_no_further(bundles: dict[str, Bundle]) -> None:
    engine, alone = (open_engine(bundles["wide"], "target") for _ in range(2))
    texts, text = Texts(engine, 2), make_tokens(engine, 290, seed=6)
    for start in range(0, 290, 10):
        spans = [settled(0, start, text[start : start + 9]), settled(1, 0, text[:4])]
        texts.extend(spans, [9, 4])
        texts.extend([settled(0, start + 9, (text[start + 9],))], [1])
        (ring,) = engine._cache.rings
        assert ring.shape[3] == min(engine.capacity, 150)
    assert engine.capacity > 290
    StateContract().check(texts, alone)
    # And shrinks again, while the other text goes on.
    for _ in range(kv_cache.PATIENCE + 1):
        engine.trim([0, 4])
    assert engine.capacity == engine._cache.rings[0].shape[3] == 128
    texts.cut(0, 0)
    texts.extend([settled(0, 0, ()), settled(1, 4, (3, 2, 1))], [0, 3])
    StateContract().check(texts, alone)


def check_nothing_stale_is_seen(engine: Engine, alone: Engine) -> None:
    """Drafts that are not numbers are rejected at every column; copies, trims and new texts follow."""
    text = tuple(token for token in make_tokens(engine, 90, seed=8) if token != NAN_TOKEN)
    texts = Texts(engine, 3)
    for start in range(2 * LEAST_COLUMNS):
        # A token that is not a number spoils its own span, and no other.
        engine.extend(
            [settled(0, start, (NAN_TOKEN,) * MAX_OPEN, 0)] if start else [settled(0, 0, ())]
        )
        texts.cut(0, start)
        if start % 5 == 3:
            texts.copy(0, 1)
            texts.extend([settled(0, start, ()), settled(1, start, text[:3])], [0, 3])
        texts.extend([settled(0, start, text[start : start + 1])], [1])
    for start in range(0, 280, MAX_EXTEND):
        engine.extend([settled(2, start, text[:MAX_EXTEND])])
    capacity, lengths = engine.capacity, [len(one) for one in texts.tokens]
    engine.extend([settled(0, lengths[0], (NAN_TOKEN,) * MAX_OPEN, 0)])
    engine.extend([settled(2, 0, (NAN_TOKEN,) * MAX_EXTEND)])
    for _ in range(kv_cache.PATIENCE):
        engine.trim([*lengths[:2], 0])
    assert engine.capacity < capacity
    texts.extend([settled(0, lengths[0], text[:2]), settled(1, lengths[1], text[:2])], [2, 2])
    texts.extend([settled(2, 0, text[:2])], [2])
    StateContract().check(texts, alone)


def check_copies(engine: Engine, alone: Engine) -> None:
    """A text goes on in a slot that held what is not a number: as a copy, and written with its state."""
    text = tuple(token for token in make_tokens(engine, 60, seed=9) if token != NAN_TOKEN)[:40]
    for length in (2, 12, 17, 31):
        texts = Texts(engine, 3)
        for start in range(0, length, MAX_EXTEND):
            part = text[start : min(length, start + MAX_EXTEND)]
            texts.extend([settled(0, start, part)], [len(part)])
            engine.extend([settled(slot, start, (NAN_TOKEN,) * len(part)) for slot in (1, 2)])
        texts.copy(0, 1)
        engine.write_slot(2, 0, engine.read_slot(0, 0, length))
        engine.write_state(2, engine.read_state(0))
        assert [engine.first_start(slot) for slot in range(3)] == [length] * 3
        for slot in (1, 2):
            texts.tokens[slot], texts.found[slot] = text[:length], list(texts.found[0])
        for start in range(length, length + 8, 2):
            texts.extend(
                [settled(slot, start, text[start : start + 2]) for slot in range(3)], [2] * 3
            )
        StateContract().check(texts, alone)


def test_nothing_stale_is_seen(bundles: dict[str, Bundle]) -> None:
    check_nothing_stale_is_seen(*(open_engine(bundles["poisoned"], "target") for _ in range(2)))


def test_a_text_goes_on_in_another_slot(bundles: dict[str, Bundle]) -> None:
    check_copies(*(open_engine(bundles["poisoned"], "target") for _ in range(2)))


MISTAKES = {
    "a window is one wider": (ring_graphs, '"window": window,', '"window": window + 1,'),
    "a window is one narrower": (ring_graphs, '"window": window,', '"window": window - 1,'),
    "a query does not see its own column": (ring_graphs, '"LessOrEqual"', '"Less"'),
    "what precedes a text is seen": (
        ring_graphs,
        'seen = tape.op("Min", [known["window"], tape.op("Add", [places, known["one"]])])',
        'seen = known["window"]',
    ),
    "a window does not reach around": (
        ring_graphs,
        'first, tape.op("Add", [first, size])',
        'first, tape.op("Add", [last, size])',
    ),
    "a ring is written one column early": (
        ring_graphs,
        'last = tape.op("Mod", [places, size], attributes={"fmod": 1})',
        'last = tape.op("Mod", [tape.op("Add", [places, known["one"]]), size], attributes={"fmod": 1})',
    ),
    "a ring is one column short": (
        manifest,
        "self.columns + 1 - self.window",
        "self.columns + 2 - self.window",
    ),
    "a floor is one low": (
        spans,
        "return span.start + span.num_settled",
        "return span.start + span.num_settled - 1",
    ),
    "a state begins one token early": (slot_rings, "entry.window - 1", "entry.window - 2"),
    "a state is read one column early": (
        slot_rings,
        "[token % num_columns for token in",
        "[(token - 1) % num_columns for token in",
    ),
    "a short text's state is as large as a window's": (
        slot_rings,
        "num_columns = min(length, self._num_before)",
        "num_columns = self._num_before",
    ),
    "what a ring held stays beside a written state": (
        slot_rings,
        "            held[:, slot] = 0.0\n",
        "",
    ),
    "a copy lacks its floor": (
        slot_rings,
        "self.bases[source] if length else 0",
        "0",
    ),
    "a ring is copied in a line": (
        kv_cache,
        "for columns in columns_of(0, length, values.shape[3]):",
        "for columns in (slice(0, length % values.shape[3]),):",
    ),
    "what stands behind a copy is kept": (
        kv_cache,
        "            self._clear(self.rings, destination, length, self._written[source])\n",
        "",
    ),
    "what stands behind a text that is moved is kept": (
        kv_cache,
        "self._clear(self.rings, slot, length, self._written[slot])",
        "pass",
    ),
    "rejected tokens are cleared in a line": (
        kv_cache,
        "for columns in columns_of(start, end, values.shape[3]):",
        "for columns in (slice(start, end),):",
    ),
    "half a ring is cleared": (
        kv_cache,
        "(slice(first, size), slice(0, last))",
        "(slice(first, size), slice(0, 0))",
    ),
}


def is_found_out(root: Path, whole: Bundle) -> bool:
    """Whether the tests above show a mistake in bundles that are made anew."""
    suite, columns = TestRings(), LEAST_COLUMNS
    # A ring that is thought to have more room than it has is made smaller.
    known = RingsEntry(window=WINDOW, columns=columns, layers=())
    columns -= known.max_open(MAX_EXTEND) - MAX_OPEN
    bundle, poisoned = (
        load_bundle(write_rings_bundle(root / f"{token}", columns=columns, nan_token=token))
        for token in (None, NAN_TOKEN)
    )

    def pair(of: Bundle = bundle) -> list[Engine]:
        return [open_engine(of, "target") for _ in range(2)]

    try:
        check_against_whole(pair()[0], open_engine(whole, "target"), (1,))
        check_every_column(*pair())
        check_copies(*pair(poisoned))
        check_nothing_stale_is_seen(*pair(poisoned))
        suite.test_the_first_start_is_what_was_settled(pair()[0])
        suite.test_a_text_written_with_its_state_goes_on_in_another_engine(*pair(), MAX_OPEN)
    except (AssertionError, EngineError):
        return True
    return False


def test_the_mechanism_finds_nothing_where_nothing_is_wrong(
    bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    assert not is_found_out(tmp_path, bundles["whole"])


@pytest.mark.parametrize(("module", "old", "new"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_out(
    bundles: dict[str, Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    old: str,
    new: str,
) -> None:
    mutants.put_in(monkeypatch, module, old, new)
    assert is_found_out(tmp_path, bundles["whole"])
