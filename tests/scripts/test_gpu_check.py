"""The GPU check's own code, run on the host in a process of its own (it runs pytest itself)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.bundle import load_bundle
from scripts.gpu_check import Parity, floor_seconds

ROOT = Path(__file__).parents[2]


def test_the_check_runs_on_the_host_and_writes_its_report(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    report = tmp_path / "docs" / "report.md"
    sizes = ["--num-prompts", "2", "--num-tokens", "16", "--repeats", "3"]
    command = [sys.executable, "-m", "scripts.gpu_check", str(tiny_bundle), "--device", "cpu"]
    finished = subprocess.run(
        [*command, "--report", str(report), *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text = report.read_text(encoding="utf-8")
    assert "* engine contract: passed" in text
    assert "* chosen because: asked for" in text
    assert "* rounds on the device: passed; greedy tokens like the host's 32/32" in text
    assert "1.00 copies to the host and 1.00 waits" in text
    assert "* date: 20" in text
    figures = json.loads(text.split("```json")[1].split("```")[0])
    assert [one["part"] for one in figures["parity"]] == ["target", "draft"]
    assert all(one["num_greedy_equal"] == one["num_compared"] == 32 for one in figures["parity"])
    shapes = [(one["batch"], one["tokens"]) for one in figures["timings"]]
    assert shapes == [(1, 1), (1, 9), (4, 1), (4, 9)] * 2
    assert all(one["floor_s"] > 0 and one["median_s"] > 0 for one in figures["timings"])


@pytest.mark.parametrize(("equal", "passed"), [(200, True), (199, True), (198, False)])
def test_parity_wants_995_of_1000_choices_alike(equal: int, passed: bool) -> None:
    one = Parity(part="target", max_difference=0.1, num_greedy_equal=equal, num_compared=200)
    assert one.has_passed is passed


def test_the_floor_is_memory_for_one_token_and_products_for_many(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    entry = bundle.manifest.target
    size = bundle.manifest.files["target/model.onnx.data"].size
    cache = 2 * 4 * entry.num_layers * entry.num_kv_heads * entry.head_size
    assert floor_seconds(bundle, entry, 1, 1, (1e6, 1e12)) == pytest.approx((size + cache) / 1e6)
    assert floor_seconds(bundle, entry, 4, 8, (1e12, 1e6)) == pytest.approx(size / 4 * 32 / 1e6)
