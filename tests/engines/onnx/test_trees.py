"""Trees on ONNX Runtime: which bits hold, what lies in the cache, what is refused."""

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray, IntArray
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.onnx.packed_inputs import PackedShape
from outrider.engines.opening import open_engine
from outrider.engines.trees import chain_length, path_to

from tests.engines.contract import extend_one, make_tokens, span, wanted_logits
from tests.engines.handmade import write_bundle
from tests.engines.tree_contract import NUM_NODES, PARENTS, random_parents, tree

# Keys of side branches are computed from sums over other columns, so they round differently.
BRANCH_ATOL = 1e-5


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


def open_target(bundle: Bundle) -> OnnxEngine:
    engine = open_engine(bundle, "target", with_trees=True)
    assert isinstance(engine, OnnxEngine)
    return engine


def cache_of(engine: OnnxEngine, slot: int, length: int) -> FloatArray:
    """[2 L, H, length, D] float32, a copy."""
    return engine._cache.read(slot, length)


def test_trees_are_refused_where_their_graphs_are_not_loaded(
    bundle: Bundle, tmp_path: Path
) -> None:
    without = load_bundle(write_bundle(tmp_path / "bundle"))
    for engine in (open_engine(bundle, "target"), open_engine(without, "target", with_trees=True)):
        assert engine.limits.max_tree_nodes == 0
        with pytest.raises(EngineError, match="slot 0: this engine takes no trees"):
            engine.extend([tree(0, 0, (1, 2), (0,))])


def test_the_largest_tree_is_the_bundle_s(bundle: Bundle) -> None:
    engine = open_target(bundle)
    assert engine.limits.max_tree_nodes == 64
    rng = np.random.default_rng(0)
    for num_nodes in (64, 65):
        one = tree(0, 0, (1,) * num_nodes, random_parents(rng, num_nodes))
        if num_nodes == 64:
            assert np.isfinite(wanted_logits(engine, [one])[0]).all()
        else:
            with pytest.raises(EngineError, match="limit max_tree_nodes = 64"):
                engine.extend([one])


@pytest.mark.parametrize("start", [0, 1, 15, 16, 100, 126, 150])
def test_a_tree_has_the_same_bits_beside_others_and_in_a_larger_cache(
    bundle: Bundle, start: int
) -> None:
    """Its leading chain has those of a chain besides."""
    engine = open_target(bundle)
    text, tokens = make_tokens(engine, start, seed=1), make_tokens(engine, 12, seed=2)
    parents = (0, 1, 2, 3, 2, 5, 0, 7, 4, 9, 10)
    wanted_logits(engine, [span(0, 0, text, 0)])
    alone = wanted_logits(engine, [tree(0, start, tokens, parents)])[0]
    leading = chain_length(parents)
    chain = extend_one(engine, 0, start, tokens[:leading])
    np.testing.assert_array_equal(alone[:leading], chain)
    neighbours = [span(1, 0, make_tokens(engine, 40, seed=3)), tree(2, 0, tokens, parents)]
    together = wanted_logits(engine, [tree(0, start, tokens, parents), *neighbours])
    np.testing.assert_array_equal(together[0], alone)
    wanted_logits(engine, [span(3, 0, make_tokens(engine, 200, seed=4), 0)])
    assert engine.capacity > 128
    later = wanted_logits(engine, [tree(0, start, tokens, parents)])[0]
    np.testing.assert_array_equal(later, alone)


def test_cache_after_every_step_is_that_of_the_kept_tokens(bundle: Bundle) -> None:
    """ALGORITHMS T30: up to each slot's length the cache is the one computed from scratch."""
    engine, fresh = open_target(bundle), open_target(bundle)
    rng = np.random.default_rng(5)
    held: list[tuple[int, ...]] = [make_tokens(engine, 4 + slot, seed=slot) for slot in range(3)]
    wanted_logits(engine, [span(slot, 0, text) for slot, text in enumerate(held)])
    for _ in range(8):
        spans = []
        for slot, text in enumerate(held):
            tokens = make_tokens(engine, int(rng.integers(1, 12)), seed=int(rng.integers(1e9)))
            parents = random_parents(rng, len(tokens))
            is_tree = rng.random() < 0.6
            spans.append(
                tree(slot, len(text), tokens, parents) if is_tree else span(slot, len(text), tokens)
            )
        wanted_logits(engine, spans)
        for slot, one in enumerate(spans):
            others = [other for other in range(3) if other != slot]
            before = [cache_of(engine, other, engine.capacity) for other in others]
            path: IntArray | tuple[int, ...]
            if one.parents is None:
                path = tuple(range(int(rng.integers(1, len(one.tokens) + 1))))
            else:
                path = path_to(int(rng.integers(0, len(one.tokens))), one.parents)
                engine.keep_path(slot, path)
            for other, cache in zip(others, before, strict=True):
                np.testing.assert_array_equal(cache_of(engine, other, engine.capacity), cache)
            held[slot] += tuple(one.tokens[node] for node in path)
        for slot, text in enumerate(held):
            wanted_logits(fresh, [span(slot, 0, text)])
            np.testing.assert_allclose(
                cache_of(engine, slot, len(text)),
                cache_of(fresh, slot, len(text)),
                rtol=0.0,
                atol=BRANCH_ATOL,
            )


def test_keeping_a_leading_chain_moves_nothing(bundle: Bundle) -> None:
    engine = open_target(bundle)
    wanted_logits(engine, [tree(0, 0, make_tokens(engine, NUM_NODES, seed=6))])
    before = cache_of(engine, 0, NUM_NODES)
    engine.keep_path(0, (0, 1, 2))
    np.testing.assert_array_equal(cache_of(engine, 0, NUM_NODES), before)


def test_a_kept_path_is_copied_in_path_order(bundle: Bundle) -> None:
    """Its own columns before, at the front after: ranges overlap, so order matters."""
    engine = open_target(bundle)
    wanted_logits(engine, [tree(0, 0, make_tokens(engine, NUM_NODES, seed=7))])
    before = cache_of(engine, 0, NUM_NODES)
    path = path_to(8, PARENTS)
    engine.keep_path(0, path)
    np.testing.assert_array_equal(cache_of(engine, 0, len(path)), before[:, :, list(path)])
    np.testing.assert_array_equal(
        cache_of(engine, 0, NUM_NODES)[:, :, len(path) :], before[:, :, len(path) :]
    )


def test_a_closed_engine_keeps_no_path(bundle: Bundle) -> None:
    engine = open_target(bundle)
    wanted_logits(engine, [tree(0, 0, make_tokens(engine, NUM_NODES, seed=8))])
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.keep_path(0, (0, 1))


def test_chains_go_packed_beside_trees_with_everybody_s_bits_unchanged(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights multiply each chain's own tokens, and a tree's nodes for the run of trees it stands in."""
    engine, alone = open_target(bundle), open_target(bundle)
    texts = [make_tokens(engine, 3 + slot, seed=20 + slot) for slot in range(4)]
    for one in (engine, alone):
        wanted_logits(one, [span(slot, 0, text, 0) for slot, text in enumerate(texts)])
    nodes, chain = make_tokens(engine, NUM_NODES, seed=30), make_tokens(engine, 3, seed=31)
    chunk = span(2, 5, make_tokens(engine, 40, seed=32))
    calls: list[tuple[int, int, int, bool]] = []
    find = engine._calls.of

    def spy(slot: int, sizes: PackedShape, *, is_tree: bool) -> object:
        calls.append((slot, sizes.num_rows, sizes.all_tokens, is_tree))
        return find(slot, sizes, is_tree=is_tree)

    monkeypatch.setattr(engine._calls, "of", spy)
    trees = {slot: tree(slot, 3 + slot, nodes) for slot in range(4)}
    small = tree(3, 6, nodes[:3], (0, 0), num_logits=1)
    chains = {slot: span(slot, 3 + slot, chain) for slot in range(4)}
    idle = {slot: span(slot, 3 + slot, ()) for slot in range(4)}
    for spans, expected in (
        ([chains[0], trees[1], chains[2], small], [(0, 4, 6, False), (1, 1, 9, True), (3, 1, 3, True)]),
        ([trees[0], trees[1], idle[2], chains[3]], [(0, 4, 3, False), (0, 2, 18, True)]),
        ([idle[0], idle[1], trees[2], small], [(2, 2, 18, True)]),
        ([trees[0], idle[1], idle[2], idle[3]], [(0, 1, 9, True)]),
        ([chains[0], trees[1], chunk, small],
            [(0, 4, 3, False), (2, 1, 40, False), (1, 1, 9, True), (3, 1, 3, True)]),
        ([idle[0], trees[1], chunk, idle[3]], [(2, 1, 40, False), (1, 1, 9, True)]),
    ):  # fmt: skip
        calls.clear()
        found = wanted_logits(engine, spans)
        assert calls == expected
        for slot, one in enumerate(spans):
            if one.tokens:
                wanted = wanted_logits(alone, [one])[0]
                np.testing.assert_array_equal(found[slot], wanted)
                length = one.start + len(one.tokens)
                np.testing.assert_array_equal(
                    cache_of(engine, slot, length), cache_of(alone, slot, length)
                )
            end = one.start + max(NUM_NODES + 1, len(one.tokens))
            assert not cache_of(engine, slot, 128)[:, :, end:].any()
