"""The code that drives a CUDA device, where something fails or is never waited for; on an emulated one."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings import runtime
from outrider.engines.accelerators.device import cuda as cuda_module
from outrider.engines.accelerators.device.base import NotRecordedError, Rows
from outrider.engines.accelerators.device.cuda import CudaDevice
from outrider.engines.base import DeviceLostError, EngineError, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine

from tests.emulation.cuda_runtime import EmulatedCuda
from tests.emulation.install import emulate


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    return emulate(monkeypatch)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EngineError("refused"), NotRecordedError),
        (TypeError("a bug"), TypeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_capture_is_ended_whatever_fails_in_it(
    cuda: EmulatedCuda, error: BaseException, raised: type[BaseException]
) -> None:
    device = CudaDevice()
    pointer = device.allocate(256)

    def enqueue() -> None:
        device.zero_rows(Rows(pointer, 256), width=256, rows=1)
        raise error

    with pytest.raises(raised):
        device.capture(enqueue)
    assert not cuda.graphs
    device.zero_rows(Rows(pointer, 256), width=256, rows=1)
    device.wait()  # not allowed while a stream is recorded
    device.free(pointer)
    device.close()


def test_marks_that_nobody_waits_for_cost_no_event_for_good(cuda: EmulatedCuda) -> None:
    device = CudaDevice()
    for _ in range(2):
        for _ in range(1000):
            device.mark()  # of a round that failed before it was waited for
            device.wait(device.mark())
        found = len(cuda.events)
    assert found <= 4
    device.close()
    assert not cuda.events


@pytest.mark.parametrize(
    "name", ["cudaErrorIllegalAddress", "cudaErrorLaunchFailure", "cudaErrorECCUncorrectable"]
)
def test_errors_that_stay_are_no_failures_of_a_step(name: str) -> None:
    """Nothing that goes on after an exception, such as a batch that is tried again in halves, takes them for one."""
    with pytest.raises(DeviceLostError):
        cuda_module.check((getattr(runtime.cudaError_t, name),))
    with pytest.raises(EngineError):
        cuda_module.check((runtime.cudaError_t.cudaErrorMemoryAllocation,))
    assert not issubclass(DeviceLostError, Exception)


def test_what_reads_by_lengths_is_neither_cleared_behind_a_rejection_nor_shrunk(
    cuda: EmulatedCuda, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    plain = CudaDevice.zero_rows

    def noting(self: CudaDevice, destination: Rows, *, width: int, rows: int) -> None:
        cleared.append(width)
        plain(self, destination, width=width, rows=rows)

    monkeypatch.setattr(CudaDevice, "zero_rows", noting)
    engine = open_engine(load_bundle(tiny_bundle), "target", device="cuda:0", max_batch=2)

    def extend(start: int, count: int) -> None:
        engine.extend([Span(slot=0, start=start, tokens=(1,) * count, num_logits=1)])

    extend(0, 40)
    extend(40, 8)
    extend(42, 2)  # six draft tokens were rejected
    assert not cleared
    for start in range(44, 200, 40):
        extend(start, 40)
    capacity = engine.capacity
    engine.trim([4, None])
    assert engine.capacity == capacity > 128
    extend(0, 3)  # a new text
    assert cleared
    engine.close()
