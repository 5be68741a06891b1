"""What the ONNX Runtime engine promises of sources beside the contract: bits, isolation, memory, translated errors."""

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError, EngineError, EngineLimits
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.determinism import has_equal_bits
from outrider.engines.kv_cache import source_capacities, zeros
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_engine
from outrider.engines.pair import source_memory

from tests.engines import handmade_sources
from tests.engines.contract import extend_one, make_tokens, span, wanted_logits
from tests.engines.handmade import write_bundle
from tests.engines.handmade_sources import MAX_SOURCE, SOURCE_V, write_source_bundle
from tests.engines.source_contract import source

NAN_TOKEN = 31
TEXT = (5, 6, 7)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Token ``NAN_TOKEN`` of a source is embedded as NaN."""
    root = tmp_path_factory.mktemp("sources") / "bundle"
    return load_bundle(write_source_bundle(root, nan_token=NAN_TOKEN))


@pytest.fixture
def engine(bundle: Bundle) -> OnnxEngine:
    return OnnxEngine(bundle, bundle.manifest.target)


def make_source(count: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(0, NAN_TOKEN, count))


def sources_cache(engine: OnnxEngine):  # type: ignore[no-untyped-def]
    assert engine._sources is not None
    return engine._sources._cache


def test_capacities_of_sources_hold_every_source() -> None:
    def found(max_source: int) -> tuple[int, ...]:
        return source_capacities(
            EngineLimits(
                max_batch=1, max_context=8, max_extend=8, vocab_size=2, max_source=max_source
            )
        )

    assert found(1) == (2,)
    assert found(64) == (64,)
    assert found(65) == (64, 65)
    assert found(512) == (64, 96, 128, 192, 256, 384, 512)


def test_opening_an_engine_leaves_no_source(engine: OnnxEngine) -> None:
    assert sources_cache(engine).lengths == [0] * engine.limits.max_batch
    with pytest.raises(EngineError, match="slot 0 has no source"):
        engine.extend([span(0, 0, (1,))])


def test_bits_are_claimed_and_equal(engine: OnnxEngine) -> None:
    assert engine.is_row_invariant
    assert has_equal_bits(engine)


@pytest.mark.parametrize("least", [0, 64])
def test_a_claim_that_is_wrong_is_found(
    engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """The row's own source is read with another, where its neighbours' are longer than so many tokens."""
    read = engine.read

    def spoiled(sources):  # type: ignore[no-untyped-def]
        longest = max(least, *(len(one.tokens) for one in sources))
        read([source(one.slot, (longest % SOURCE_V, *one.tokens[1:])) for one in sources])

    monkeypatch.setattr(engine, "read", spoiled)
    assert not has_equal_bits(engine)


def test_every_capacity_gives_the_same_bits(bundle: Bundle) -> None:
    tokens, text = make_source(33, seed=1), make_tokens_of(17)
    found = []
    for longest in (33, 65, 97, MAX_SOURCE):
        engine = OnnxEngine(bundle, bundle.manifest.target)
        engine.read([source(0, make_source(longest, seed=2)), source(1, tokens)])
        found.append((engine.source_capacity, extend_one(engine, 1, 0, text)))
    assert [capacity for capacity, _ in found] == [64, 96, 128, MAX_SOURCE]
    for _, logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0][1])


def make_tokens_of(count: int) -> tuple[int, ...]:
    return tuple(range(1, 1 + count))


def test_every_token_of_a_source_is_attended_to(engine: OnnxEngine) -> None:
    """The handmade encoder knows no positions, so that the order of a source changes nothing but roundings."""
    tokens = make_source(7, seed=8)
    engine.read([source(0, tokens), source(1, tokens[::-1])])
    found = wanted_logits(engine, [span(0, 0, TEXT), span(1, 0, TEXT)])
    np.testing.assert_allclose(found[0], found[1], rtol=0.0, atol=1e-5)


def test_nan_left_by_a_longer_source_is_never_read(engine: OnnxEngine) -> None:
    engine.read([source(2, (1, 2, 3))])
    expected = extend_one(engine, 2, 0, TEXT)
    engine.read([source(0, (NAN_TOKEN,) * 30)])
    assert np.isnan(extend_one(engine, 0, 0, TEXT)).all()
    engine.read([source(0, (1, 2, 3))])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, TEXT), expected)


@pytest.mark.parametrize("moves", [True, False])
def test_nan_of_a_source_does_not_survive_another_over_it(engine: OnnxEngine, moves: bool) -> None:
    engine.read([source(2, (1, 2, 3))])
    expected = extend_one(engine, 2, 0, TEXT)
    engine.read([source(0, (NAN_TOKEN,) * 30)])
    if moves:
        engine.move_slot(2, 0, 0)
    else:
        engine.share_source(2, [0])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, TEXT), expected)


def test_a_source_of_nan_harms_no_other_row(engine: OnnxEngine) -> None:
    engine.read([source(2, (1, 2, 3))])
    expected = extend_one(engine, 2, 0, TEXT)
    engine.read([source(0, (NAN_TOKEN, 5)), source(1, (1, 2, 3))])
    found = wanted_logits(engine, [span(0, 0, TEXT), span(1, 0, TEXT)])
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], expected)


def test_a_row_without_a_source_stays_finite_beside_others(engine: OnnxEngine) -> None:
    """What its padding writes to its slot must not be NaN: the next extend reads what it does not overwrite."""
    engine.read([source(1, (1, 2, 3))])
    engine.extend([span(0, 0), span(1, 0, TEXT)])
    assert all(np.isfinite(held).all() for held in engine._cache._groups.values())


def test_a_failure_of_the_library_leaves_the_slots_without_source_and_text(
    engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.read([source(slot, (1, 2, 3)) for slot in range(3)])
    expected = wanted_logits(engine, [span(slot, 0, TEXT) for slot in range(3)])
    # More tokens than there is room for, which the engine's own checks never let through.
    with monkeypatch.context() as patch:
        patch.setattr(sources_cache(engine), "reserve", lambda num_tokens: False)
        with pytest.raises(EngineError, match=r"(?s)ONNX Runtime failed.*TensorScatter") as raised:
            engine.read([source(1, (1,)), source(2, (1,) * 90)])
    assert raised.value.__cause__ is not None
    for slot in (1, 2):
        with pytest.raises(EngineError, match=f"slot {slot} has no source"):
            engine.extend([span(slot, 0, TEXT)])
        with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
            engine.extend([span(slot, 3, TEXT)])
    np.testing.assert_array_equal(extend_one(engine, 0, 2, TEXT[2:]), expected[0][2:])
    engine.read([source(1, (1, 2, 3))])
    np.testing.assert_array_equal(extend_one(engine, 1, 0, TEXT), expected[1])


def test_an_extend_that_fails_leaves_sources_valid(
    engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.read([source(0, (1, 2, 3))])
    expected = extend_one(engine, 0, 0, TEXT)
    with monkeypatch.context() as patch:
        engine._cache.lengths[0] = 128
        patch.setattr(engine._cache, "reserve", lambda num_tokens: False)
        with pytest.raises(EngineError, match="ONNX Runtime failed"):
            engine.extend([span(0, 128, (1, 2))])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, TEXT), expected)


def test_without_memory_for_a_longer_source_the_others_go_on(engine: OnnxEngine) -> None:
    engine.read([source(0, (1, 2, 3)), source(1, (4,))])
    expected = extend_one(engine, 0, 0, TEXT)
    cache = sources_cache(engine)

    def no_memory(shape: tuple[int, ...]) -> None:
        raise MemoryError

    cache._allocate = no_memory
    with pytest.raises(EngineError, match="no memory for a cache of 96 tokens"):
        engine.read([source(1, make_source(65, seed=3))])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, TEXT), expected)
    with pytest.raises(EngineError, match="slot 1 has no source"):
        engine.extend([span(1, 0, TEXT)])
    cache._allocate = zeros
    engine.read([source(1, make_source(65, seed=3))])
    np.testing.assert_array_equal(extend_one(engine, 0, 2, TEXT[2:]), expected[2:])


def test_the_room_of_a_long_source_goes_when_it_has_gone(engine: OnnxEngine) -> None:
    engine.read([source(0, (1, 2, 3)), source(1, make_source(MAX_SOURCE, seed=4))])
    expected = extend_one(engine, 0, 0, TEXT)
    assert engine.source_capacity == MAX_SOURCE
    engine.trim([3, 0])
    for capacity in (MAX_SOURCE, MAX_SOURCE, MAX_SOURCE, MAX_SOURCE, 64):
        engine.trim([3, None])
        assert engine.source_capacity == capacity
    np.testing.assert_array_equal(extend_one(engine, 0, 1, TEXT[1:]), expected[1:])


def test_an_engine_without_sources_has_room_for_the_shortest(engine: OnnxEngine) -> None:
    engine.read([source(0, (1, 2, 3))])
    expected = extend_one(engine, 0, 0, TEXT)
    for count in (40, 100, MAX_SOURCE, 70):
        engine.read([source(1, make_source(count, seed=count)), source(2, (NAN_TOKEN,) * count)])
        engine.trim([0, None])
    assert engine.source_capacity > 64
    engine.trim([])
    assert engine.source_capacity == 64
    engine.read([source(2, (1, 2, 3))])
    np.testing.assert_array_equal(extend_one(engine, 2, 0, TEXT), expected)


def test_a_free_slot_beside_a_row_asks_for_no_room(engine: OnnxEngine) -> None:
    """An empty span's source has gone: a call with its length would read beyond smaller memory."""
    engine.read([source(0, (1, 2)), source(1, make_source(MAX_SOURCE, seed=9))])
    expected = extend_one(engine, 0, 0, TEXT)
    for _ in range(6):
        engine.trim([3, None])
    assert engine.source_capacity == 64
    found = wanted_logits(engine, [span(0, 1, TEXT[1:]), span(1, 0)])
    np.testing.assert_array_equal(found[0], expected[1:])


def test_a_cache_that_was_emptied_grows_again(engine: OnnxEngine) -> None:
    tokens = make_source(100, seed=10)
    engine.read([source(0, tokens)])
    expected = extend_one(engine, 0, 0, TEXT)
    engine.read([source(1, make_source(MAX_SOURCE, seed=11))])
    engine.trim([])
    engine.read([source(0, tokens)])
    np.testing.assert_array_equal(extend_one(engine, 0, 0, TEXT), expected)


def test_without_memory_for_fewer_texts_a_free_slot_s_source_is_gone(engine: OnnxEngine) -> None:
    engine.read([source(0, (1, 2, 3)), source(1, (4,))])
    expected = extend_one(engine, 0, 0, TEXT)
    for start in range(0, 200, 40):
        extend_one(engine, 1, start, (1,) * 40)
    for _ in range(4):
        engine.trim([3, 0])
    cache = engine._cache

    def no_memory(shape: tuple[int, ...]) -> None:
        raise MemoryError

    cache._allocate = no_memory
    with pytest.raises(EngineError, match="no memory for a cache"):
        engine.trim([3, None])
    with pytest.raises(EngineError, match="slot 1 has no source"):
        engine.extend([span(1, 0, TEXT)])
    np.testing.assert_array_equal(extend_one(engine, 0, 1, TEXT[1:]), expected[1:])


def test_no_call_reads_a_single_column(engine: OnnxEngine) -> None:
    """On some machines a product of one row has other bits, on others not."""
    assert engine._sources is not None
    assert engine._sources.check([source(0, (1,))]) == 2
    assert engine._sources.check([source(0, (1, 2, 3))]) == 3


def test_memory_of_sources_is_told(bundle: Bundle, tmp_path: Path) -> None:
    # 2 layers, keys and values of 4 heads of 16 floats.
    told = source_memory(bundle, 4)
    assert "1.0 KiB of target in a slot" in told
    assert f"4 slots of the longest sources {4 * MAX_SOURCE / 2**10:.0f} MiB" in told
    assert source_memory(load_bundle(write_bundle(tmp_path / "plain")), 4) == ""


def test_a_source_that_fills_its_room_fits(engine: OnnxEngine) -> None:
    """Sources do not grow: where a text's cache would be too small for what stays to double, this one is not."""
    engine.read([source(0, make_source(60, seed=5)), source(1, make_source(65, seed=6))])
    for _ in range(5):
        engine.trim([0, None])
    assert engine.source_capacity == 64


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("encode.onnx", r"target/encode\.onnx: tensors missing or unknown"),
        ("model.onnx", r"target/model\.onnx: tensors missing or unknown: .*cross_key"),
    ],
)
def test_a_graph_that_is_not_as_declared_is_refused(
    tmp_path: Path, graph: str, message: str
) -> None:
    bundle = load_bundle(write_source_bundle(tmp_path / "bundle"))
    plain = load_bundle(write_bundle(tmp_path / "plain"))
    entry = bundle.manifest.target
    (bundle.root / "target" / graph).write_bytes(
        plain.model_path(plain.manifest.target).read_bytes()
    )
    with pytest.raises(BundleError, match=message):
        OnnxEngine(bundle, entry)


@pytest.mark.parametrize("graph", ["encode.onnx", "model.onnx"])
def test_caches_of_sources_of_another_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    bundle = load_bundle(write_source_bundle(tmp_path / "bundle"))
    monkeypatch.setattr(handmade_sources, "SOURCE_HEADS", 2)
    other = write_source_bundle(tmp_path / "other") / "target" / graph
    (bundle.root / "target" / graph).write_bytes(other.read_bytes())
    with pytest.raises(BundleError, match=rf"{graph}: cross_key\.0 is .*, the manifest disagrees"):
        OnnxEngine(bundle, bundle.manifest.target)


def test_a_decoder_alone_reads_nothing(tmp_path: Path) -> None:
    engine = open_engine(load_bundle(write_bundle(tmp_path / "plain")), "target")
    assert engine.limits.max_source == 0
    for refused in (
        lambda: engine.read([source(0, make_tokens(engine, 2, seed=1))]),
        lambda: engine.share_source(0, [1]),
    ):
        with pytest.raises(EngineError, match="no encoder"):
            refused()
