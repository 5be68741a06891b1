"""Wide calls of a short text beside a long one: which cache they run over, bits, what lies in the caches."""

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.kv_cache import KvCache
from outrider.engines.onnx.engine import OnnxEngine

from tests.engines.contract import extend_one, make_tokens, span, wanted_logits
from tests.engines.handmade import HEADS, KV_HEADS, write_bundle
from tests.engines.onnx.memory import ScarceMemory

NAN_TOKEN = 95
# What the longest text has, so that every slot has 256 columns; a short one is copied to 128.
LONG, NUM_SHORT = 200, 128
LONGEST = 2


@pytest.fixture(
    scope="module",
    params=[(False, KV_HEADS), (True, KV_HEADS), (True, HEADS)],
    ids=["model", "grouped", "unshared"],
)
def bundle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bundle:
    is_grouped, kv_heads = request.param
    root: Path = tmp_path_factory.mktemp("short") / "bundle"
    return load_bundle(
        write_bundle(root, nan_token=NAN_TOKEN, is_grouped=is_grouped, kv_heads=kv_heads)
    )


@pytest.fixture
def engine(bundle: Bundle) -> OnnxEngine:
    """One whose last slot holds a long text."""
    found = OnnxEngine(bundle, bundle.manifest.target)
    for at in range(0, LONG, 40):
        extend_one(found, LONGEST, at, some_tokens(found, 40, seed=100 + at))
    assert found.capacity == 2 * NUM_SHORT
    return found


def some_tokens(engine: OnnxEngine, count: int, seed: int) -> tuple[int, ...]:
    """Any but the one that is not finite."""
    return tuple(token % NAN_TOKEN for token in make_tokens(engine, count, seed))


def own_cache(engine: OnnxEngine) -> KvCache:
    assert engine._short is not None
    return engine._short._own


def calls_over(engine: OnnxEngine) -> tuple[int, int]:
    """How many calls are bound over all slots, and over the cache of short texts."""
    assert engine._short is not None
    return len(engine._calls._calls), len(engine._short.calls._calls)


def held(engine: OnnxEngine, slot: int, length: int) -> FloatArray:
    return engine._cache.read(slot, length)


def test_a_chunk_has_the_bits_that_it_has_among_short_texts(
    bundle: Bundle, engine: OnnxEngine
) -> None:
    """The slot holds the same, and others what they held."""
    alone = OnnxEngine(bundle, bundle.manifest.target)
    tokens = some_tokens(engine, 160, seed=1)
    extend_one(engine, 0, 0, some_tokens(engine, 40, seed=2))
    others = [held(engine, slot, engine.capacity) for slot in (0, LONGEST)]
    engine._calls.clear()
    at = 0
    # A few tokens between, which are computed where they lie; the last chunk needs more than half the columns.
    for length, over in ((40, (0, 1)), (5, (1, 1)), (40, (1, 1)), (32, (1, 2)), (40, (2, 2))):
        chunk = tokens[at : at + length]
        np.testing.assert_array_equal(
            extend_one(engine, 1, at, chunk), extend_one(alone, 1, at, chunk)
        )
        assert calls_over(engine) == over
        at += length
    np.testing.assert_array_equal(held(engine, 1, at), held(alone, 1, at))
    assert not held(engine, 1, engine.capacity)[..., at:, :].any()
    for slot, before in zip((0, LONGEST), others, strict=True):
        np.testing.assert_array_equal(held(engine, slot, engine.capacity), before)


def test_texts_of_several_slots_follow_each_other(bundle: Bundle, engine: OnnxEngine) -> None:
    """What one has left where they are copied to, longer or not finite, is in no other's answer."""
    alone = OnnxEngine(bundle, bundle.manifest.target)
    nothing = (NAN_TOKEN,) * 40
    for slot, start, tokens in (
        (0, 0, some_tokens(engine, 40, seed=4)),
        (1, 0, nothing),
        (0, 40, some_tokens(engine, 40, seed=5)),
        (1, 40, nothing),
        (0, 10, some_tokens(engine, 35, seed=7)),
    ):
        found = extend_one(engine, slot, start, tokens)
        np.testing.assert_array_equal(found, extend_one(alone, slot, start, tokens))
    assert calls_over(engine)[1] == 2
    np.testing.assert_array_equal(held(engine, 0, 128), held(alone, 0, 128))
    assert np.isfinite(held(engine, 0, 128)).all()


def test_only_wide_calls_of_one_text_are_copied(engine: OnnxEngine) -> None:
    tokens = some_tokens(engine, 31, seed=8)
    wanted_logits(engine, [span(0, 0, tokens)])
    wanted_logits(engine, [span(0, 0, (*tokens, 1)), span(1, 0, (*tokens, 1))])
    assert calls_over(engine)[1] == 0
    wanted_logits(engine, [span(0, 0, (*tokens, 1))])
    assert calls_over(engine)[1] == 1


def test_its_memory_goes_with_the_long_text(engine: OnnxEngine) -> None:
    own = own_cache(engine)
    own._capacities = (64, 128)  # so that it has something to give back
    own.reset()
    for _ in range(6):
        # Texts that come again keep it.
        extend_one(engine, 0, 0, some_tokens(engine, 40, seed=9))
        extend_one(engine, 0, 40, some_tokens(engine, 40, seed=10))
        engine.trim([0, 0, LONG])
        assert own.capacity == 128
    for _ in range(8):
        engine.trim([])
    assert (own.capacity, engine.capacity) == (64, 128)
    assert calls_over(engine) == (0, 0)


def test_without_memory_for_the_copy_nothing_is_lost(bundle: Bundle, engine: OnnxEngine) -> None:
    alone = OnnxEngine(bundle, bundle.manifest.target)
    own = own_cache(engine)
    own._capacities = (64, 128)
    own.reset()
    tokens = some_tokens(engine, 80, seed=11)
    np.testing.assert_array_equal(
        extend_one(engine, 0, 0, tokens[:40]), extend_one(alone, 0, 0, tokens[:40])
    )
    memory = own._allocate = ScarceMemory(0)
    with pytest.raises(EngineError, match="no memory for a cache of 128 tokens"):
        extend_one(engine, 0, 40, tokens[40:])
    memory.room = 1
    np.testing.assert_array_equal(
        extend_one(engine, 0, 40, tokens[40:]), extend_one(alone, 0, 40, tokens[40:])
    )


def test_one_slot_needs_no_copy(bundle: Bundle) -> None:
    assert OnnxEngine(bundle, bundle.manifest.target, max_batch=1)._short is None
