"""The second and third command: checks and times by ONNX Runtime's provider, and a pair of 1B parameters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.devices import CPU

from scripts.gpu import check
from scripts.gpu.first.genai import time_genai
from scripts.gpu.first.job import Job, Part, Parts
from scripts.gpu.pairs import make_pair
from scripts.tools.results import ROOT

PAIR = "1b-50m"
_DEMO, _MODELS = ROOT / "demo", ("target", "draft")
_NO_GRAPHS, _ANY_ATTENTION = {"enable_cuda_graph": "0"}, {"sdpa_kernel": "0"}


def bundle_of(job: Job) -> Bundle:
    """The pair to check: the one that was carried, or the demo pair, exported once."""
    root = job.carried / "bundle"
    if not root.is_dir():
        root = job.work / "bundle"
    if not root.is_dir():
        models = ["--target", str(_DEMO / "target"), "--draft", str(_DEMO / "draft")]
        _run_cli("export", *models, "--out", str(root), "--weights", "float16")
    return load_bundle(root)


def asked_of(job: Job, bundle: Bundle, options: Mapping[str, str] | None = None) -> check.Asked:
    """What ``scripts.gpu.check`` is asked of a bundle."""
    is_small = job.is_small
    is_demo = bundle.root == job.work / "bundle"
    checkpoints = {part: _DEMO / part if is_demo else None for part in _MODELS}
    return check.Asked(
        bundle=bundle, device=job.device, checkpoints=checkpoints, options=options or {},
        num_prompts=2 if is_small else 8, num_tokens=8 if is_small else 64, samples=5 if is_small else 600,
        repeats=1 if is_small else 50, speed_prompts=1 if is_small else 4, speed_tokens=4 if is_small else 64,
        speed_gammas=(2, 4),
    )  # fmt: skip


def find_bundle(job: Job) -> Mapping[str, Any]:
    """Export the demo pair, unless a bundle was carried."""
    manifest = bundle_of(job).manifest
    return {"weights": manifest.target.weights, "versions": dict(manifest.versions)}


def checked(part: str, options: Mapping[str, str] | None = None) -> Part:
    """Return a part of ``scripts.gpu.check`` over the job's bundle, with options for the provider."""

    def find(job: Job) -> Mapping[str, Any]:
        found = check.PARTS[part](asked_of(job, bundle_of(job), options))
        return {**found} | {"has_passed": _has_passed(found)}

    return find


def find_rounds(options: Mapping[str, str] | None = None) -> Part:
    """Return the check of rounds, flat."""

    def find(job: Job) -> Mapping[str, Any]:
        found = check.find_rounds(asked_of(job, bundle_of(job), options))["rounds"]
        return asdict(found) | {"has_passed": found.has_passed}

    return find


def find_times(job: Job) -> Mapping[str, Any]:
    """Time the shapes of a step of the job's bundle."""
    return _times(asked_of(job, bundle_of(job)))


def find_any_attention(job: Job) -> Mapping[str, Any]:
    """Check single steps, and time them, with the attention that the library would choose."""
    asked = asked_of(job, bundle_of(job), _ANY_ATTENTION)
    return _times(asked) | {"has_passed": _has_passed(check.find_steps(asked))}


def find_pair(job: Job) -> Mapping[str, Any]:
    """Make a pair of real size; time it, and speculation on it."""
    bundle = bundle_of(job) if job.is_small else load_bundle(make_pair(PAIR, job.work, job.device))
    asked = asked_of(job, bundle)
    speeds = check.find_speed(asked)["speeds"]
    return _times(asked) | {"speeds": [asdict(one) | {"speedup": one.speedup} for one in speeds]}


def find_genai(job: Job) -> Mapping[str, Any]:
    """Time onnxruntime-genai on the pair's target."""
    checkpoint = _DEMO / "target" if job.is_small else job.work / PAIR / "target"
    return time_genai(checkpoint, job.work / "genai", on_gpu=job.device.kind != CPU)


def _has_passed(found: Mapping[str, Any]) -> bool:
    """Whether all that a part of the check found has passed."""
    values = [
        one for value in found.values() for one in (value if isinstance(value, list) else [value])
    ]
    return all(value if isinstance(value, bool) else value.has_passed for value in values)


def _times(asked: check.Asked) -> dict[str, Any]:
    found = check.find_times(asked)
    (timings,) = found["timings"].values()
    return {"timings": [asdict(one) | {"over_floor": one.over_floor} for one in timings]}


def _run_cli(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "outrider.runtime.cli", *arguments], cwd=ROOT, check=True)


CHECKS: Parts = {
    "bundle": (150.0, find_bundle),
    "contract": (180.0, checked("contract")),
    "steps": (40.0, checked("steps")),
    "placement": (40.0, checked("placement")),
    "rounds": (60.0, find_rounds()),
    "rounds without graphs": (60.0, find_rounds(_NO_GRAPHS)),
    "times": (60.0, find_times),
    "any attention": (60.0, find_any_attention),
    "parity": (60.0, checked("parity")),
    "sampler": (120.0, checked("sampler")),
}
PAIRS: Parts = {"pair": (420.0, find_pair), "genai": (200.0, find_genai)}
