"""The tests of sources on devices can fail: each known mistake is caught by a named test."""

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.engines.accelerators.device import engine, kv_cache, sources
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.export.accelerators import device_graphs

from tests.engines.accelerators.onnx import test_device_sources as device_tests
from tests.engines.accelerators.onnx.test_device_sources import (
    NAN_TOKEN,
    on_device,
    with_device_graphs,
)
from tests.engines.handmade_sources import write_source_bundle
from tests.engines.source_contract import SourceContract
from tests.mutants import assert_caught


class _Contract(SourceContract):
    atol = 1e-4


CONTRACT = _Contract()
Make = Callable[[], PlanEngine]
KILLERS: dict[str, Callable[[Make], object]] = {
    "together": lambda make: CONTRACT.test_sources_read_together_answer_as_alone(make(), make),
    "again": lambda make: CONTRACT.test_reading_again_empties_the_text_and_forgets_a_longer_source(
        make(), make
    ),
    "moved": lambda make: CONTRACT.test_a_moved_slot_takes_its_source_along(make(), make, 0),
    "shared": lambda make: CONTRACT.test_a_shared_source_is_read_by_all_and_texts_begin_anew(
        make(), make
    ),
    "freed": lambda make: CONTRACT.test_free_slots_lose_their_sources_and_others_keep_theirs(
        make(), make
    ),
    "needed": lambda make: CONTRACT.test_tokens_need_a_source_and_empty_spans_do_not(make()),
}
MUTANTS = {
    "source length of the neighbour row": (
        sources,
        "[self.lengths[span.slot] for span in spans]",
        "[self.lengths[span.slot - 1] for span in spans]",
        "together",
    ),
    "every source as long as the longest": (
        sources,
        "np.array([len(source.tokens) for source in sources], dtype=np.int64)",
        "np.full(len(sources), max(len(source.tokens) for source in sources))",
        "together",
    ),
    "another slot's memory read": (
        sources,
        "return self._cache.past_addresses(slot)",
        "return self._cache.past_addresses(0)",
        "moved",
    ),
    "another slot's memory written": (
        sources,
        "self._cache.addresses(sources[0].slot)",
        "self._cache.addresses(0)",
        "together",
    ),
    "source left behind by a move of no tokens": (
        engine,
        "        if self._sources is not None:\n            self._sources.move(source, destination)",
        "        if self._sources is not None and length:\n            self._sources.move(source, destination)",
        "moved",
    ),
    "source moved the wrong way": (
        sources,
        "self._cache.move(slot, destination, self.lengths[slot])",
        "self._cache.move(destination, slot, self.lengths[slot])",
        "moved",
    ),
    "text kept under a new source": (
        engine,
        "        for source in sources:\n            self._forget_text(source.slot)",
        "        pass",
        "again",
    ),
    "text kept under a shared source": (
        engine,
        "            self._forget_text(destination)\n",
        "",
        "shared",
    ),
    "source of a free slot kept": (
        sources,
        "[None if text is None else one for",
        "[one for",
        "freed",
    ),
    "tokens without a source": (
        engine,
        "check_have_sources(spans, self._sources.lengths)",
        "pass",
        "needed",
    ),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("mutants") / "bundle"
    return with_device_graphs(write_source_bundle(root, nan_token=NAN_TOKEN), "float32")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, name: str) -> None:
    module, old, new, killer = MUTANTS[name]
    errors = (AssertionError, EngineError, pytest.fail.Exception)
    assert_caught(
        monkeypatch, module, old, new, lambda: KILLERS[killer](lambda: on_device(bundle)), errors
    )


def test_stale_columns_of_a_longer_source_are_caught(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle
) -> None:
    def kill() -> None:
        device_tests.test_nan_left_by_a_longer_source_is_never_read(bundle, shares=False)

    clear = "self._clear(slot, end, self._written[slot])"
    assert_caught(monkeypatch, kv_cache, clear, "pass", kill)


def test_a_source_written_behind_the_first_column_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last token then lies beyond its length."""
    number = iter(range(9))

    def kill() -> None:
        root = write_source_bundle(tmp_path / str(next(number)))
        made = with_device_graphs(root, "float32")
        device_tests.assert_nearly_as_the_host(made, on_device(made), atol=1e-4)

    old, new = 'ir.node("Sub", [length, length])', 'ir.node("Div", [length, length])'
    assert_caught(monkeypatch, device_graphs, old, new, kill)
