"""Sources over a device's memory: the CUDA provider's code, on the CPU's provider."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.onnx.device_plan import open_on_device
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, write_manifest
from outrider.engines.opening import open_engine
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.weights.half_weights import store_halves

from tests.engines.accelerators.device.strict_device import StrictDevice
from tests.engines.contract import MakeEngine, extend_one, span, wanted_logits
from tests.engines.handmade_sources import write_source_bundle
from tests.engines.source_contract import SourceContract, source
from tests.engines.tree_contract import TreeContract

TEXT = (5, 6, 7)
NAN_TOKEN = 31


@pytest.fixture(scope="module")
def exported(tiny_text2text_bundle: Path) -> Bundle:
    return load_bundle(tiny_text2text_bundle)


@pytest.fixture(scope="module")
def handmade(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Token ``NAN_TOKEN`` of a source is embedded as NaN."""
    root = write_source_bundle(tmp_path_factory.mktemp("sources") / "bundle", nan_token=NAN_TOKEN)
    return with_device_graphs(root, "float32")


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with float16 weights, and without NaN."""
    root = write_source_bundle(tmp_path_factory.mktemp("halves") / "bundle")
    store_halves(root / "target" / "model.onnx", "float16")
    return with_device_graphs(root, "float16")


def with_device_graphs(root: Path, precision: str) -> Bundle:
    """A bundle, with the graphs of accelerators in a precision."""
    derive_device_graphs(root / "target" / "model.onnx", precision, with_trees=False)
    manifest = Manifest.from_json((root / "manifest.json").read_text())
    target = replace(manifest.target, device_precision=precision)
    write_manifest(root, replace(manifest, target=target, files=hash_files(root)))
    return load_bundle(root)


def on_device(bundle: Bundle, *, runs_device_graphs: bool = True, **options: bool) -> PlanEngine:
    target = bundle.manifest.target
    kinds = {"runs_device_graphs": runs_device_graphs} | options
    return open_on_device(bundle, target, StrictDevice(), **kinds)


class TestExportedOnDevice(TreeContract, SourceContract):
    """The graphs of the host, with its bits."""

    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, exported: Bundle) -> MakeEngine:
        return lambda: on_device(exported, runs_device_graphs=False, with_trees=True)


class TestDeviceGraphs(TreeContract, SourceContract):
    """What an accelerator runs of a bundle with float32 weights, trees among it."""

    atol = branch_atol = 1e-4

    @pytest.fixture
    def make_engine(self, exported: Bundle) -> MakeEngine:
        return lambda: on_device(exported, with_trees=True)


class TestHalvesOnDevice(SourceContract):
    """What an accelerator runs of a bundle with float16 weights: caches of sources have 16 bits too."""

    atol = 5e-2

    @pytest.fixture
    def make_engine(self, halves: Bundle) -> MakeEngine:
        return lambda: on_device(halves)


def test_it_has_the_bits_of_the_host_engine(exported: Bundle) -> None:
    engine = on_device(exported, runs_device_graphs=False)
    host = open_engine(exported, "target")
    sources = [source(slot, range(3, 5 + 40 * slot)) for slot in range(3)]
    for one in (engine, host):
        one.read(sources)
    for begin, end in ((0, 2), (2, 3)):
        spans = [span(slot, begin, TEXT[begin:end]) for slot in range(3)]
        for found, expected in zip(
            wanted_logits(engine, spans), wanted_logits(host, spans), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


def assert_nearly_as_the_host(bundle: Bundle, engine: PlanEngine, *, atol: float) -> None:
    host = open_engine(bundle, "target")
    for one in (engine, host):
        one.read([source(0, (3, 4, 5)), source(1, range(2, 30))])
    for slot in range(2):
        found, expected = (extend_one(one, slot, 0, TEXT) for one in (engine, host))
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_float32_answers_nearly_as_the_host_does(exported: Bundle) -> None:
    assert_nearly_as_the_host(exported, on_device(exported), atol=1e-4)


def test_halves_answer_nearly_as_the_host_does(halves: Bundle) -> None:
    engine = on_device(halves)
    assert engine.precision == "float16"
    assert_nearly_as_the_host(halves, engine, atol=5e-2)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_nearly_as_the_host(halves, engine, atol=1e-6)


@pytest.mark.parametrize("shares", [False, True])
def test_nan_left_by_a_longer_source_is_never_read(handmade: Bundle, shares: bool) -> None:
    engine = on_device(handmade)
    engine.read([source(2, (1, 2, 3))])
    expected = extend_one(engine, 2, 0, TEXT)
    engine.read([source(0, (NAN_TOKEN,) * 30)])
    assert np.isnan(extend_one(engine, 0, 0, TEXT)).all()
    if shares:
        engine.share_source(2, [0])
    else:
        engine.read([source(0, (1, 2, 3))])
    np.testing.assert_allclose(extend_one(engine, 0, 0, TEXT), expected, rtol=0, atol=1e-5)


def test_a_row_without_a_source_attends_to_a_column_of_zeros(handmade: Bundle) -> None:
    """Over no column at all a device's attention may answer NaN, which its cache of texts would keep."""
    engine = on_device(handmade)
    engine.read([source(1, (1, 2, 3))])
    assert engine._sources is not None
    feeds = engine._sources.feeds([span(0, 0), span(1, 0, TEXT)])
    assert feeds["source_length"].tolist() == [1, 3]
    engine.extend([span(0, 0), span(1, 0, TEXT)])
    engine.read([source(0, (4,))])
    assert np.isfinite(extend_one(engine, 0, 0, TEXT)).all()


def test_a_failure_of_the_library_leaves_the_slots_without_source_and_text(
    handmade: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_device(handmade)
    engine.read([source(slot, (1, 2, 3)) for slot in range(3)])
    expected = wanted_logits(engine, [span(slot, 0, TEXT) for slot in range(3)])

    def fail(*call: object) -> None:
        raise EngineError("no launch")

    assert engine._sources is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine._sources._plan, "run", fail)
        with pytest.raises(EngineError, match="no launch"):
            engine.read([source(1, (1,)), source(2, (1,) * 90)])
    for slot in (1, 2):
        with pytest.raises(EngineError, match=f"slot {slot} has no source"):
            engine.extend([span(slot, 0, TEXT)])
        with pytest.raises(EngineError, match="beyond its 0 valid tokens"):
            engine.extend([span(slot, 3, TEXT)])
    again = extend_one(engine, 0, 2, TEXT[2:])
    np.testing.assert_allclose(again, expected[0][2:], rtol=0, atol=1e-5)


def test_all_memory_is_given_back(handmade: Bundle) -> None:
    device = StrictDevice()
    engine = open_on_device(handmade, handmade.manifest.target, device, runs_device_graphs=True)
    engine.read([source(0, (1, 2, 3))])
    extend_one(engine, 0, 0, TEXT)
    engine.close()
    assert device._memory == {}


def test_a_graph_that_is_not_as_declared_is_refused(handmade: Bundle, tmp_path: Path) -> None:
    root = Path(shutil.copytree(handmade.root, tmp_path / "bundle"))
    shutil.copyfile(root / "target" / "device.onnx", root / "target" / "device_encode.onnx")
    changed = replace(handmade, root=root)
    with pytest.raises(
        BundleError, match=r"target/device_encode\.onnx: tensors missing or unknown"
    ):
        on_device(changed)


def test_a_bundle_of_before_accelerators_read_sources_is_refused_there(tmp_path: Path) -> None:
    bundle = load_bundle(write_source_bundle(tmp_path / "bundle"))
    reason = r"target: no device\.onnx; export the bundle again"
    with pytest.raises(BundleError, match=reason):
        open_on_device(bundle, bundle.manifest.target, StrictDevice(), runs_device_graphs=True)
