"""The tests of sources can fail: each known mistake is caught by a named test."""

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.engines import kv_cache
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.onnx import engine as onnx_engine
from outrider.engines.onnx import sources
from outrider.engines.onnx.engine import OnnxEngine

from tests.engines.handmade_sources import write_source_bundle
from tests.engines.onnx import test_sources as source_tests
from tests.engines.source_contract import SourceContract
from tests.mutants import assert_caught

CONTRACT = SourceContract()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("mutants") / "bundle"
    return load_bundle(write_source_bundle(root, nan_token=source_tests.NAN_TOKEN))


Make = Callable[[], OnnxEngine]
KILLERS: dict[str, Callable[[Make], object]] = {
    "together": lambda make: CONTRACT.test_sources_read_together_answer_as_alone(make(), make),
    "again": lambda make: CONTRACT.test_reading_again_empties_the_text_and_forgets_a_longer_source(
        make(), make
    ),
    "stale": lambda make: source_tests.test_nan_left_by_a_longer_source_is_never_read(make()),
    "over": lambda make: source_tests.test_nan_of_a_source_does_not_survive_another_over_it(
        make(), moves=True
    ),
    "moved": lambda make: CONTRACT.test_a_moved_slot_takes_its_source_along(make(), make, 0),
    "shared": lambda make: CONTRACT.test_a_shared_source_is_read_by_all_and_texts_begin_anew(
        make(), make
    ),
    "freed": lambda make: CONTRACT.test_free_slots_lose_their_sources_and_others_keep_theirs(
        make(), make
    ),
    "needed": lambda make: CONTRACT.test_tokens_need_a_source_and_empty_spans_do_not(make()),
    "grown": lambda make: CONTRACT.test_long_sources_that_have_gone_leave_the_others_as_they_were(
        make(), make
    ),
    "whole": lambda make: source_tests.test_every_token_of_a_source_is_attended_to(make()),
    "fits": lambda make: source_tests.test_a_source_that_fills_its_room_fits(make()),
    "beside": lambda make: source_tests.test_a_free_slot_beside_a_row_asks_for_no_room(make()),
    "no memory": lambda make: (
        source_tests.test_without_memory_for_fewer_texts_a_free_slot_s_source_is_gone(make())
    ),
    "columns": lambda make: source_tests.test_no_call_reads_a_single_column(make()),
}
MUTANTS = {
    "source length of the neighbour row": (
        sources,
        "lengths = self._lengths[slot : slot + num_rows]",
        "lengths = np.roll(self._lengths, -1)[slot : slot + num_rows].copy()",
        "together",
    ),
    "source one token short": (
        sources,
        "self._cache.lengths[slot] = self._lengths[slot] = length",
        "self._cache.lengths[slot], self._lengths[slot] = length, length - 1",
        "whole",
    ),
    "every source as long as the longest": (
        sources,
        "return np.array([len(source.tokens) for source in sources], dtype=np.int64)",
        "return np.full(len(sources), max(len(source.tokens) for source in sources))",
        "together",
    ),
    "stale columns of a longer source": (
        sources,
        "self._cache.begin_write(source.slot, 0, num_tokens)",
        "pass",
        "stale",
    ),
    "stale columns under a moved source": (
        kv_cache,
        "self.begin_write(destination, length, 0)",
        "self._written[destination] = length",
        "over",
    ),
    "another slot's memory": (
        sources,
        "bind_past(binding, self._past, self._cache.rows(slot, num_rows))",
        "bind_past(binding, self._past, self._cache.rows(0, num_rows))",
        "moved",
    ),
    "source left behind by a move of no tokens": (
        onnx_engine,
        "        if self._sources is not None:\n            self._sources.move(source, destination)",
        "        if self._sources is not None and length:\n            self._sources.move(source, destination)",
        "moved",
    ),
    "source moved the wrong way": (
        sources,
        "self._cache.move(slot, destination, length)",
        "self._cache.move(destination, slot, length)",
        "moved",
    ),
    "length left behind by a move": (
        sources,
        "self._set_length(destination, length)",
        "self._cache.lengths[destination] = length",
        "moved",
    ),
    "text kept under a new source": (
        onnx_engine,
        "        for source in sources:\n            self._forget_text(source.slot)",
        "        pass",
        "again",
    ),
    "text kept under a shared source": (
        onnx_engine,
        "            self._forget_text(destination)\n",
        "",
        "shared",
    ),
    "source of a free slot kept": (
        sources,
        "None if text is None else length for",
        "length for",
        "freed",
    ),
    "source gone with an empty text": (
        sources,
        "None if text is None else length for",
        "length if text else None for",
        "freed",
    ),
    "tokens without a source": (
        onnx_engine,
        "check_have_sources(spans, self._sources.lengths)",
        "pass",
        "needed",
    ),
    "calls bound to memory that has gone": (
        onnx_engine,
        "        if encoder.make_room(sources, num_tokens):\n            self._calls.clear()",
        "        encoder.make_room(sources, num_tokens)",
        "grown",
    ),
    "length of a source that has gone": (
        sources,
        "self._lengths[:] = self._cache.lengths",
        "pass",
        "beside",
    ),
    "source of a free slot kept where texts have no memory": (
        onnx_engine,
        "        finally:\n            if self._sources is not None and self._sources.trim(lengths):",
        "        except ZeroDivisionError:\n            raise\n        else:\n"
        "            if self._sources is not None and self._sources.trim(lengths):",
        "no memory",
    ),
    "a call of a single column": (
        sources,
        "return max(MIN_SPAN, check_sources(",
        "return max(1, check_sources(",
        "columns",
    ),
    "room to double": (sources, "growth_room=1", "growth_room=2", "fits"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle, name: str, tmp_path: Path
) -> None:
    module, old, new, killer = MUTANTS[name]

    def kill() -> None:
        KILLERS[killer](lambda: OnnxEngine(bundle, bundle.manifest.target))

    errors = (AssertionError, EngineError, ValueError, pytest.fail.Exception)
    assert_caught(monkeypatch, module, old, new, kill, errors)
