"""The three commands of the first half hour, on the host and on an emulated GPU; what they find says nothing of one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.devices import Device

from scripts.gpu import kernels
from scripts.gpu.first.job import Job, Parts
from scripts.gpu.first.run import plain, run_command
from tests.engines.accelerators.halves import halve_bundle

ROOT = Path(__file__).parents[4]


def run(number: int, carried: Path, out: Path, device: str) -> dict[str, Any]:
    """What a command wrote in one JSON and one TOML, as a process of its own."""
    command = [sys.executable, "-m", "tests.emulation.first", str(number), "--out", str(out)]
    command += [
        "--carried",
        str(carried),
        "--work",
        str(out / "work"),
        "--device",
        device,
        "--small",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    files = [path.name for path in out.iterdir() if path.is_file()]
    assert sorted(files) == [f"first-{number}.json", f"first-{number}.toml"], done.stderr
    found: dict[str, Any] = json.loads((out / f"first-{number}.json").read_text())
    assert found["failed"] == {} or done.returncode == 1
    assert found["not_reached"] == []
    tomllib.loads((out / f"first-{number}.toml").read_text())
    return found


def test_the_first_command_needs_neither_bundle_nor_provider(tmp_path: Path) -> None:
    kernels.write(tmp_path / "kernels.json", few=True)
    report = run(1, tmp_path, tmp_path / "out", "cpu")
    assert report["failed"] == {}
    found = report["found"]
    assert found["kernels"]["num_equal"] == found["kernels"]["num_compared"] == 6
    assert found["rates"]["alone_us"] > 0
    calls = found["roof"]["tiny"]
    assert [(one["rows"], one["tokens"]) for one in calls[:4]] == [(1, 1), (1, 5), (8, 1), (8, 5)]
    assert all(one["ms"] > 0 for one in calls)
    assert calls[0]["launches_by_formula"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 3])
def test_the_others_run_on_an_emulated_gpu(tiny_bundle: Path, tmp_path: Path, number: int) -> None:
    halve_bundle(tiny_bundle, tmp_path / "carried" / "bundle", with_trees=False, max_batch=3)
    report = run(number, tmp_path / "carried", tmp_path / "out", "cuda:0")
    found = report["found"]
    if number == 2:
        assert report["failed"] == {}
        checks = ("contract", "steps", "placement", "rounds", "rounds without graphs", "parity")
        assert all(found[name]["has_passed"] for name in (*checks, "sampler", "any attention"))
        settings = tomllib.loads((tmp_path / "out" / "first-2.toml").read_text())
        assert settings["device"] == "auto"
        assert settings["provider_options"]["enable_cuda_graph"] in (0, 1)
    else:
        assert report["failed"].keys() <= {"genai"}
        assert len(found["pair"]["speeds"]) == 8


def test_a_part_that_fails_or_comes_too_late_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(job: Job) -> dict[str, Any]:
        raise ValueError("no such thing")

    parts: Parts = {
        "one": (9.0, lambda job: {"figure": float("nan")}),
        "two": (9.0, fail),
        "three": (9.0, lambda job: {}),
    }
    monkeypatch.setattr("scripts.gpu.first.run.parts_of", lambda number: parts)
    job = Job(device=Device("cpu"), carried=tmp_path, work=tmp_path, is_small=True)
    report = run_command(1, job, tmp_path, 60.0)
    assert report["found"]["one"] == {"figure": None}
    assert report["failed"] == {"two": "ValueError: no such thing"}
    assert report["not_reached"] == []
    late = run_command(1, job, tmp_path, 0.0)
    assert late["not_reached"] == ["one", "two", "three"]
    assert plain({1: (2.0, float("inf"))}) == {"1": [2.0, None]}
