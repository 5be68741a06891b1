"""What is bound is kept, and every recording has a number of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from outrider.engines.base import EngineError
from outrider.engines.device.base import Call, DeviceTensor, HostDevice
from outrider.engines.onnx import session as onnx_session
from outrider.engines.onnx.bound_session import _MAX_RECORDINGS, BoundSession
from outrider.engines.onnx.session import open_session, records_graphs
from outrider.export.sampler_graphs.builder import FLOAT, Graph


@pytest.fixture
def path(tmp_path: Path) -> Path:
    graph = Graph("double")
    graph.output("y", graph.input("x", FLOAT, ["n"]) * 2.0, ["n"])
    file = tmp_path / "double.onnx"
    file.write_bytes(graph.model().SerializeToString())
    return file


def call(x: np.ndarray, y: np.ndarray) -> Call:
    tensors = {
        name: DeviceTensor(array.ctypes.data, array.shape, array.dtype)
        for name, array in (("x", x), ("y", y))
    }
    return Call(tuple(tensors.values()), lambda: tensors)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Numbers of recordings that runs were given."""
    numbers: list[str] = []
    run = onnxruntime.InferenceSession.run_with_iobinding

    def noting_run(session, binding, options=None):
        try:
            numbers.append(options.get_run_config_entry("gpu_graph_id"))
        except RuntimeError:  # no such entry
            numbers.append("none")
        run(session, binding, options)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", noting_run)
    return numbers


def test_each_place_and_shape_is_a_recording_of_its_own(path: Path, asked: list[str]) -> None:
    session = BoundSession(open_session(path), HostDevice(), records=True)
    assert (session.inputs, session.outputs) == ({"x"}, ("y",))
    values = np.arange(6, dtype=np.float32)
    results = [np.zeros(6, dtype=np.float32) for _ in range(2)]
    for size, result in ((6, 0), (6, 1), (6, 0), (3, 0), (6, 1)):
        results[result][:] = 0
        session.run(call(values[:size], results[result][:size]))
        np.testing.assert_array_equal(results[result][:size], 2 * values[:size])
    assert asked == ["0", "1", "0", "2", "1"]
    session.run(call(values[:2], results[0][:2]), may_record=False)
    assert asked[-1] == "-1"


def test_recordings_are_counted_out(path: Path, asked: list[str]) -> None:
    """The library keeps them for good, so later shapes run as they are."""
    session = BoundSession(open_session(path), HostDevice(), records=True)
    x, y = (np.zeros(_MAX_RECORDINGS + 2, dtype=np.float32) for _ in range(2))
    for size in range(1, len(x) + 1):
        session.run(call(x[:size], y[:size]))
    assert asked == [*map(str, range(_MAX_RECORDINGS)), "-1", "-1"]


def test_a_provider_that_records_nothing_is_given_no_numbers(path: Path, asked: list[str]) -> None:
    session = BoundSession(open_session(path), HostDevice())
    session.run(call(np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.float32)))
    assert asked == ["none"]


@pytest.mark.parametrize(
    ("options", "records"),
    [({}, False), ({"enable_cuda_graph": "1"}, True), ({"enable_cuda_graph": "0"}, False)],
)
def test_recording_is_an_option_of_the_provider(options: dict[str, str], records: bool) -> None:
    assert records_graphs(options) is records


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device_id": "1"}, "provider option device_id: --device and the engine decide it"),
        ({"cudnn_conv_algo_search": "HEURISTIC"}, "the CPU's provider takes none"),
    ],
)
def test_options_that_cannot_be_given_are_refused_by_name(
    path: Path, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        open_session(path, provider_options=options)


def test_float32_on_a_gpu_is_not_rounded_to_tf32_unless_asked_for() -> None:
    given = onnx_session._provider_options("cuda", 1, 77, {})
    assert given == {
        "device_id": "1",
        "use_tf32": "0",
        "sdpa_kernel": "19",
        "user_compute_stream": "77",
    }
    assert onnx_session._provider_options("cuda", 0, 0, {"use_tf32": "1"})["use_tf32"] == "1"
