import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.determinism import has_equal_bits
from outrider.engines.onnx import state_loops, states
from outrider.engines.opening import open_engine

from tests import mutants
from tests.engines.contract import EngineContract, MakeEngine
from tests.engines.handmade import MAX_CONTEXT
from tests.engines.handmade_states import states_entry, write_states_bundle
from tests.engines.state_contract import MAX_OPEN, StateContract, Texts, settled

ENTRIES = {
    "scan": states_entry(MAX_OPEN),
    "convolution": states_entry(MAX_OPEN, 3, has_scan=False),
}
# Everything may stay open, as the suite of all engines leaves it.
ALL_OPEN = states_entry(MAX_CONTEXT)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    root = tmp_path_factory.mktemp("states")
    return {
        name: load_bundle(write_states_bundle(root / name, entry))
        for name, entry in (ENTRIES | {"open": ALL_OPEN}).items()
    }


@pytest.mark.parametrize("kind", ENTRIES)
class TestStates(StateContract):
    @pytest.fixture
    def make_engine(self, bundles: dict[str, Bundle], kind: str) -> MakeEngine:
        return lambda: open_engine(bundles[kind], "target")

    def test_bits_are_equal_in_all_shapes(self, engine: Engine) -> None:
        assert has_equal_bits(engine)

    def test_what_an_earlier_text_left_is_never_seen(self, engine: Engine, alone: Engine) -> None:
        """Windows, pending rows and states of free slots hold NaN."""
        kept = engine._states
        for array in (
            kept._states,
            kept._pending,
            kept._windows,
            kept._new_pending,
            kept._new_windows,
        ):
            array[...] = np.nan
        kept._is_used = [True] * engine.limits.max_batch
        texts = Texts(engine, 3)
        texts.extend(
            [settled(0, 0, (1,), 0), settled(1, 0, (1, 2), 1), settled(2, 0, (1, 2, 3))], [1, 2, 3]
        )
        for step in range(4):
            spans = [
                settled(slot, len(texts.tokens[slot]), (step, 2, 3)[: slot + 1], 1)
                for slot in range(3)
            ]
            texts.extend(spans, [1, 2, 2])
        self.check(texts, alone)

    def test_a_call_that_fails_leaves_slots_that_begin_anew(
        self, engine: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = Texts(engine, 3)
        texts.extend([settled(slot, 0, (1, 2, slot)) for slot in range(3)], [3, 3, 3])

        def fail(*_: object) -> None:
            raise RuntimeError("half way")

        with monkeypatch.context() as patch:
            patch.setattr(engine._states, "commit", fail)
            with pytest.raises(EngineError, match="half way"):
                engine.extend([settled(slot, 3, (4, 5), 1) for slot in range(2)])
        for slot in range(2):
            assert engine.first_start(slot) == 0
            with pytest.raises(EngineError, match="beyond its 0 valid"):
                engine.extend([settled(slot, 3, (4,))])
            texts.cut(slot, 0)
        texts.extend(
            [settled(0, 0, (6, 1), 0), settled(1, 0, (2,)), settled(2, 3, (4,))], [2, 1, 1]
        )
        self.check(texts, alone)


class TestAllOpen(EngineContract):
    @pytest.fixture
    def make_engine(self, bundles: dict[str, Bundle]) -> MakeEngine:
        return lambda: open_engine(bundles["open"], "target")


MISTAKES_OF_PLACES = {
    "pending rows are one short": ("for index in range(left):", "for index in range(left - 1):"),
    "a window is one off": (
        "column = window - aligned + token",
        "column = window - aligned + token - 1",
    ),
    "a window is taken to end at the start": ("window - aligned + token", "window - start + token"),
    "pending rows are lost where nothing is settled": (
        "left = row * max_open, 0 if moved else num_pending",
        "left = row * max_open, 0",
    ),
    "open tokens are scanned without those before them": (
        "before = row * num_open, 0 if moved or not count else num_pending",
        "before = row * num_open, 0",
    ),
    "accepted drafts are not replayed": (
        "settled[at + index] = kept + index",
        "settled[at + index] = 0",
    ),
    "an answer is read one column early": (
        "place = num_pending + index if index < moved",
        "place = num_pending + index - 1 if index < moved",
    ),
    "windows of a row without tokens are cleared": (
        "        for column in range(window):\n",
        "        for column in range(window if count else 0):\n",
    ),
}
MISTAKES_OF_STATES = {
    "a state is not cleared": (
        "            if not span.start and self._is_used[slot]:\n                self._states[:, slot] = 0.0\n",
        "",
    ),
    "the base does not move": (
        "base = span.start + settled if settled else",
        "base = self._cells[5 * row + 3] if settled else",
    ),
    "a copy lacks the states": (
        "for kept in (self._states, self._pending, self._windows):",
        "for kept in (self._pending, self._windows):",
    ),
    "a copy lacks the pending rows": (
        "for kept in (self._states, self._pending, self._windows):",
        "for kept in (self._states, self._windows):",
    ),
    "a copy's window is taken to be aligned": (
        "self._aligned[destination] = self._aligned[source]",
        "self._aligned[destination] = length",
    ),
    "a state is read with the window of its end": (
        "self._entry.window - self._aligned[slot] + self.bases[slot] - self._num_before",
        "self._entry.window - self._num_before",
    ),
    "a state is written beside the window": (
        "window = self._windows[:, slot, self._entry.max_open :]",
        "window = self._windows[:, slot, : self._num_before]",
    ),
    "windows are not kept": (
        "        self._windows[:, first:end] = self._new_windows[:, :num_rows]\n",
        "",
    ),
}


def is_found_out(bundle: Bundle) -> bool:
    """Whether texts of random spans show it, those that are copied shorter than they are among them."""
    suite = StateContract()
    try:
        for seed in range(4):
            engine, alone = (open_engine(bundle, "target") for _ in range(2))
            suite.test_texts_of_random_spans_and_rejections_are_those_fed_token_by_token(
                engine, alone, seed
            )
            engine, alone = (open_engine(bundle, "target") for _ in range(2))
            suite.test_a_copy_is_cut_where_its_source_may_be(engine, alone)
            engine, alone = (open_engine(bundle, "target") for _ in range(2))
            suite.test_a_text_written_with_its_state_goes_on_in_another_engine(engine, alone, seed)
    except (AssertionError, EngineError):
        return True
    return False


def test_the_mechanism_finds_nothing_where_nothing_is_wrong(bundles: dict[str, Bundle]) -> None:
    assert not is_found_out(bundles["scan"])


@pytest.mark.parametrize(("old", "new"), MISTAKES_OF_PLACES.values(), ids=MISTAKES_OF_PLACES)
def test_a_wrong_place_is_found_out(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    mutants.put_in_loops(monkeypatch, state_loops, old, new)
    monkeypatch.setattr(states, "lay_out_states", state_loops.lay_out_states)
    assert is_found_out(bundles["scan"])


@pytest.mark.parametrize(("old", "new"), MISTAKES_OF_STATES.values(), ids=MISTAKES_OF_STATES)
def test_a_mistake_in_what_slots_keep_is_found_out(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    mutants.put_in(monkeypatch, states, old, new)
    assert is_found_out(bundles["scan"])
