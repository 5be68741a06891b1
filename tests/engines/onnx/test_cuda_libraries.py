"""What the CUDA provider needs is looked for before the first graph, and what is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx.parser
import onnxruntime
import pytest
from outrider.engines.onnx import cuda_libraries
from outrider.engines.onnx.session import open_session, why_unavailable

ROOT = Path(__file__).parents[3]
RunOnStubs = Callable[..., subprocess.CompletedProcess[str]]

ASK = "from outrider.engines.onnx.session import why_unavailable; print(why_unavailable('cuda'))"
OPEN = (
    "import sys; from pathlib import Path; from outrider.engines.onnx.session import open_session; "
    "print(open_session(Path(sys.argv[1]), device='cuda').get_providers())"
)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    cuda_libraries.why_not_loadable.cache_clear()
    yield
    cuda_libraries.why_not_loadable.cache_clear()


@pytest.mark.parametrize("version", ["1.30.2", "1.9.0", "0.31.1"])
def test_a_version_that_attends_wrongly_is_refused_by_name(
    version: str, monkeypatch: pytest.MonkeyPatch, asked_anew: None
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert cuda_libraries.why_not_loadable() == (
        f"onnxruntime-gpu {version} attends wrongly on CUDA; 1.31 or newer is needed"
    )


def test_one_distribution_is_no_conflict() -> None:
    assert cuda_libraries.why_two_packages() == ""
    assert why_unavailable("cpu") == ""


def test_two_distributions_of_one_package_are_refused_at_start(tmp_path: Path) -> None:
    """As pip leaves them: one folder of files, two folders of metadata."""
    (tmp_path / "onnxruntime").symlink_to(Path(onnxruntime.__file__).parent)
    for name in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{name}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
    paths = (tmp_path, ROOT / "build" / "stage", ROOT)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    ask = ASK.replace("'cuda'", "'cpu'")
    done = subprocess.run(
        [sys.executable, "-c", ask], env=variables, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("onnxruntime and onnxruntime-gpu are both installed")


def stub_folder(tmp_path: Path, *, without: str) -> str:
    """Folder of the stub libraries but for one."""
    from scripts.gpu.stubs.environment import FOLDER

    folder = tmp_path / "lib"
    folder.mkdir()
    for file in (FOLDER / "lib").iterdir():
        if not file.name.startswith(without):
            (folder / file.name).symlink_to(file.resolve())
    return str(folder)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("libcublasLt.so.13", "outrider-server[cuda], which brings it"),
        # ONNX Runtime itself would look for it when the first token is drawn.
        ("libcudnn.so", "outrider-server[cuda], which brings it"),
        ("libcuda.so.1", "NVIDIA's driver"),
    ],
)
def test_a_missing_library_is_named(
    missing: str, remedy: str, run_on_stubs: RunOnStubs, tmp_path: Path
) -> None:
    done = run_on_stubs("-c", ASK, LD_LIBRARY_PATH=stub_folder(tmp_path, without=missing))
    (line,) = done.stdout.splitlines()
    assert line.startswith(missing)
    assert line.endswith(f"; install {remedy}")


def test_with_all_libraries_nothing_is_missing(run_on_stubs: RunOnStubs) -> None:
    assert run_on_stubs("-c", ASK).stdout == "\n"


def graph_file(folder: Path, *, moves_start: bool) -> Path:
    """y = x + start, where lengths that depend on a shape draw ``start`` to the host."""
    moved = "width = Shape <start = 1, end = 2> (x) end = Add (start, width)"
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        "lengths (float[batch, tokens] x, int64[batch] start) => (float[batch, tokens] y) <int64[1] one = {1}> {"
        f"{moved if moves_start else 'end = Identity (start)'}"
        "wide = Cast <to = 1> (end) column = Unsqueeze (wide, one) y = Add (x, column) }"
    )
    file = folder / "graph.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def test_a_graph_with_an_input_on_the_host_is_refused(
    run_on_stubs: RunOnStubs, tmp_path: Path
) -> None:
    file = graph_file(tmp_path, moves_start=True)
    assert open_session(file).get_providers() == ["CPUExecutionProvider"]
    done = run_on_stubs("-c", OPEN, str(file), fails=True)
    assert "graph.onnx: the CUDA provider reads 'x', 'start' on the host" in done.stderr
    assert done.stderr.rstrip().endswith("export the bundle again")
    file = graph_file(tmp_path, moves_start=False)
    assert run_on_stubs("-c", OPEN, str(file)).stdout.startswith("['CUDAExecutionProvider'")


def test_the_librarys_reason_is_told_where_a_device_is_missing(
    run_on_stubs: RunOnStubs, tmp_path: Path
) -> None:
    file = graph_file(tmp_path, moves_start=False)
    done = run_on_stubs("-c", OPEN, str(file), OUTRIDER_STUB_DEVICES="0", fails=True)
    (*_, line) = done.stderr.splitlines()
    assert "EngineError: ONNX Runtime cannot load the graph" in line
    assert "CUDA failure 100" in line
