"""What the backends of accelerators need, and what they read of a bundle."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.accelerators.backends import CudaBackend, TensorRtBackend
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.files import fingerprint
from outrider.engines.bundle.manifest import MANIFEST_FILE
from outrider.engines.opening import open_pair

from tests.engines.contract import extend_one

ROOT = Path(__file__).parents[3]


def test_what_serves_plans_needs_no_onnxruntime() -> None:
    """With plans of the models and the kernels TensorRT serves alone."""
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import outrider.engines.accelerators.tensorrt.engine\n"
        "import outrider.engines.accelerators.device.sampling.kernels.compiled\n"
        "from outrider.engines.accelerators import backends\n"
        "print(backends._why_no_cuda(0))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "onnxruntime is not installed", found.stderr


def test_a_bundle_with_graphs_of_a_sampler_is_served_as_before(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    """Earlier versions exported some, and built plans of them: nothing reads either."""
    root = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    file = root / MANIFEST_FILE
    values = json.loads(file.read_text("utf-8"))
    for path in ("sampler/judge_full.onnx", "plans/rtx-1-sm80/judge_full.plan"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"of an earlier version")
        values["files"][path] = {
            "sha256": fingerprint(root / path).sha256, "size": fingerprint(root / path).size,
        }  # fmt: skip
    axis = [1, 1, 4]
    profile = {
        "name": "sample",
        "batch": axis,
        "tokens": axis,
        "wanted": axis,
        "lists": {"num_seen": axis},
    }
    values["plans"] = [
        {
            "path": path, "part": "judge_full.onnx", "flavour": "rtx", "version": "1", "compute_capability": "8.0",
            "precision": "float32", "capacity": 0,
            "profiles": [profile],
        }
    ]  # fmt: skip
    file.write_text(json.dumps(values), encoding="utf-8")
    found = []
    for one in (root, tiny_bundle):
        pair = open_pair(load_bundle(one))
        found.append(extend_one(pair.target, 0, 0, [1, 2, 3]).tolist())
        pair.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", [CudaBackend(), TensorRtBackend()])
def test_a_vocabulary_beyond_the_kernels_is_the_hosts(
    tiny_bundle: Path, backend: CudaBackend
) -> None:
    bundle = load_bundle(tiny_bundle)
    target = replace(bundle.manifest.target, vocab_size=(1 << 20) + 1)
    larger = replace(bundle, manifest=replace(bundle.manifest, target=target))
    assert "at most 1048576" in backend.why_no_sampler(larger, 0)
    assert "at most 1048576" not in backend.why_no_sampler(bundle, 0)
