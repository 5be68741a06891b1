"""The canonical graphs over a device's memory: the CUDA provider's code, on the CPU's provider."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.transfers import DeviceTokens
from outrider.engines.accelerators.onnx.device_plan import open_on_device
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.onnx import session as onnx_session
from outrider.engines.opening import open_engine

from tests.engines.accelerators.device.strict_device import StrictDevice
from tests.engines.accelerators.halves import halve_bundle
from tests.engines.contract import EngineContract, MakeEngine, extend_one, make_tokens, span
from tests.engines.tree_contract import TreeContract


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def halves(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny pair with float16 weights."""
    return halve_bundle(tiny_bundle, tmp_path_factory.mktemp("halves") / "bundle")


def open_strictly(
    bundle: Bundle, which: str = "target", *, with_trees: bool = False
) -> tuple[PlanEngine, StrictDevice]:
    device = StrictDevice()
    entry = getattr(bundle.manifest, which)
    return open_on_device(bundle, entry, device, max_batch=3, with_trees=with_trees), device


@pytest.mark.parametrize("which", ["target", "draft"])
class TestOnDevice(EngineContract):
    @pytest.fixture
    def make_engine(self, bundle: Bundle, which: str) -> MakeEngine:
        return lambda: open_strictly(bundle, which)[0]


class TestTreesOnDevice(TreeContract):
    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, bundle: Bundle) -> MakeEngine:
        return lambda: open_strictly(bundle, with_trees=True)[0]


def open_device_graphs(bundle: Bundle, *, with_trees: bool = False) -> PlanEngine:
    """What an accelerator runs, on the host."""
    return open_on_device(
        bundle,
        bundle.manifest.target,
        StrictDevice(),
        max_batch=3,
        with_trees=with_trees,
        runs_device_graphs=True,
    )


class TestDeviceGraphs(TreeContract):
    """What an accelerator runs of a bundle with float32 weights."""

    atol = branch_atol = 1e-4

    @pytest.fixture
    def make_engine(self, bundle: Bundle) -> MakeEngine:
        return lambda: open_device_graphs(bundle, with_trees=True)


class TestHalvesOnDevice(TreeContract):
    """What an accelerator runs of a bundle with float16 weights: products and caches of 16 bits."""

    atol = branch_atol = 5e-2

    @pytest.fixture
    def make_engine(self, halves: Bundle) -> MakeEngine:
        return lambda: open_device_graphs(halves, with_trees=True)


class Accelerator(StrictDevice):
    """The host under another name."""

    kind = "accelerator"


def test_an_accelerator_computes_in_halves_where_weights_are_halves(
    bundle: Bundle, halves: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(onnx_session._PROVIDERS, "accelerator", "CPUExecutionProvider")
    monkeypatch.setitem(onnx_session._DISABLED, "accelerator", [])
    entry = halves.manifest.target
    on_host = open_on_device(halves, entry, StrictDevice())
    assert on_host.precision == "float32"
    assert on_host.is_row_invariant
    # Its tensors cannot be bound here; what it opened says enough.
    elsewhere = open_on_device(halves, entry, Accelerator(), with_trees=True)
    assert elsewhere.precision == "float16"
    assert not elsewhere.is_row_invariant
    assert elsewhere.limits.max_tree_nodes == entry.max_tree_nodes
    plain = open_on_device(bundle, bundle.manifest.target, Accelerator())
    assert plain.precision == "float32"
    assert not plain.is_row_invariant


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("float32", r"target: no device\.onnx; export the bundle again"),
        ("w8a8", "target: on CUDA w8a8 is slower than float32; serve it on the CPU or from"),
    ],
)
def test_a_model_without_graphs_for_accelerators_is_refused_there(
    bundle: Bundle, weights: str, reason: str
) -> None:
    entry = replace(bundle.manifest.target, weights=weights, device_precision="")
    assert open_on_device(bundle, entry, StrictDevice()).precision == "float32"
    with pytest.raises(BundleError, match=reason):
        open_on_device(bundle, entry, Accelerator())


def test_halves_answer_nearly_as_the_host_does(halves: Bundle) -> None:
    engine = open_device_graphs(halves)
    host = open_engine(halves, "target", max_batch=3)
    tokens = make_tokens(engine, 150, seed=1)
    for begin, end in ((0, 100), (100, 101), (101, 106), (103, 104), (104, 150)):
        found = extend_one(engine, 1, begin, tokens[begin:end])
        expected = extend_one(host, 1, begin, tokens[begin:end])
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-2)
    assert np.abs(found - expected).max() > 0


def test_it_has_the_bits_of_the_host_engine(bundle: Bundle) -> None:
    engine, _ = open_strictly(bundle)
    host = open_engine(bundle, "target", max_batch=3)
    tokens = make_tokens(engine, 150, seed=1)
    for begin, end in ((0, 100), (100, 101), (101, 106), (103, 104), (104, 150)):
        found = extend_one(engine, 1, begin, tokens[begin:end])
        np.testing.assert_array_equal(found, extend_one(host, 1, begin, tokens[begin:end]))


def test_calls_that_stay_on_the_device_wait_for_nothing(bundle: Bundle) -> None:
    engine, device = open_strictly(bundle)
    tokens = make_tokens(engine, 9, seed=2)
    assert engine.extend([span(0, 0, tokens[:4], 0)]).shape == (1, 0, 512)
    first = engine.extend_on_device([span(0, 4, tokens[4:6], 1)])
    assert first.shape == (1, 2, 512)
    engine.extend_on_device([span(0, 6, tokens[6:8], 1)])
    assert (device.traffic.num_waits, device.traffic.num_to_host) == (0, 0)
    assert device.traffic.num_to_device == 3
    last = extend_one(engine, 0, 8, tokens[8:])
    assert (device.traffic.num_waits, device.traffic.num_to_host) == (1, 1)
    np.testing.assert_array_equal(last, extend_one(engine, 1, 0, tokens)[-1:])


def test_tokens_given_on_the_device_replace_those_of_the_spans(bundle: Bundle) -> None:
    engine, device = open_strictly(bundle)
    tokens = np.array([make_tokens(engine, 4, seed=row) for row in range(3)])
    source = engine._uploads.put({"given": tokens[:, 1:]})["given"]
    # Of row 1 two tokens are given, of row 2 three; row 0 has its own.
    spans = [
        span(row, 0, (int(tokens[row, 0]), *own))
        for row, own in enumerate((tokens[0, 1:].tolist(), (7, 7), (7, 7, 7)))
    ]
    given = [
        DeviceTokens(source=source, rows=range(1, 2), column=1, width=2),
        DeviceTokens(source=source, rows=range(2, 3), column=1, width=3),
    ]
    logits = engine._downloads.get([engine.extend_on_device(spans, given)])[0].copy()
    for row, length in enumerate((4, 3, 4)):
        alone = extend_one(engine, 0, 0, tokens[row, :length].tolist())
        np.testing.assert_array_equal(logits[row, :length], alone)
    assert device.traffic.num_waits == 4


def test_limits_are_those_of_the_bundle(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"max_batch 5: the bundle allows 1\.\.4"):
        open_on_device(bundle, bundle.manifest.target, StrictDevice(), max_batch=5)
    engine, _ = open_strictly(bundle)
    assert engine.is_row_invariant
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.extend([span(0, 0, (1,))])
