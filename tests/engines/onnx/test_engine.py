"""What only the ONNX Runtime engine promises: bits, capacities, isolation, translated errors."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from outrider.engines.base import BundleError, Engine, EngineError, EngineLimits, FloatArray, Span
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.kv_cache import KvCache, capacities, coarse_capacities
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_engine
from outrider.export.pipeline import ExportOptions, export_bundle

from tests.engines.contract import check_copies, extend_one, make_tokens, span, wanted_logits
from tests.engines.handmade import HEADS, KV_HEADS, write_bundle
from tests.engines.onnx.memory import ScarceMemory

NAN_TOKEN = 95
# More tokens than the first capacity holds, so that a trace crosses from one bucket to the next.
LONG = 200


class Graph(NamedTuple):
    """Which graph an engine runs.

    Attributes:
        is_grouped: whether rows are packed, and cache heads that are shared read once.
        kv_heads: heads of the cache, of as many queries or fewer.
        least_tokens: of a row of a call, over packed rows.
    """

    is_grouped: bool
    kv_heads: int
    least_tokens: int


GRAPHS = {
    "model": Graph(False, KV_HEADS, 2),
    "grouped": Graph(True, KV_HEADS, 1),
    "unshared": Graph(True, HEADS, 2),
}


@pytest.fixture(scope="module", params=GRAPHS.values(), ids=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Graph:
    found: Graph = request.param
    return found


@pytest.fixture(scope="module")
def is_grouped(graph: Graph) -> bool:
    return graph.is_grouped


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> Bundle:
    root = tmp_path_factory.mktemp("onnx") / "bundle"
    return load_bundle(write_bundle(root, is_grouped=graph.is_grouped, kv_heads=graph.kv_heads))


@pytest.fixture(scope="module")
def poisoned_bundle(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> Bundle:
    root = tmp_path_factory.mktemp("poisoned") / "bundle"
    is_grouped, kv_heads, _ = graph
    return load_bundle(
        write_bundle(root, nan_token=NAN_TOKEN, is_grouped=is_grouped, kv_heads=kv_heads)
    )


def reference(engine: Engine, tokens: tuple[int, ...]) -> FloatArray:
    """Logits [n, V] of n tokens fed to slot 0 alone, five at a time."""
    return np.concatenate(
        [extend_one(engine, 0, at, tokens[at : at + 5]) for at in range(0, len(tokens), 5)]
    )


def grow(engine: OnnxEngine, num_tokens: int) -> None:
    """Make the cache hold ``num_tokens`` by filling the last slot."""
    slot = engine.limits.max_batch - 1
    for at in range(0, num_tokens, 40):
        engine.extend([span(slot, at, (1,) * min(40, num_tokens - at), 0)])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("long", [0, 150, LONG, 290])
def test_rows_have_the_same_bits_in_every_shape(
    bundle: Bundle, num_tokens: int, batch: int, long: int
) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    rows = [make_tokens(engine, 80, seed=row) for row in range(batch)]
    expected = [reference(engine, tokens) for tokens in rows]
    assert engine.capacity == 128
    grow(engine, long)
    assert engine.capacity == {0: 128, 150: 192, LONG: 256, 290: 340}[long]
    for at in range(0, 80, num_tokens):
        spans = [span(row, at, rows[row][at : at + num_tokens]) for row in range(batch)]
        for row, found in enumerate(wanted_logits(engine, spans)):
            np.testing.assert_array_equal(found, expected[row][at : at + num_tokens])


def test_a_call_of_the_same_shape_reads_the_columns_that_are_wanted_now(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    rows = [make_tokens(engine, 20, seed=row) for row in range(2)]
    expected = [reference(engine, tokens) for tokens in rows]
    at = [0, 0]
    for shapes in (((5, 2), (3, 1)), ((3, 1), (5, 2)), ((5, 1), (4, 2)), ((0, 0), (5, 2))):
        spans = [
            span(row, at[row], rows[row][at[row] : at[row] + length], num_logits)
            for row, (length, num_logits) in enumerate(shapes)
        ]
        for row, found in enumerate(wanted_logits(engine, spans)):
            at[row] += shapes[row][0]
            np.testing.assert_array_equal(found, expected[row][at[row] - len(found) : at[row]])


def test_int8_weights_give_a_row_the_same_bits_in_every_shape(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    export_bundle(
        target=tiny_checkpoints[0],
        draft=None,
        out=tmp_path / "int8",
        options=ExportOptions(
            max_context=256, max_batch=3, max_gamma=8, weights="int8", max_tree_nodes=0
        ),
        progress=lambda stage: None,
    )
    bundle = load_bundle(tmp_path / "int8")
    engine = OnnxEngine(bundle, bundle.manifest.target)
    rows = [make_tokens(engine, 40, seed=row) for row in range(3)]
    expected = [reference(engine, tokens) for tokens in rows]
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    for num_tokens in (1, 2, 3, 5, 9, 40):
        num_tokens = min(num_tokens, engine.limits.max_extend)
        for batch in (1, 2, 3):
            for at in range(0, 40, num_tokens):
                spans = [span(row, at, rows[row][at : at + num_tokens]) for row in range(batch)]
                for row, found in enumerate(wanted_logits(engine, spans)):
                    np.testing.assert_array_equal(found, expected[row][at : at + num_tokens])
    check_copies(engine, rows[0][:24])


@pytest.mark.parametrize("which", ["target", "draft"])
def test_single_tokens_are_padded_only_where_bits_need_it(
    bundle: Bundle, graph: Graph, tiny_bundle: Path, which: str
) -> None:
    """Where the graph is one from before it padded attention, and its rows are not packed."""
    exported = load_bundle(tiny_bundle)
    entry = getattr(exported.manifest, which)
    handmade = bundle.manifest.target
    assert (entry.narrowest_span, handmade.narrowest_span) == (1, 2)
    for engine, num_tokens, num_wanted in (
        (OnnxEngine(exported, entry), 1, 1),
        (OnnxEngine(bundle, handmade), graph.least_tokens, 1 if graph.is_grouped else 2),
    ):
        assert engine.extend([span(slot, 0, (1,)) for slot in range(3)]).shape[1] == 1
        assert engine.extend([span(0, 0, (1,))]).shape[1] == num_wanted
        sizes = {(one.num_rows, one.num_tokens) for _, _, one in engine._calls._calls}
        assert sizes == {(3, num_tokens), (1, num_tokens)}


def test_a_batch_is_as_many_rows_as_it_has_tokens(bundle: Bundle, is_grouped: bool) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    assert engine.packs_rows == is_grouped
    engine.extend([span(0, 0, (1, 2, 3, 4, 5), 1), span(1, 0, (1,)), span(2, 0)])
    assert [one.all_tokens for _, _, one in engine._calls._calls] == [6 if is_grouped else 15]


def test_a_chunk_beside_rows_of_few_tokens_is_a_call_of_its_own(bundle: Bundle) -> None:
    """Each row has the bits that it has alone, logits and what is cached; a row without tokens keeps what it holds."""
    engine = OnnxEngine(bundle, bundle.manifest.target)
    rows = [make_tokens(engine, 80, seed=row) for row in range(3)]
    expected = [reference(engine, tokens) for tokens in rows]
    at = [0, 0, 0]
    ran: list[list[int]] = []
    run = engine._run

    def noted(spans: Sequence[Span], most_wanted: int, *, is_tree: bool) -> FloatArray:
        ran.append([len(one.tokens) for one in spans])
        return run(spans, most_wanted, is_tree=is_tree)

    engine._run = noted  # type: ignore[method-assign]
    for lengths, wanted, apart in (
        ((5, 20, 3), (1, 1, 1), [[5, 20, 3]]),
        ((40, 1, 33), (2, 1, 0), [[0, 1, 0], [40], [33]]),
        ((1, 10, 32), (1, 10, 1), [[1, 0, 0], [10, 32]]),
        ((0, 40, 0), (0, 1, 0), [[40]]),
        ((31, 1, 5), (31, 1, 5), [[31, 1, 5]]),
        ((3, 8, 0), (3, 8, 0), [[3, 8, 0]]),
    ):
        spans = [
            span(row, at[row], rows[row][at[row] : at[row] + length], wanted[row])
            for row, length in enumerate(lengths)
        ]
        ran.clear()
        found = wanted_logits(engine, spans)
        assert ran == apart
        for row, length in enumerate(lengths):
            at[row] += length
            np.testing.assert_array_equal(
                found[row], expected[row][at[row] - wanted[row] : at[row]]
            )


def test_ragged_batches_of_other_totals_have_the_same_bits(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = [make_tokens(engine, 3, seed=row) for row in range(3)]
    expected = [reference(engine, row) for row in tokens]

    def extend(*lengths: int) -> None:
        spans = [span(row, 0, tokens[row][:length]) for row, length in enumerate(lengths)]
        for row, (found, length) in enumerate(
            zip(wanted_logits(engine, spans), lengths, strict=True)
        ):
            np.testing.assert_array_equal(found, expected[row][:length])

    for lengths in ((3, 2, 1), (3, 1, 1), (1, 3, 3), (3, 3, 3), (2, 2, 1)):
        extend(*lengths)


def test_without_memory_for_a_larger_call_the_smaller_ones_go_on(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(tiny_bundle)
    engine = OnnxEngine(bundle, bundle.manifest.target)
    # More rows than there is room for at first.
    assert engine.limits.max_extend < 3 * LONG
    tokens, other = (make_tokens(engine, LONG, seed=seed) for seed in (1, 2))
    expected = [reference(engine, given[:2]) for given in (tokens, other)]
    monkeypatch.setattr("outrider.engines.onnx.packed_calls.zeros", no_memory)
    for _ in range(2):
        with pytest.raises(MemoryError):
            engine.extend([span(row, 0, tokens) for row in range(3)])
        for given, logits in zip((tokens, other), expected, strict=True):
            found = wanted_logits(engine, [span(0, 0, given[:2])])
            np.testing.assert_array_equal(found[0], logits)


def no_memory(shape: tuple[int, ...]) -> FloatArray:
    raise MemoryError


def test_rows_that_want_different_numbers_of_logits_get_their_own(bundle: Bundle) -> None:
    """In every order, rows that want nothing and rows without tokens among them."""
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = [make_tokens(engine, 5, seed=row) for row in range(3)]
    expected = [reference(engine, row) for row in tokens]
    shapes = [(5, 5), (3, 1), (4, 0), (1, 1), (0, 0)]
    for chosen in itertools.product(shapes, repeat=3):
        spans = [
            span(row, 0, tokens[row][:length], num_logits)
            for row, (length, num_logits) in enumerate(chosen)
        ]
        found = wanted_logits(engine, spans)
        for row, (length, num_logits) in enumerate(chosen):
            np.testing.assert_array_equal(found[row], expected[row][length - num_logits : length])


def test_where_one_row_has_other_bits_packed_rows_are_at_least_two(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engines.onnx.engine.is_batch_invariant", lambda *_: False)
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = make_tokens(engine, 12, seed=3)
    expected = reference(engine, tokens)
    for at, token in enumerate(tokens):
        np.testing.assert_array_equal(extend_one(engine, 0, at, (token,))[0], expected[at])
    found = wanted_logits(engine, [span(0, 0, tokens[:5], 1), span(1, 0)])
    np.testing.assert_array_equal(found[0], expected[4:5])


def test_a_grouped_graph_that_packs_no_rows_is_refused(tmp_path: Path) -> None:
    bundle = load_bundle(write_bundle(tmp_path / "bundle", is_grouped=True))
    entry = bundle.manifest.target
    bundle.host_path(entry).write_bytes(bundle.model_path(entry).read_bytes())
    with pytest.raises(BundleError, match=r"target/grouped\.onnx: .* export again"):
        OnnxEngine(bundle, entry)


def test_a_manifest_is_not_believed_where_a_token_alone_has_other_bits(
    bundle: Bundle, is_grouped: bool
) -> None:
    """Attention of one query takes another kernel, of two that share a cache head it does not."""
    entry = replace(bundle.manifest.target, narrowest_span=1)
    engine = OnnxEngine(bundle, entry)
    assert engine.extend([span(0, 0, (1,))]).shape[1] == (1 if is_grouped else 2)
    tokens = make_tokens(engine, 12, seed=3)
    expected = reference(OnnxEngine(bundle, bundle.manifest.target), tokens)
    for at, token in enumerate(tokens):
        np.testing.assert_array_equal(extend_one(engine, 0, at, (token,))[0], expected[at])


def test_opening_an_engine_leaves_nothing_in_its_cache(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    engine = OnnxEngine(bundle, bundle.manifest.target)
    assert engine._cache.lengths == [0] * engine.limits.max_batch
    assert not any(held.any() for held in engine._cache._groups.values())
    assert not engine._calls._calls


def test_growing_in_the_middle_of_a_request_keeps_its_bits(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = make_tokens(engine, LONG, seed=5)
    small = reference(engine, tokens)
    grown = OnnxEngine(bundle, bundle.manifest.target)
    grow(grown, 290)
    np.testing.assert_array_equal(reference(grown, tokens), small)


def make_cache(limits: EngineLimits) -> KvCache:
    return KvCache(
        heads=[(2, 4)],
        num_slots=limits.max_batch,
        capacities=capacities(limits),
    )


def test_capacities_hold_every_extend_the_limits_allow() -> None:
    for max_context, max_extend in ((40, 8), (100, 28), (101, 28), (300, 40), (4096, 512)):
        limits = EngineLimits(
            max_batch=1, max_context=max_context, max_extend=max_extend, vocab_size=2
        )
        sizes = capacities(limits)
        assert sizes[-1] == max_context + max_extend
        assert list(sizes) == sorted(set(sizes))
        assert set(coarse_capacities(limits)) <= set(sizes)
    assert sizes == (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 4608)


def test_a_grown_cache_keeps_what_was_written() -> None:
    limits = EngineLimits(max_batch=2, max_context=300, max_extend=8, vocab_size=2)
    cache = make_cache(limits)
    cache.begin_write(1, 0, 7)
    row = cache._groups[2, 4, 0][1, 1]
    row[:, :7] = np.arange(56).reshape(2, 7, 4)
    written = row[:, :7].copy()
    assert not cache.reserve(128)
    assert cache.reserve(129)
    assert cache.capacity == 192
    np.testing.assert_array_equal(cache._groups[2, 4, 0][1, 1, :, :7], written)
    with pytest.raises(ValueError, match="largest capacity is 308"):
        cache.reserve(309)


def test_a_cache_shrinks_when_its_long_slot_has_gone(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = make_tokens(engine, 64, seed=50)
    expected = reference(engine, tokens)[-4:]
    grow(engine, LONG)
    for at in range(0, 60, 20):
        extend_one(engine, 1, at, tokens[at : at + 20])
    engine.trim([0, 60, LONG])
    assert engine.capacity == 256
    for capacity in (256, 256, 256, 256, 128, 128):
        engine.trim([0, 60])
        assert engine.capacity == capacity
    np.testing.assert_array_equal(extend_one(engine, 1, 60, tokens[60:]), expected)
    engine.move_slot(1, 0, 60)
    np.testing.assert_array_equal(extend_one(engine, 0, 60, tokens[60:]), expected)
    grow(engine, LONG)
    assert engine.capacity == 256


def test_a_cache_keeps_room_for_what_stays_to_double(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    grow(engine, LONG)
    last = engine.limits.max_batch - 1
    for num_kept, capacity in ((97, 256), (96, 192), (64, 128)):
        for _ in range(6):
            engine.trim([*[0] * last, num_kept])
        assert engine.capacity == capacity


def test_a_cache_that_requests_keep_needing_stays() -> None:
    limits = EngineLimits(max_batch=2, max_context=4000, max_extend=8, vocab_size=5)
    cache = make_cache(limits)

    def serve(length: int) -> int:
        cache.reserve(length)
        cache.lengths[0] = length
        cache.trim([])
        return cache.capacity

    assert [serve(180) for _ in range(6)] == [192] * 6
    # Far too large for nothing at all, it goes at once; a little too large, after some requests.
    assert [serve(length) for length in (1100, 180, 180)] == [128, 192, 192]
    assert [serve(400), *(serve(180) for _ in range(5))] == [512, 512, 512, 512, 192, 192]
    assert [serve(180), serve(60), serve(60), serve(180), serve(60)] == [192] * 5


def test_without_memory_for_a_smaller_cache_the_larger_one_goes_on() -> None:
    limits = EngineLimits(max_batch=2, max_context=200, max_extend=8, vocab_size=5)
    cache = make_cache(limits)
    memory = cache._allocate = ScarceMemory(1)
    assert cache.reserve(190)
    cache.lengths[:] = [3, 150]
    cache._groups[2, 4, 0][...] = 5.0
    assert memory.room == 0
    for _ in range(4):
        assert not cache.trim([3])
    with pytest.raises(EngineError, match="no memory"):
        cache.trim([3])
    assert cache.lengths == [3, 0]
    assert cache._groups[2, 4, 0].shape[3] == cache.capacity
    assert cache.capacity >= 190
    memory.room = 1
    assert cache.trim([3])
    assert (cache._groups[2, 4, 0][:, 0, :, :3] == 5.0).all()


def test_without_memory_for_a_larger_cache_the_smaller_one_goes_on(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    tokens = make_tokens(engine, 130, seed=51)
    expected = reference(OnnxEngine(bundle, bundle.manifest.target), tokens)
    reference(engine, tokens[:100])
    extend_one(engine, 1, 0, tokens[:10])
    cache = engine._cache
    memory = cache._allocate = ScarceMemory(0)
    before = cache.rows(0, 1)
    with pytest.raises(EngineError, match="no memory for a cache of 192 tokens"):
        extend_one(engine, 0, 100, tokens[100:])
    assert (engine.capacity, cache.rows(0, 1), cache.lengths[:2]) == (128, before, [100, 10])
    np.testing.assert_array_equal(extend_one(engine, 1, 10, tokens[10:14]), expected[10:14])
    memory.room = 1
    np.testing.assert_array_equal(extend_one(engine, 0, 100, tokens[100:]), expected[100:])
    np.testing.assert_array_equal(extend_one(engine, 1, 14, tokens[14:20]), expected[14:20])


def test_nothing_that_was_dropped_survives_in_a_smaller_cache(poisoned_bundle: Bundle) -> None:
    engine = OnnxEngine(poisoned_bundle, poisoned_bundle.manifest.target)
    expected = extend_one(engine, 2, 0, (1, 2, 3))
    grow(engine, LONG)
    extend_one(engine, 0, 0, (1,))
    extend_one(engine, 0, 1, (NAN_TOKEN,) * 30)
    for _ in range(6):
        engine.trim([1])
    assert engine.capacity == 128
    np.testing.assert_array_equal(extend_one(engine, 0, 1, (2, 3)), expected[1:])


def test_a_row_of_nan_harms_no_other_row(poisoned_bundle: Bundle) -> None:
    engine = OnnxEngine(poisoned_bundle, poisoned_bundle.manifest.target)
    expected = extend_one(engine, 2, 0, (1, 2, 3))
    found = wanted_logits(engine, [span(0, 0, (NAN_TOKEN, 5)), span(1, 0, (1, 2, 3))])
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], expected)


def test_nan_left_by_a_longer_extend_is_never_read(poisoned_bundle: Bundle) -> None:
    engine = OnnxEngine(poisoned_bundle, poisoned_bundle.manifest.target)
    expected = extend_one(engine, 2, 0, (1, 2, 3))
    extend_one(engine, 0, 0, (1,))
    extend_one(engine, 0, 1, (NAN_TOKEN,) * 30)
    np.testing.assert_array_equal(extend_one(engine, 0, 1, (2, 3)), expected[1:])
    extend_one(engine, 1, 0, (NAN_TOKEN,) * 30)
    np.testing.assert_array_equal(extend_one(engine, 1, 0, (1, 2, 3)), expected)


def test_nan_of_a_slot_does_not_survive_a_move_over_it(poisoned_bundle: Bundle) -> None:
    engine = OnnxEngine(poisoned_bundle, poisoned_bundle.manifest.target)
    expected = extend_one(engine, 2, 0, (1, 2, 3))
    extend_one(engine, 0, 0, (NAN_TOKEN,) * 30)
    engine.move_slot(2, 0, 1)
    np.testing.assert_array_equal(extend_one(engine, 0, 1, (2, 3)), expected[1:])


def test_a_failure_of_the_library_is_an_engine_error(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, bundle.manifest.target)
    expected = extend_one(engine, 0, 0, (1, 2, 3))
    # A write past the row's end, which the engine's own checks never let through.
    engine._cache.lengths[0] = 128
    engine._cache.reserve = lambda num_tokens: False  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"(?s)ONNX Runtime failed.*TensorScatter") as raised:
        engine.extend([span(0, 128, (1, 2))])
    assert raised.value.__cause__ is not None
    with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
        engine.extend([span(0, 3, (1,))])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, (1, 2, 3)), expected)


def test_a_graph_that_is_not_as_declared_is_refused(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    text = (root / "manifest.json").read_text()
    for field, wrong in (
        ('"head_size": 16', '"head_size": 8'),
        ('"vocab_size": 96', '"vocab_size": 9'),
    ):
        (root / "manifest.json").write_text(text.replace(field, wrong))
        with pytest.raises(BundleError, match=r"target/model\.onnx"):
            open_engine(load_bundle(root), "target")
    (root / "manifest.json").write_text(text.replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(BundleError, match=r"missing or unknown: .*key\.2"):
        open_engine(load_bundle(root), "target")


def test_a_file_that_ort_cannot_load_is_an_engine_error(bundle: Bundle, tmp_path: Path) -> None:
    elsewhere = Bundle(root=tmp_path, manifest=bundle.manifest)
    with pytest.raises(EngineError, match="cannot load"):
        OnnxEngine(elsewhere, bundle.manifest.target)


@pytest.mark.parametrize("max_batch", [0, 4])
def test_more_slots_than_the_bundle_allows_are_refused(bundle: Bundle, max_batch: int) -> None:
    with pytest.raises(BundleError, match=r"the bundle allows 1\.\.3"):
        open_engine(bundle, "target", max_batch=max_batch)


def test_a_missing_draft_and_an_unknown_device_are_named(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="no draft model"):
        open_engine(bundle, "draft")
    with pytest.raises(EngineError, match="device 'tpu'"):
        open_engine(bundle, "target", device="tpu")


def test_all_engines_share_one_pool_of_one_size(bundle: Bundle) -> None:
    open_engine(bundle, "target", num_threads=2)
    with pytest.raises(EngineError, match=r"num_threads 1: .* another size"):
        open_engine(bundle, "target", num_threads=1)
