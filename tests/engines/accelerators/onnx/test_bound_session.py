"""What is bound is kept, and runs that come again are recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from outrider.engines.accelerators.device.base import Call, DeviceTensor, HostDevice
from outrider.engines.accelerators.onnx import bound_session
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import EngineError
from outrider.engines.onnx import session as onnx_session
from outrider.engines.onnx.session import open_session, records_graphs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        "double (float[n] x) => (float[n] y) <float two = {2.0}> { y = Mul (x, two) }"
    )
    file = tmp_path / "double.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def call(x: np.ndarray, y: np.ndarray) -> Call:
    tensors = {
        name: DeviceTensor(array.ctypes.data, array.shape, array.dtype)
        for name, array in (("x", x), ("y", y))
    }
    return Call(tuple(tensors.values()), lambda: tensors)


class Recorder(HostDevice):
    """Records on the host: what is enqueued while it does runs when it is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Callable[[], None]] = []
        self.num_launched = 0

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        return Replay(self, enqueue)


class Replay:
    def __init__(self, device: Recorder, enqueue: Callable[[], None]) -> None:
        self._device, self._enqueue = device, enqueue

    def launch(self) -> None:
        self._device.num_launched += 1
        self._enqueue()

    def close(self) -> None:
        pass


def test_runs_that_come_again_are_recorded_by_place_and_shape(path: Path) -> None:
    device = Recorder()
    session = BoundSession(open_session(path), device, records=True)
    assert (session.inputs, session.outputs) == ({"x"}, ("y",))
    values = np.arange(6, dtype=np.float32)
    results = [np.zeros(6, dtype=np.float32) for _ in range(2)]
    launched = []
    for size, result in ((6, 0), (6, 1), (6, 0), (3, 0), (6, 0), (6, 1), (6, 1)):
        results[result][:] = 0
        session.run(call(values[:size], results[result][:size]))
        np.testing.assert_array_equal(results[result][:size], 2 * values[:size])
        launched.append(device.num_launched)
    assert launched == [0, 0, 0, 0, 1, 1, 2]
    for _ in range(3):
        session.run(call(values[:2], results[0][:2]), may_record=False)
    assert device.num_launched == 2
    session.close()


def test_nothing_is_recorded_unless_asked_for(path: Path) -> None:
    device = Recorder()
    session = BoundSession(open_session(path), device)
    x, y = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
    for _ in range(4):
        session.run(call(x, y))
    assert device.num_launched == 0


def test_the_bindings_used_last_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_session, "_MAX_BINDINGS", 2)
    session = BoundSession(open_session(path), HostDevice())
    x, y = np.zeros(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
    for size in (1, 2, 1, 3):
        session.run(call(x[:size], y[:size]))
    assert [key[0].shape for key in session._bindings] == [(1,), (3,)]


@pytest.mark.parametrize(
    ("options", "records"),
    [({}, True), ({"enable_cuda_graph": "1"}, True), ({"enable_cuda_graph": "0"}, False)],
)
def test_recording_is_on_unless_it_is_switched_off(options: dict[str, str], records: bool) -> None:
    assert records_graphs(options) is records
    assert "enable_cuda_graph" not in onnx_session._provider_options("cuda", 0, 0, options)


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
