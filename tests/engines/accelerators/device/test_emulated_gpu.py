"""The code that drives a GPU, on an emulated one: streams, events, recordings, plans and the provider.

What the emulation shows is said in ``tests.emulation``: that the order asked for suffices whatever runs
late or early, that memory is there when it is used, and that every call is one the bindings take. It
shows nothing of a GPU's arithmetic, its speed, or its libraries.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.accelerators import pair
from outrider.engines.accelerators.device.base import HostDevice
from outrider.engines.accelerators.device.cuda import CudaDevice
from outrider.engines.accelerators.onnx import device_plan
from outrider.engines.base import BundleError, EngineError, FloatArray
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.onnx import session
from outrider.engines.opening import choose_device, open_engine, open_pair
from outrider.engines.pair import AUTO, DEVICE, HOST
from outrider.engines.sampling.base import ExactnessMode
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans
from outrider.export.weights.half_weights import BFLOAT16
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions

from tests.emulation import tensorrt_runtime
from tests.emulation.cuda_runtime import EmulatedCuda
from tests.emulation.install import emulate
from tests.engines.accelerators.halves import halve_bundle
from tests.engines.contract import MakeEngine, extend_one, make_tokens
from tests.engines.tree_contract import TreeContract
from tests.runtime.markov import spec
from tests.runtime.pair import PairHarness

# Of a device's two streams the first computes and the second uploads.
SCHEDULES: dict[str, Callable[[int], bool]] = {
    "all as late as may be": lambda number: False,
    "uploads ahead": lambda number: number % 2 == 1,
    "computing ahead": lambda number: number % 2 == 0,
}
CHUNK = 16


@pytest.fixture(scope="module")
def root(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with emulated plans in float32, for chains and trees."""
    root = tmp_path_factory.mktemp("emulated") / "bundle"
    shutil.copytree(tiny_bundle, root)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        for parts in ((), ("trees",)):
            options = BuildOptions(precision="float32", parts=parts)
            build_plans(root, options, report=lambda *step: None)
    return root


@pytest.fixture(scope="module")
def halves(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return halve_bundle(tiny_bundle, tmp_path_factory.mktemp("halves") / "bundle")


@pytest.fixture(scope="module")
def bfloats(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return halve_bundle(tiny_bundle, tmp_path_factory.mktemp("bfloats") / "bundle", BFLOAT16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    return emulate(monkeypatch)


@pytest.fixture(scope="module", params=SCHEDULES)
def scheduled(request: pytest.FixtureRequest) -> Iterator[EmulatedCuda]:
    with pytest.MonkeyPatch.context() as patch:
        yield emulate(patch, eager=SCHEDULES[request.param])


class TestPlans(TreeContract):
    atol = branch_atol = 1e-4

    @pytest.fixture
    def make_engine(self, scheduled: EmulatedCuda, root: Path) -> MakeEngine:
        bundle = load_bundle(root)
        options = {"device": "tensorrt:0", "max_batch": 3, "with_trees": True}
        return lambda: open_engine(bundle, "target", **options)


class TestProvider(TreeContract):
    atol = branch_atol = 1e-4

    @pytest.fixture
    def make_engine(self, scheduled: EmulatedCuda, root: Path) -> MakeEngine:
        bundle = load_bundle(root)
        return lambda: open_engine(bundle, "target", device="cuda:0", max_batch=3, with_trees=True)


class TestProviderInBfloat16(TreeContract):
    """A bundle with bfloat16 weights; the emulated provider computes by the graphs' twins."""

    atol = branch_atol = 0.4

    @pytest.fixture
    def make_engine(self, scheduled: EmulatedCuda, bfloats: Bundle) -> MakeEngine:
        return lambda: open_engine(bfloats, "target", device="cuda:0", max_batch=3, with_trees=True)

    def test_it_computes_in_bfloat16(self, make_engine: MakeEngine) -> None:
        assert make_engine().precision == "bfloat16"


class TestProviderInHalves(TreeContract):
    """A bundle with float16 weights."""

    atol = branch_atol = 5e-2

    @pytest.fixture
    def make_engine(self, scheduled: EmulatedCuda, halves: Bundle) -> MakeEngine:
        return lambda: open_engine(halves, "target", device="cuda:0", max_batch=3, with_trees=True)

    def test_it_computes_in_float16(self, make_engine: MakeEngine) -> None:
        assert make_engine().precision == "float16"


def single_tokens(bundle: Bundle, device: str) -> FloatArray:
    """Logits of a text by single tokens, each step of one shape over one place."""
    engine = open_engine(bundle, "target", device=device, max_batch=3)
    tokens = make_tokens(engine, 6, seed=1)
    found = [extend_one(engine, 0, start, [token])[0] for start, token in enumerate(tokens)]
    engine.close()
    return np.stack(found)


@pytest.mark.parametrize("device", ["tensorrt:0", "cuda:0"])
def test_an_opening_that_fails_leaves_nothing_on_the_device(
    cuda: EmulatedCuda, root: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(root)
    with pytest.raises(BundleError, match="max_batch 99: the bundle allows"):
        open_engine(bundle, "target", device=device, max_batch=99)
    assert (cuda.streams, cuda.events, cuda.memory) == ({}, {}, {})

    def refuse(*samplers: object) -> None:
        assert cuda.memory
        raise EngineError("no room")

    monkeypatch.setattr(pair, "MixedSampler", refuse)
    with pytest.raises(EngineError, match="no room"):
        open_pair(bundle, device=device, sampler=DEVICE, max_batch=3)
    assert (cuda.streams, cuda.events, cuda.memory) == ({}, {}, {})


def test_a_graph_that_computes_lengths_is_refused_since_its_start_would_stay_the_first(
    cuda: EmulatedCuda, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(root)
    expected = single_tokens(bundle, "cpu")
    np.testing.assert_allclose(single_tokens(bundle, "cuda:0"), expected, rtol=0, atol=1e-4)
    monkeypatch.setattr(device_plan, "_device_graphs", lambda *model: device_plan._OF_HOST)
    with pytest.raises(
        EngineError, match=r"model\.onnx: the CUDA provider reads 'start' on the host"
    ):
        single_tokens(bundle, "cuda:0")
    monkeypatch.setattr(session, "_check_on_device", lambda *opened: None)
    wrong = np.abs(single_tokens(bundle, "cuda:0") - expected).max(axis=1)
    assert wrong[0] < 1e-4
    assert wrong[1:].min() > 1e-2


def requests(**options: object) -> list[RequestSpec]:
    """More than there are slots, with prompts of several chunks."""
    asked = {"drafter": "model", "gamma": 3, "mode": ExactnessMode.SEED_STABLE} | options
    return [
        spec(
            f"{index}",
            tuple((7 * index + 3 * place) % 500 + 2 for place in range(length)),
            seed=index,
            max_tokens=9 + index,
            **asked,
        )
        for index, length in enumerate((5, 40, 1, 18, 3, 33))
    ]


def serve(bundle: Bundle, device: str, place: str, **options: object) -> PairHarness:
    pair = open_pair(bundle, device=device, sampler=place, max_batch=4, **options)
    return PairHarness.over(pair, bundle, max_running=4, prefill_chunk=CHUNK)


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[float, list[tuple[int, ...]]]:
    host = serve(load_bundle(root), "cpu", HOST)
    answers = {heat: host.answers(requests(temperature=heat)) for heat in (0.0, 1.0)}
    host.pair.close()
    return answers


@pytest.mark.parametrize("device", ["tensorrt:0", "cuda:0"])
def test_rounds_answer_as_the_host_does_whatever_runs_late(
    scheduled: EmulatedCuda,
    root: Path,
    expected: dict[float, list[tuple[int, ...]]],
    device: str,
) -> None:
    harness = serve(load_bundle(root), device, DEVICE)
    traffic, launched = harness.pair.rounds.device.traffic, scheduled.num_launched
    for heat, answers in expected.items():
        copies, waits = traffic.num_to_host, traffic.num_waits
        assert harness.answers(requests(temperature=heat)) == answers
        reasons = harness.worker.snapshot().host_fallback_reasons
        assert set(reasons) == {""}
        assert traffic.num_to_host - copies == traffic.num_waits - waits
    assert traffic.num_to_host == sum(harness.worker.snapshot().host_fallback_reasons.values())
    assert scheduled.num_launched > launched
    harness.pair.close()


def test_what_is_opened_is_freed(cuda: EmulatedCuda, root: Path) -> None:
    bundle = load_bundle(root)
    for device in ("tensorrt:0", "cuda:0"):
        for place in (DEVICE, HOST):
            harness = serve(bundle, device, place, with_trees=True)
            harness.answers(requests(temperature=0.0))
            assert cuda.memory and cuda.streams and cuda.events
            harness.pair.close()
            left = (cuda.memory, cuda.streams, cuda.events, cuda.graphs)
            assert not any(left), (device, place)


def unordered(device: CudaDevice, first: int, second: int) -> None:
    """Stands for ``_order``: nothing waits for anything."""


def unordered_zeros(device: CudaDevice, first: int, second: int) -> None:
    if first != device.stream:
        ORDER(device, first, second)


def no_wait(device: CudaDevice, mark: int | None = None) -> None:
    device.traffic.reach(device.traffic.mark() if mark is None else mark)


ORDER = CudaDevice._order


@pytest.mark.parametrize("device", ["tensorrt:0", "cuda:0"])
@pytest.mark.parametrize(
    ("name", "mistake", "schedule"),
    [
        ("_order", unordered, "computing ahead"),
        ("_order", unordered, "all as late as may be"),
        ("_order", unordered_zeros, "uploads ahead"),
        ("wait", no_wait, "all as late as may be"),
    ],
)
def test_a_missing_order_shows(
    root: Path,
    expected: dict[float, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    name: str,
    mistake: Callable[..., None],
    schedule: str,
) -> None:
    emulate(monkeypatch, eager=SCHEDULES[schedule])
    monkeypatch.setattr(CudaDevice, name, mistake)
    harness = serve(load_bundle(root), device, DEVICE)
    try:
        found = harness.answers(requests(temperature=1.0))
    except Exception:  # whatever comes of garbage
        return
    assert found != expected[1.0]


def test_what_cannot_be_recorded_is_run_as_it_is(
    cuda: EmulatedCuda, root: Path, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    cuda.can_record = False
    harness = serve(load_bundle(root), "tensorrt:0", DEVICE)
    assert harness.answers(requests(temperature=1.0)) == expected[1.0]
    assert cuda.num_launched == 0
    harness.pair.close()
    assert not cuda.graphs


@pytest.mark.parametrize("records", [True, False])
def test_the_provider_s_runs_are_recorded_unless_that_is_switched_off(
    cuda: EmulatedCuda, root: Path, expected: dict[float, list[tuple[int, ...]]], records: bool
) -> None:
    options = {} if records else {"enable_cuda_graph": "0"}
    harness = serve(load_bundle(root), "cuda:0", DEVICE, provider_options=options)
    assert harness.answers(requests(temperature=1.0)) == expected[1.0]
    assert (cuda.num_launched > 3) is records
    harness.pair.close()
    assert not cuda.graphs


def test_auto_takes_plans_that_run_then_the_provider_then_the_host(
    cuda: EmulatedCuda, root: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(root)
    assert str(choose_device("auto", bundle).device) == "tensorrt:0"
    cuda.capability = (9, 0)
    choice = choose_device("auto", bundle)
    assert str(choice.device) == "cuda:0"
    assert "built for compute capability 8.0, this machine has 9.0" in choice.reason
    cuda.capability = (8, 0)
    cuda.loads_plans = False
    choice = choose_device("auto", bundle)
    assert str(choice.device) == "cuda:0"
    assert "does not run here: the driver is too old" in choice.reason
    with pytest.raises(EngineError, match="device 1: this machine has 1 CUDA devices"):
        open_pair(bundle, device="cuda:1")
    without = load_bundle(tiny_bundle)
    assert "the bundle has none; run outrider build" in choose_device("auto", without).reason
    target = replace(bundle.manifest.target, device_precision="")
    before = replace(bundle, manifest=replace(bundle.manifest, target=target))
    choice = choose_device("auto", before)
    assert str(choice.device) == "cpu"
    assert "cuda (target: no device.onnx; export the bundle again)" in choice.reason
    emulate(monkeypatch, has_provider=False).capability = (9, 0)
    choice = choose_device("auto", bundle)
    assert str(choice.device) == "cpu"
    assert "this machine has 9.0" in choice.reason
    assert "has no CUDAExecutionProvider" in choice.reason


def test_kernels_are_compiled_at_the_first_start_alone(
    cuda: EmulatedCuda, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "bundle"))
    compiled = []
    for _ in range(2):
        open_pair(load_bundle(copy), device="tensorrt:0").close()
        compiled.append(cuda.num_compiled)
    (file,) = (tmp_path / "bundle.kernels").iterdir()
    assert file.name.startswith("rtx-")
    assert file.stat().st_mode & 0o777 == 0o600
    assert compiled == [2, 2]
    monkeypatch.setattr(tensorrt_runtime.Cache, "environment", "another driver")
    open_pair(load_bundle(copy), device="tensorrt:0").close()
    assert cuda.num_compiled == 4
    file.chmod(0o666)  # anybody could have written it
    open_pair(load_bundle(copy), device="tensorrt:0").close()
    assert cuda.num_compiled == 6
    file.unlink()
    file.mkdir()  # where nothing can be kept
    open_pair(load_bundle(copy), device="tensorrt:0").close()
    assert cuda.num_compiled == 8
    assert [*(tmp_path / "bundle.kernels").iterdir()] == [file]


def test_choosing_a_device_loads_no_plan(cuda: EmulatedCuda, root: Path) -> None:
    """A start used to load the smallest plan twice."""
    bundle = load_bundle(root)
    assert str(choose_device("auto", bundle).device) == "tensorrt:0"
    assert cuda.num_loaded == 0
    open_pair(bundle, device="auto").close()
    assert cuda.num_loaded == 2


def test_bfloat16_is_refused_where_nothing_multiplies_in_it(
    cuda: EmulatedCuda, bfloats: Bundle
) -> None:
    assert str(choose_device("auto", bfloats).device) == "cuda:0"
    cuda.capability = (7, 5)
    rule = "target: bfloat16 needs compute capability 8.0, this GPU has 7.5; export with"
    choice = choose_device("auto", bfloats)
    assert str(choice.device) == "cpu"
    assert rule in choice.reason
    with pytest.raises(BundleError, match=rule):
        open_engine(bfloats, "target", device="cuda:0")
    with pytest.raises(BundleError, match="target: bfloat16 is for GPUs"):
        device_plan.open_on_device(
            bfloats, bfloats.manifest.target, HostDevice(), runs_device_graphs=True
        )


def test_integers_compute_in_16_bits_on_the_device(
    cuda: EmulatedCuda, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Near the very integers of the host, which multiplies them by activations of 8 bits."""
    for weights, precision, atol in (("int4", "bfloat16", 0.8), ("int8", "float16", 0.5)):
        bundle = halve_bundle(tiny_bundle, tmp_path / weights, weights, precision)
        engine = open_engine(bundle, "target", device="cuda:0", max_batch=3, with_trees=True)
        assert engine.precision == precision
        engine.close()
        found, expected = (single_tokens(bundle, device) for device in ("cuda:0", "cpu"))
        assert 1e-3 < np.abs(found - expected).max() < atol


@pytest.mark.parametrize("has_provider", [True, False])
def test_a_server_opens_on_plans_alone(
    monkeypatch: pytest.MonkeyPatch, root: Path, *, has_provider: bool
) -> None:
    emulate(monkeypatch, has_provider=has_provider)
    config = ServerConfig(default_gamma=3, default_drafter="tree")
    serving = load_model(root, ServeOptions(device="auto", config=config))
    parts = serving.worker._parts
    assert parts.rounds is not None
    assert parts.target.limits.max_tree_nodes > 0
    assert [plan.entry.capacity for plan in parts.target._plans] == [768]


@pytest.mark.parametrize("device", ["tensorrt:0", "cuda:0"])
def test_without_a_compiler_of_kernels_the_host_samples_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    expected: dict[float, list[tuple[int, ...]]],
    device: str,
) -> None:
    emulate(monkeypatch, has_kernels=False)
    bundle = load_bundle(root)
    harness = serve(bundle, device, AUTO)
    assert harness.pair.place == "on the host: no compiler here"
    assert harness.answers(requests(temperature=1.0)) == expected[1.0]
    harness.pair.close()
    with pytest.raises(EngineError, match="sampler device: no compiler here"):
        open_pair(bundle, device=device, sampler=DEVICE)
