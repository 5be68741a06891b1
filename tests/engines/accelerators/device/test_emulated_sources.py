"""Sources on an emulated GPU: by plans of TensorRT, by ONNX Runtime's provider, and served from both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import choose_device, open_engine, open_pair
from outrider.engines.pair import DEVICE, HOST
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans
from outrider.runtime.core.events import SpeculationDisabledReason
from outrider.runtime.core.params import RequestSpec, SpeculationParams

from tests.emulation.cuda_runtime import EmulatedCuda
from tests.emulation.install import emulate
from tests.engines.contract import MakeEngine, span, wanted_logits
from tests.engines.source_contract import SourceTests, source
from tests.runtime.pair import PairHarness

DEVICES = ("tensorrt:0", "cuda:0")


@pytest.fixture(scope="module")
def cuda() -> Iterator[EmulatedCuda]:
    """All is as late as may be."""
    with pytest.MonkeyPatch.context() as patch:
        yield emulate(patch)


@pytest.fixture(scope="module")
def bundle(
    tiny_text2text_bundle: Path, tmp_path_factory: pytest.TempPathFactory, cuda: EmulatedCuda
) -> Bundle:
    """The tiny pair with encoders, and emulated plans in float32."""
    root = tmp_path_factory.mktemp("emulated") / "bundle"
    shutil.copytree(tiny_text2text_bundle, root)
    for parts in ((), ("trees",)):
        options = BuildOptions(precision="float32", parts=parts)
        build_plans(root, options, report=lambda *step: None)
    return load_bundle(root)


@pytest.mark.parametrize("device", DEVICES)
class TestOnDevice(SourceTests):
    atol = 1e-4

    @pytest.fixture
    def make_engine(self, bundle: Bundle, device: str) -> MakeEngine:
        return lambda: open_engine(bundle, "target", device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_nearly_those_of_the_cpu(bundle: Bundle, device: str) -> None:
    sources = [source(slot, range(2, 4 + 30 * slot)) for slot in range(4)]
    spans = [span(slot, 0, range(5, 6 + slot)) for slot in range(4)]
    found = []
    for engine in (open_engine(bundle, "target", device=one) for one in (device, "cpu")):
        engine.read(sources)
        found.append(wanted_logits(engine, spans))
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def request(index: int, drafter: str) -> RequestSpec:
    rng = np.random.default_rng((7, index))
    source = rng.integers(2, 500, size=int(rng.integers(1, 97))).tolist()
    mode = ExactnessMode.SEED_STABLE
    return RequestSpec(
        internal_id=str(index),
        request_id=str(index),
        prompt_tokens=(0,) if index % 3 else (0, 5, 9),
        source_tokens=tuple(source),
        params=SamplingParams(temperature=float(index % 2)),
        seed=index,
        max_tokens=10,
        speculation=SpeculationParams(drafter=drafter, gamma=3, mode=mode),
    )


def served(
    bundle: Bundle, device: str, drafters: Sequence[str], place: str
) -> tuple[list[tuple[int, ...]], list[SpeculationDisabledReason | None]]:
    """Answers to requests with sources of all lengths, four at a time, and why drafts were given up."""
    pair = open_pair(bundle, device=device, sampler=place, max_batch=4, with_trees=True)
    try:
        harness = PairHarness.over(pair, bundle, max_running=4, read_tokens=128)
        found = harness.answers([request(i, drafters[i % len(drafters)]) for i in range(8)])
        if place == DEVICE:
            assert set(harness.worker.snapshot().host_fallback_reasons) == {""}
        return found, [harness.finished(str(i)).report.off_reason for i in range(8)]
    finally:
        pair.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("drafters", "place"),
    [(("model",), DEVICE), (("model", "lookup", "none"), DEVICE), (("tree",), HOST)],
    ids=["model", "mixed", "trees"],
)
def test_answers_are_those_of_the_cpu(
    bundle: Bundle, device: str, drafters: tuple[str, ...], place: str
) -> None:
    """Of some rows the draft model has read no source, which harms no other."""
    assert served(bundle, device, drafters, place) == served(bundle, "cpu", drafters, HOST)


def test_without_a_plan_that_reads_sources_another_device_serves(bundle: Bundle) -> None:
    assert str(choose_device("auto", bundle).device) == "tensorrt:0"
    plans = [plan for plan in bundle.manifest.plans if plan.part != "target/encode.onnx"]
    without = replace(bundle, manifest=replace(bundle.manifest, plans=tuple(plans)))
    reason = r"no TensorRT plan of target/encode\.onnx in float32 fits; run outrider build"
    with pytest.raises(EngineError, match=reason):
        open_engine(without, "target", device="tensorrt:0")
    choice = choose_device("auto", without)
    assert str(choice.device) == "cuda:0"
    assert "encode.onnx" in choice.reason
