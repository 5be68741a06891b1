"""The GPU check's own code, run on the host in a process of its own (it runs pytest itself)."""

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.devices import Device
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans
from outrider.runtime.verify.report import Check, VerifyReport

from scripts.gpu.check import Found, main, run_parts
from scripts.gpu.machine import Rates, measure_rates, torch_products_per_s
from scripts.gpu.pairs import pair_commands
from scripts.gpu.parity import Parity
from scripts.gpu.processes import run_apart
from scripts.gpu.report import Findings, render
from scripts.gpu.rounds import RoundsCheck
from scripts.gpu.speed import Speed
from scripts.gpu.steps import StepsCheck
from scripts.gpu.times import Timing, floor_seconds
from scripts.lab.widen.widen import PAIRS
from tests.emulation.install import emulate
from tests.emulation.kernels.host import library
from tests.engines.accelerators.halves import halve_bundle

ROOT = Path(__file__).parents[3]
SMALL = {
    "--num-prompts": "2",
    "--num-tokens": "16",
    "--samples": "20",
    "--repeats": "2",
    "--speed-prompts": "1",
    "--speed-tokens": "8",
    "--speed-gamma": "3",
}


@pytest.mark.long
def test_the_check_runs_on_the_host_and_writes_its_report(
    tiny_bundle: Path, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    library()
    report = tmp_path / "docs" / "report.md"
    target, draft = map(str, tiny_checkpoints)
    command = [
        sys.executable,
        "-m",
        "tests.emulation.gpu_check",
        str(tiny_bundle),
        "--device",
        "cpu",
    ]
    command += ["--target", target, "--draft", draft, "--report", str(report)]
    command += [part for option in SMALL.items() for part in option]
    # The machine to be checked may lack the plugins of the project's own tests.
    environment = os.environ | {"PYTEST_ADDOPTS": "-p no:asyncio"}
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text = report.read_text(encoding="utf-8")
    assert "* single steps of the target: passed; 64 against one span" in text
    assert "* not run: nothing" in text
    assert "* engine contract: passed" in text
    assert "* the sampler's exactness: passed" in text
    assert "* chosen because: asked for" in text
    assert "* rounds on the device: passed; greedy tokens like the host's 32/32" in text
    assert "1.00 copies to the host and 1.00 waits" in text
    assert "* in all: passed" in text
    assert "* date: 20" in text
    figures = json.loads(text.split("```json")[1].split("```")[0])
    assert figures["failures"] == []
    assert [one["part"] for one in figures["parity"]] == ["target", "draft"]
    for one in figures["parity"]:
        assert one["num_greedy_equal"] == one["num_compared"] == 32
        assert one["reference"] == "PyTorch float32 on cpu"
        # What float32 kernels lose is nothing beside 16 bits.
        assert one["max_difference"] < one["half_difference"] / 10
    (timings,) = figures["timings"].values()
    shapes = [(one["batch"], one["tokens"]) for one in timings]
    assert shapes == [(1, 1), (1, 9), (4, 1), (4, 9)] * 2
    assert all(min(one["floor_s"], one["call_s"], one["device_s"]) > 0 for one in timings)
    assert math.isfinite(figures["rates"]["products_per_s"])
    cells = [(one["batch"], one["temperature"], one["gamma"]) for one in figures["speed"]]
    assert cells == [(b, t, 3) for t in (0.0, 1.0) for b in (1, 4)]
    assert all(one["on_tokens_per_s"] > 0 and one["predicted"] > 0 for one in figures["speed"])


@pytest.fixture(scope="module")
def planned(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with float16 weights and emulated plans."""
    root = tmp_path_factory.mktemp("planned") / "1b-50m.bundle"
    halve_bundle(tiny_bundle, root, with_trees=False, max_batch=3)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        build_plans(root, BuildOptions(), report=lambda *step: None)
    return root


def test_the_check_runs_on_both_backends_of_an_emulated_gpu(
    planned: Path, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """Every line that a GPU machine will run; what it finds says nothing of a GPU."""
    library()
    target, draft = map(str, tiny_checkpoints)
    least = SMALL | {"--samples": "5", "--repeats": "1", "--speed-tokens": "4"}
    command = [sys.executable, "-m", "tests.emulation.gpu_check"]
    reports = {device: tmp_path / f"{device}.md" for device in ("tensorrt:0", "cuda:0")}
    for device, report in reports.items():
        command += [str(planned), "--device", device, "--report", str(report)]
        command += ["--target", target, "--draft", draft]
        command += [part for option in least.items() for part in option]
        if device == "tensorrt:0":
            # A pair that was made before is not made again.
            command += ["--pair", "1b-50m", "--work", str(planned.parent), "--"]
        else:
            command += ["--provider-option", "enable_cuda_graph=1"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for device, report in reports.items():
        text = report.read_text(encoding="utf-8")
        assert f"* device: {device}" in text
        assert "* gpu: Emulated GPU (compute capability 8.0)" in text
        assert ("* flavours: rtx" in text) == (device == "tensorrt:0")
        assert "* engine contract: passed" in text
        placed = "* placement of the draft: passed; 0 Memcpy nodes; attention of one row: "
        assert (placed in text) == (device == "cuda:0")
        assert "* single steps of the draft: passed" in text
        assert "* the sampler's exactness: passed" in text
        assert "1.00 copies to the host and 1.00 waits" in text
        assert "* in all: passed" in text
        figures = json.loads(text.split("```json")[1].split("```")[0])
        assert [one["precision"] for one in figures["parity"]] == ["float16", "float16"]
        assert all(one["half_difference"] > 0 for one in figures["parity"])
        assert figures["rounds"]["num_equal"] == figures["rounds"]["num_compared"] > 0
        assert math.isfinite(figures["rates"]["products_per_s"])
        # Twice measured: as the bundle, and as a pair made for the purpose.
        assert len(figures["speed"]) == (8 if device == "tensorrt:0" else 4)


def test_a_bundle_too_small_for_the_contract_is_refused_before_any_work(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    write_manifest(root, replace(load_bundle(root).manifest, max_batch=2))
    with pytest.raises(BundleError, match="max_batch 2: the engine contract takes 3 slots"):
        main(root, device="cpu")


def test_a_part_that_raises_or_ends_its_process_loses_nothing_but_itself(tmp_path: Path) -> None:
    report, seen = tmp_path / "docs" / "report.md", tmp_path / "seen.md"

    def look() -> Found:
        shutil.copy(report, seen)
        return {"has_kept_contract": True}

    parts = {
        "first": lambda: {"rounds": 1 // 0},
        "second": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "third": look,
        "last": lambda: {"steps": [STEPS]},
    }
    found = Findings(facts={}, reason="asked for", left=["speed"])
    run_parts(parts, found, report, limit_s=600)
    assert found.broken == {
        "first": "ZeroDivisionError: integer division or modulo by zero",
        "second": "its process ended with SIGKILL",
    }
    before, text = (file.read_text(encoding="utf-8") for file in (seen, report))
    assert "FAILED: part first (ZeroDivisionError" in before
    assert "* not run: speed, third, last" in before
    assert "engine contract" not in before
    assert "* engine contract: passed" in text
    assert "* not run: speed" in text
    assert "single steps of the target: FAILED from step 1 on; 64 against one span" in text
    assert found.failures()[2:] == ["single steps of the target"]


def test_a_part_that_hangs_is_ended() -> None:
    outcome = run_apart(threading.Event().wait, 0.1)
    assert outcome.value is None
    assert outcome.failure == "not done after 0.1 s"
    assert run_apart(lambda: 3, 600.0).value == 3


def test_all_that_a_part_started_ends_with_it_and_what_it_found_counts() -> None:
    ours, theirs = os.pipe()

    def find() -> int:
        if os.fork() == 0:
            signal.pause()
        threading.Thread(target=signal.pause).start()  # the process waits for it
        return 3

    outcome = run_apart(find, 5.0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        assert select.select([pipe], [], [], 60.0)[0]
        assert pipe.read() == b""  # nobody has the other end
    assert outcome.value == 3


def test_an_unknown_part_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--only rates: must be one of contract, "):
        main(tiny_bundle, device="cpu", only=["rates"])


STEPS = StepsCheck(part="target", num_steps=64, first_wrong=1, max_difference=2.0)
PARITY = Parity(
    part="target",
    precision="float16",
    reference="PyTorch float32",
    max_difference=0.1,
    half_difference=0.1,
    num_greedy_equal=200,
    num_compared=200,
)


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"num_greedy_equal": 199}, True),
        ({"num_greedy_equal": 198}, False),
        ({"max_difference": 0.2}, True),
        ({"max_difference": 0.21}, False),
        ({"max_difference": 9.0, "half_difference": None}, True),
        ({"max_difference": math.nan}, False),
        ({"num_greedy_equal": 150, "max_difference": 1.0, "precision": "float8"}, True),
    ],
)
def test_parity_wants_995_of_1000_choices_and_twice_what_pytorch_loses(
    change: dict[str, object], passed: bool
) -> None:
    assert replace(PARITY, **change).has_passed is passed


def test_a_failure_of_any_kind_is_in_the_report_and_times_are_none() -> None:
    found = Findings(facts={"device": "cpu"}, reason="asked for", has_kept_contract=True)
    found.rates = Rates(bytes_per_s=1e9, products_per_s=math.inf, missing="no provider")
    found.speeds = [SPEED]
    assert "* in all: passed" in render(found)
    assert "| 0.5 |" in render(found)
    assert "not measured (no provider)" in render(found)
    found.has_kept_contract = False
    found.parities = [replace(PARITY, num_greedy_equal=0)]
    check = Check(name="law", num_draws=9, p_value=0.0)
    found.sampler = VerifyReport(checks=(check,), false_alarm=1e-6)
    found.rounds = RoundsCheck(num_equal=1, num_compared=1, copies_per_step=2.0, waits_per_step=1.0)
    assert found.failures() == [
        "the engine contract",
        "parity of the target",
        "exactness of the sampler",
        "rounds on the device",
    ]
    assert "* in all: FAILED: the engine contract, parity" in render(found)


SPEED = Speed(
    pair="pair",
    batch=1,
    gamma=4,
    temperature=0.0,
    off_tokens_per_s=100.0,
    on_tokens_per_s=180.0,
    alpha_hat=0.5,
    predicted=2.0,
    overhead=0.05,
)


TIMING = Timing(
    part="target", batch=1, tokens=1, context=200, call_s=2.0, device_s=1.3, floor_s=1.0
)


def test_times_that_miss_their_aims_are_named() -> None:
    assert SPEED.reaches_prediction
    assert SPEED.is_lean
    found = Findings(facts={}, reason="", has_kept_contract=True)
    found.speeds = [SPEED, replace(SPEED, on_tokens_per_s=170.0), replace(SPEED, overhead=0.5)]
    found.timings = {"pair": [TIMING, replace(TIMING, device_s=1.4), replace(TIMING, batch=8)]}
    assert found.missed_aims() == [
        "pair: a target step of one row takes 1.40 floors",
        "pair, 1 rows, temperature 0, gamma 4: 0.85 of the predicted speed-up",
        "pair, 1 rows, temperature 0, gamma 4: 50 % beside the engine calls",
    ]
    text = render(found)
    assert "* in all: passed" in text
    assert "* aims missed: pair: a target step" in text
    assert "| 1.4 | False |" in text
    assert "| 1.3 | True |" in text
    assert "| 1.3 |  |" in text
    assert not replace(SPEED, on_tokens_per_s=179.0).reaches_prediction
    assert not replace(SPEED, overhead=0.06).is_lean


def test_the_floor_is_memory_for_one_token_and_products_for_many(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    entry = bundle.manifest.target
    size = bundle.manifest.files["target/model.onnx.data"].size
    cached = 2 * entry.num_layers * entry.num_kv_heads * entry.head_size * (100 + 1)

    def floor(batch: int, tokens: int, precision: str, rates: tuple[float, float]) -> float:
        given = Rates(bytes_per_s=rates[0], products_per_s=rates[1])
        return floor_seconds(bundle, entry, batch, tokens, 100, precision, given)

    slow_memory, slow_products = (1e6, 1e12), (1e12, 1e6)
    assert floor(1, 1, "float32", slow_memory) == pytest.approx((size + 4 * cached) / 1e6)
    assert floor(1, 1, "float16", slow_memory) == pytest.approx((size + 4 * cached) / 2e6)
    # Eight bits of weights, sixteen of cache.
    assert floor(3, 1, "float8", slow_memory) == pytest.approx((size / 4 + 6 * cached) / 1e6)
    assert floor(4, 8, "float16", slow_products) == pytest.approx(size / 4 * 32 / 1e6)


def test_rates_of_the_host_are_measured_by_the_code_of_a_device() -> None:
    rates = measure_rates(Device("cpu"), "float16")
    assert 1e8 < rates.bytes_per_s < 1e13
    assert 1e8 < rates.products_per_s < 1e15
    assert rates.missing == ""
    assert 1e8 < torch_products_per_s("cpu", "float16") < 1e15


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_real_size_is_widened_exported_and_built(name: str, tmp_path: Path) -> None:
    plain = pair_commands(name, tmp_path, Device("cuda"))
    built = pair_commands(name, tmp_path, Device("tensorrt"))
    assert [command[2] for command in plain] == ["scripts.lab.widen.widen", "outrider.runtime.cli"]
    assert built[:2] == plain
    assert built[2][2:] == ["outrider.runtime.cli", "build", str(tmp_path / f"{name}.bundle")]
    assert plain[1][plain[1].index("--out") + 1] == str(tmp_path / f"{name}.bundle")
