"""What the backends of accelerators need, and what they read of a bundle."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from outrider.engines.accelerators.device.sampling.sampler import GraphSampler
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_pair

ROOT = Path(__file__).parents[3]


def test_what_serves_plans_needs_no_onnxruntime() -> None:
    """With plans of the sampler's graphs TensorRT serves alone."""
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import outrider.engines.accelerators.tensorrt.engine, outrider.engines.accelerators.tensorrt.sampler\n"
        "from outrider.engines.accelerators import backends\n"
        "print(backends._why_no_cuda(0))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "onnxruntime is not installed", found.stderr


def test_the_samplers_graphs_are_those_that_were_hashed_whenever_they_are_loaded(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is loaded when it is first used; the folder is overwritten before that."""
    bundle = load_bundle(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    opened = []
    monkeypatch.setattr(GraphSampler, "__init__", lambda self, graphs, **_: opened.append(graphs))
    pair = open_pair(bundle, sampler="device")
    (graphs,) = opened
    files = [path.name for path in (bundle.root / "sampler").iterdir()]
    for file in files:
        (bundle.root / "sampler" / file).write_bytes(b"no graph")
    assert len([graphs.open_graph(file).outputs for file in files]) == len(files) > 3
    with pytest.raises(EngineError, match="no such sampler graph"):
        graphs.open_graph("other.onnx")
    for engine in (pair.target, pair.draft):
        engine.close()
