"""The engine over plans, run on the host: every decision of it but the kernels and the copies."""

import math
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.accelerators.device.base import ALIGNMENT, HostDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.padding import row_sizes
from outrider.engines.accelerators.device.trees import PlanTrees
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.plans import Shape

from tests.engines.accelerators.device.host_plan import open_host_engine, write_graphs
from tests.engines.contract import EngineContract, MakeEngine, extend_one, make_tokens, span
from tests.engines.tree_contract import TreeContract, tree

CAPACITIES = (128, 768)


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans")
    for precision in ("float32", "float16"):
        write_graphs(tiny_bundle, path, precision, CAPACITIES)
    return path


class TestFloat32(EngineContract):
    atol = 2e-5

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, folder: Path) -> MakeEngine:
        return lambda: open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)[0]


class TestFloat16(EngineContract):
    # Of logits up to 10; caches and products in 16 bits.
    atol = 5e-2

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, folder: Path) -> MakeEngine:
        return lambda: open_host_engine(tiny_bundle, folder, "float16", CAPACITIES[1:])[0]


class TestTreesFloat32(TreeContract):
    atol = branch_atol = 2e-5

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, folder: Path) -> MakeEngine:
        options = {"with_trees": True}
        return lambda: open_host_engine(tiny_bundle, folder, "float32", CAPACITIES, **options)[0]


class TestTreesFloat16(TreeContract):
    atol = branch_atol = 5e-2

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, folder: Path) -> MakeEngine:
        options = {"with_trees": True, "row_sizes": (3,)}
        return lambda: open_host_engine(tiny_bundle, folder, "float16", CAPACITIES, **options)[0]


class TestPaddedRows(EngineContract):
    """Every call runs as many rows as there are slots, where they have room."""

    # Kernels of the host differ in the last bits by the number of rows.
    atol = 2e-5

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, folder: Path) -> MakeEngine:
        return lambda: open_host_engine(tiny_bundle, folder, "float32", CAPACITIES, (3,))[0]


def test_a_step_is_one_upload_one_run_one_download_one_wait(
    tiny_bundle: Path, folder: Path
) -> None:
    engine, plans, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    for slot in range(3):
        engine.extend([span(slot, 0, (1, 2, 3, 4))])
    before = (device.traffic.num_to_device, device.traffic.num_to_host, device.traffic.num_waits)
    engine.extend([span(slot, 4, (5, 6, 7)) for slot in range(3)])
    traffic = device.traffic
    after = (traffic.num_to_device, traffic.num_to_host, traffic.num_waits)
    assert tuple(np.subtract(after, before)) == (1, 1, 1)
    assert plans[0].shapes[-1] == ("verify", Shape(3, 3, 3))


def test_rows_that_no_profile_holds_together_run_alone(tiny_bundle: Path, folder: Path) -> None:
    engine, plans, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    assert engine.limits.max_prompt_rows == 1
    long, short = make_tokens(engine, 20, seed=1), make_tokens(engine, 2, seed=2)
    found = engine.extend([span(0, 0, long), span(1, 0, short)]).copy()
    assert [name for name, _ in plans[0].shapes] == ["prefill", "step"]
    np.testing.assert_allclose(found[0], extend_one(engine, 2, 0, long), atol=2e-5)
    np.testing.assert_allclose(found[1, :2], extend_one(engine, 2, 0, short), atol=2e-5)


def test_the_cache_moves_to_the_next_capacity_with_all_its_rows(
    tiny_bundle: Path, folder: Path
) -> None:
    engine, plans, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens, other = make_tokens(engine, 140, seed=3), make_tokens(engine, 9, seed=4)
    extend_one(engine, 1, 0, other[:6])
    extend_one(engine, 0, 0, tokens[:100])
    assert engine.capacity == 128
    grown = extend_one(engine, 0, 100, tokens[100:])
    assert engine.capacity == 768
    assert plans[1].shapes == [("prefill", Shape(1, 40, 40))]
    np.testing.assert_allclose(grown, extend_one(engine, 2, 0, tokens)[100:], atol=2e-5)
    kept = extend_one(engine, 1, 6, other[6:])
    np.testing.assert_allclose(kept, extend_one(engine, 2, 0, other)[6:], atol=2e-5)


def test_the_cache_shrinks_once_the_long_slot_is_gone(tiny_bundle: Path, folder: Path) -> None:
    engine, _, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 150, seed=5)
    extend_one(engine, 0, 0, tokens[:20])
    extend_one(engine, 1, 0, tokens)
    engine.trim([20, 150])
    assert engine.capacity == 768
    engine.trim([20])
    assert engine.capacity == 128
    again = extend_one(engine, 0, 20, tokens[20:25])
    np.testing.assert_allclose(again, extend_one(engine, 2, 0, tokens[:25])[20:], atol=2e-5)


class Ledger:
    """Counts the live bytes of a device, and refuses those beyond a limit."""

    def __init__(self, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes = {at: held.nbytes - ALIGNMENT for at, held in device._memory.items()}
        self.most = self.live
        self.limit = math.inf
        self._allocate, self._free = device.allocate, device.free
        monkeypatch.setattr(device, "allocate", self.allocate)
        monkeypatch.setattr(device, "free", self.free)

    @property
    def live(self) -> int:
        return sum(self.sizes.values())

    def allocate(self, num_bytes: int) -> int:
        if self.live + num_bytes > self.limit:
            raise EngineError("out of memory")
        pointer = self._allocate(num_bytes)
        self.sizes[pointer] = num_bytes
        self.most = max(self.most, self.live)
        return pointer

    def free(self, pointer: int) -> None:
        self._free(pointer)
        del self.sizes[pointer]


def buffer_sizes(engine: PlanEngine) -> tuple[int, int, int]:
    """Number of the cache's buffers, and bytes of one at both capacities."""
    cache = engine._cache
    return len(cache.pointers(0)), *(cache._buffer_bytes(size) for size in CAPACITIES)


def test_a_cache_grows_and_shrinks_buffer_by_buffer(
    tiny_bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 150, seed=6)
    extend_one(engine, 0, 0, tokens[:100])
    count, small, large = buffer_sizes(engine)
    ledger = Ledger(device, monkeypatch)
    others = ledger.live - count * small
    engine._reserve(200)
    assert ledger.live == others + count * large
    # Two old buffers beside all that are new; together they would be more.
    assert ledger.most == others + count * large + 2 * small < others + count * (large + small)
    ledger.most = 0
    engine.trim([20])
    assert ledger.live == others + count * small
    assert ledger.most == others + count * large + 2 * small


@pytest.mark.parametrize("num_fitting", range(4))
def test_without_memory_for_a_larger_cache_the_smaller_one_goes_on(
    tiny_bundle, folder, monkeypatch, num_fitting
) -> None:
    engine, _, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 140, seed=6)
    expected = extend_one(engine, 2, 0, tokens[:30])
    extend_one(engine, 0, 0, tokens[:100])
    extend_one(engine, 1, 0, tokens[:20])
    count, small, large = buffer_sizes(engine)
    assert num_fitting < count
    ledger = Ledger(device, monkeypatch)
    before = ledger.live
    # From the third new buffer on, an old one has gone before.
    ledger.limit = before + num_fitting * large - max(0, num_fitting - 2) * small
    with pytest.raises(EngineError, match="out of memory"):
        extend_one(engine, 0, 100, tokens[100:])
    assert (engine.capacity, ledger.live, ledger.most) == (128, before, ledger.limit)
    np.testing.assert_allclose(extend_one(engine, 1, 20, tokens[20:30]), expected[20:], atol=2e-5)
    ledger.limit = math.inf
    grown = extend_one(engine, 0, 100, tokens[100:])
    assert engine.capacity == 768
    np.testing.assert_allclose(grown, extend_one(engine, 2, 0, tokens)[100:], atol=2e-5)


@pytest.mark.parametrize("num_fitting", range(2))
def test_without_memory_for_a_smaller_cache_the_larger_one_goes_on(
    tiny_bundle, folder, monkeypatch, num_fitting
) -> None:
    engine, _, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 150, seed=5)
    extend_one(engine, 0, 0, tokens[:20])
    extend_one(engine, 1, 0, tokens)
    _, small, _ = buffer_sizes(engine)
    ledger = Ledger(device, monkeypatch)
    before = ledger.live
    ledger.limit = before + num_fitting * small
    with pytest.raises(EngineError, match="out of memory"):
        engine.trim([20])
    ledger.limit = math.inf
    assert (engine.capacity, ledger.live) == (768, before)
    again = extend_one(engine, 0, 20, tokens[20:25])
    np.testing.assert_allclose(again, extend_one(engine, 2, 0, tokens[:25])[20:], atol=2e-5)
    engine.trim([25])
    assert engine.capacity == 128


def test_a_cache_that_cannot_move_back_fails_every_call(tiny_bundle, folder, monkeypatch) -> None:
    engine, _, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 140, seed=6)
    extend_one(engine, 0, 0, tokens[:100])
    ledger = Ledger(device, monkeypatch)
    # Once the first old buffer is given back, nothing more can be had.
    monkeypatch.setattr(device, "free", lambda at: (setattr(ledger, "limit", 0), ledger.free(at)))
    with pytest.raises(EngineError, match="out of memory"):
        extend_one(engine, 0, 100, tokens[100:])
    for call in (
        lambda: extend_one(engine, 0, 0, tokens[:5]),
        lambda: engine.move_slot(0, 1, 5),
        lambda: engine._cache.resize(CAPACITIES[1]),
    ):
        with pytest.raises(EngineError, match="memory was lost while it was resized; open the"):
            call()


def test_a_copy_that_fails_while_a_cache_grows_costs_no_memory(
    tiny_bundle, folder, monkeypatch
) -> None:
    engine, _, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    tokens = make_tokens(engine, 140, seed=6)
    extend_one(engine, 0, 0, tokens[:100])
    ledger = Ledger(device, monkeypatch)
    before = ledger.live

    def refuse(*rows: object, **sizes: object) -> None:
        raise EngineError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy_rows", refuse)
        with pytest.raises(EngineError, match="the copy failed"):
            extend_one(engine, 0, 100, tokens[100:])
    assert (engine.capacity, ledger.live) == (128, before)


def test_plans_too_small_for_the_limits_are_refused(tiny_bundle: Path, folder: Path) -> None:
    with pytest.raises(BundleError, match="no plan with a cache of 768 tokens"):
        open_host_engine(tiny_bundle, folder, "float32", (128,))
    manifest = load_bundle(tiny_bundle).manifest
    with pytest.raises(BundleError, match="no plan with a cache"):
        limits = load_bundle(tiny_bundle).limits(manifest.target)
        PlanEngine([], HostDevice(), manifest.target, limits)


def test_without_plans_for_them_no_trees_are_taken(tiny_bundle: Path, folder: Path) -> None:
    engine, _, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    for refused in (
        lambda: engine.keep_path(0, (0,)),
        lambda: engine.extend([tree(0, 0, (1, 2), (0,))]),
    ):
        with pytest.raises(EngineError, match="slot 0: this engine takes no trees"):
            refused()


def test_a_tree_is_one_upload_and_its_path_is_kept_without_a_wait(
    tiny_bundle: Path, folder: Path
) -> None:
    engine, plans, device = open_host_engine(
        tiny_bundle, folder, "float32", CAPACITIES, with_trees=True
    )
    engine.extend([span(0, 0, (1, 2, 3), 0), span(1, 0, (4, 5, 6), 0)])
    engine.extend_on_device([tree(0, 3, (7, 8, 9), (0, 0)), span(1, 3, (7,))])
    assert (device.traffic.num_to_device, device.traffic.num_waits) == (2, 0)
    engine.keep_path(0, (0, 2))
    assert (device.traffic.num_to_device, device.traffic.num_waits) == (3, 0)
    engine.extend_on_device([tree(0, 5, (1, 2, 3), (0, 1))])
    # The leading chain lies where it belongs.
    engine.keep_path(0, (0, 1, 2))
    assert device.traffic.num_to_device == 4
    # Rows of a batch without a tree run the plan of chains.
    assert [name for name, _ in plans[0].shapes] == ["verify"]


def test_plans_for_trees_must_match_those_for_chains(tiny_bundle: Path, folder: Path) -> None:
    engine, plans, device = open_host_engine(
        tiny_bundle, folder, "float32", CAPACITIES[1:], with_trees=True
    )
    small, _, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    model, trees = load_bundle(tiny_bundle).manifest.target, engine._trees
    with pytest.raises(BundleError, match="no plan takes trees in a cache of 128 tokens"):
        PlanEngine([*plans, *small._plans], device, model, engine.limits, trees=trees)
    with pytest.raises(BundleError, match="no plan keeps a path in a cache of 768 tokens"):
        PlanTrees(plans, [], device, last_position=9)


def test_closing_twice_is_once(tiny_bundle: Path, folder: Path) -> None:
    engine, _, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    engine.close()
    engine.close()


def test_a_call_of_the_same_shape_is_the_same_run(tiny_bundle: Path, folder: Path) -> None:
    """Also where several are enqueued before the device has done any: recordings stay good."""
    engine, plans, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES)
    addresses: list[dict[str, int]] = []
    run = plans[0].run

    def noting(profile: int, shape: Shape, given: dict[str, int]) -> None:
        addresses.append(dict(given))
        run(profile, shape, given)

    plans[0].run = noting
    extend_one(engine, 0, 0, make_tokens(engine, 40, seed=6))
    first = len(addresses)
    for start in (40, 41, 42):
        engine.extend_on_device([span(0, start, (7,))])
    engine.extend([span(0, 43, (7,))])
    engine.extend_on_device([span(0, 44, (7,))])
    assert addresses[first:] == [addresses[first]] * 5


def test_rows_are_padded_to_a_size_and_nobody_sees_it(tiny_bundle: Path, folder: Path) -> None:
    engine, plans, device = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES, (1, 3))
    prompts = [make_tokens(engine, length, seed=length) for length in (9, 14, 5)]
    for slot, prompt in enumerate(prompts):
        extend_one(engine, slot, 0, prompt[:-3])
    plans[0].shapes.clear()
    # Two of three rows: the third, whose turn it is not, is extended behind its tokens, and keeps them.
    spans = [span(slot, len(prompts[slot]) - 3, prompts[slot][-3:]) for slot in range(2)]
    found = engine.extend(spans).copy()
    assert found.shape == (2, 3, 512)
    assert plans[0].shapes == [("verify", Shape(3, 3, 3))]
    for slot in range(2):
        alone = extend_one(engine, slot, 0, prompts[slot])[-3:]
        np.testing.assert_allclose(found[slot], alone, atol=2e-5)
    third = extend_one(engine, 2, 2, prompts[2][-3:])
    np.testing.assert_allclose(third, extend_one(engine, 2, 0, prompts[2])[-3:], atol=2e-5)
    # From slot 1 on there are no three rows; a prompt runs alone.
    plans[0].shapes.clear()
    engine.extend([span(slot, 0, (1, 2)) for slot in (1, 2)])
    engine.extend([span(0, 0, make_tokens(engine, 40, seed=1), 0)])
    assert plans[0].shapes == [("step", Shape(2, 2, 2)), ("prefill", Shape(1, 40, 1))]
    device.wait()


def test_a_row_without_room_is_not_padded_over(tiny_bundle: Path, folder: Path) -> None:
    engine, plans, _ = open_host_engine(tiny_bundle, folder, "float32", CAPACITIES, (3,))
    long = make_tokens(engine, 127, seed=2)
    extend_one(engine, 2, 0, long)
    plans[0].shapes.clear()
    engine.extend([span(0, 0, (5, 6))])
    assert plans[0].shapes == [("step", Shape(1, 2, 2))]
    assert engine.capacity == 128
    last = extend_one(engine, 2, 126, long[126:])
    np.testing.assert_allclose(last, extend_one(engine, 1, 0, long)[126:], atol=2e-5)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (5, (1, 2, 3, 4, 5)), (8, (1, 2, 3, 4, 6, 8))]
)
def test_row_sizes_grow_by_halves_up_to_all_slots(most: int, sizes: tuple[int, ...]) -> None:
    assert row_sizes(most) == sizes
