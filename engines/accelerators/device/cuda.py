"""Memory, order and recorded work of a CUDA device, through NVIDIA's own Python bindings.

cuda-python (``cuda.bindings``) and not CuPy: nothing here computes, plain allocations and copies are
all that is needed, and the bindings bring neither kernels nor a memory pool of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime as cudart
from outrider.engines.accelerators.device.base import CopyCounters, NotRecordedError, Rows, Staging
from outrider.engines.base import DeviceLostError, EngineError

# Errors that stay: the context that a process has on a device is of no use behind them.
_LOST = frozenset(
    {
        "cudaErrorECCUncorrectable",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalAddress",
        "cudaErrorIllegalInstruction",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorLaunchTimeout",
        "cudaErrorMisalignedAddress",
    }
)


def check(result: tuple[Any, ...]) -> Any:
    """Value of a CUDA runtime call.

    Raises:
        EngineError: the call failed, in CUDA's words.
        DeviceLostError: so will every other.
    """
    status, *values = result
    if status != cudart.cudaError_t.cudaSuccess:
        _, text = cudart.cudaGetErrorString(status)
        kind = DeviceLostError if status.name in _LOST else EngineError
        raise kind(f"CUDA: {text.decode() if text else status}")
    return values[0] if values else None


def compute_capability(index: int) -> str:
    """Compute capability of a device, for example "8.0".

    Raises:
        EngineError: there is no such device, no driver, or one that is too old; says which.
    """
    count = int(check(cudart.cudaGetDeviceCount()))
    if index >= count:
        raise EngineError(f"device {index}: this machine has {count} CUDA devices")
    kinds = cudart.cudaDeviceAttr
    major = check(cudart.cudaDeviceGetAttribute(kinds.cudaDevAttrComputeCapabilityMajor, index))
    minor = check(cudart.cudaDeviceGetAttribute(kinds.cudaDevAttrComputeCapabilityMinor, index))
    return f"{major}.{minor}"


def device_name(index: int) -> str:
    """Name of a device as its maker gave it."""
    properties = check(cudart.cudaGetDeviceProperties(index))
    return str(properties.name.decode().rstrip("\0"))


class PinnedStaging:
    """Page-locked memory of the host: copies from and to it overlap with the host's work."""

    def __init__(self, num_bytes: int) -> None:
        self._pointer = int(check(cudart.cudaHostAlloc(num_bytes, cudart.cudaHostAllocDefault)))
        memory = (ctypes.c_byte * num_bytes).from_address(self._pointer)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        self.array.fill(0)

    def free(self) -> None:
        """Give the memory back; the array must not be used afterwards."""
        check(cudart.cudaFreeHost(self._pointer))


class CudaDevice:
    """One stream of a CUDA device, and a second one for uploads; see ``PlanDevice``.

    A round is enqueued as a whole before its first graph has run, so the inputs of later graphs are
    copied while earlier ones compute. Each upload is followed by an event that the first stream
    waits for on the device:

        uploads   copy 0 | copy 1 | copy 2
        stream           graph 0 ........ | graph 1 ........ | graph 2 ........

    What an upload overwrites nobody reads any more: its memory was last used before a mark that has
    been waited for. A mark is an event too, on the first stream.

    Raises:
        EngineError: there is no such device.
    """

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.traffic = CopyCounters()
        self.index = index
        self.compute_capability = compute_capability(index)
        self.make_current()
        self.stream = _make_stream()
        self._uploads = _make_stream()
        # An event may be recorded anew while earlier waits for it are pending on the device.
        self._event = _make_event()
        self._marks: dict[int, Any] = {}
        self._spare_events: list[Any] = []

    def make_current(self) -> None:
        """Let this thread's calls go to this device: CUDA keeps that choice per thread, from 0 on."""
        check(cudart.cudaSetDevice(self.index))

    def allocate(self, num_bytes: int) -> int:
        """Address of new zeroed bytes; CUDA aligns them to 256."""
        self.make_current()
        pointer = int(check(cudart.cudaMalloc(num_bytes)))
        check(cudart.cudaMemsetAsync(pointer, 0, num_bytes, self.stream))
        # No upload may come before these zeros.
        self._order(self.stream, self._uploads)
        return pointer

    def free(self, pointer: int) -> None:
        """Give memory back; CUDA waits for the device before it does."""
        check(cudart.cudaFree(pointer))

    def stage(self, num_bytes: int) -> PinnedStaging:
        """Page-locked bytes of the host."""
        self.make_current()
        return PinnedStaging(num_bytes)

    def upload(self, destination: int, source: Staging, num_bytes: int) -> None:
        """Enqueue a copy to the device; the source must stay as it is until it was waited for."""
        self.traffic.num_to_device += 1
        self.make_current()
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        address = source.array.ctypes.data
        check(cudart.cudaMemcpyAsync(destination, address, num_bytes, kind, self._uploads))
        self._order(self._uploads, self.stream)

    def download(self, destination: Staging, source: int, num_bytes: int) -> None:
        """Enqueue a copy to the host; valid after ``wait``."""
        self.traffic.num_to_host += 1
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = destination.array.ctypes.data
        check(cudart.cudaMemcpyAsync(address, source, num_bytes, kind, self.stream))

    def copy_rows(self, destination: Rows, source: Rows, *, width: int, rows: int) -> None:
        """Enqueue a copy on the device of ``width`` bytes of each of ``rows`` rows."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        layout = (destination.pointer, destination.pitch, source.pointer, source.pitch)
        check(cudart.cudaMemcpy2DAsync(*layout, width, rows, kind, self.stream))

    def zero_rows(self, destination: Rows, *, width: int, rows: int) -> None:
        """Enqueue zeros for ``width`` bytes of each of ``rows`` rows."""
        self.make_current()
        layout = (destination.pointer, destination.pitch)
        check(cudart.cudaMemset2DAsync(*layout, 0, width, rows, self.stream))

    def mark(self) -> int:
        """Mark this place in the order of work; its number, for one ``wait``."""
        self.make_current()
        event = self._spare_events.pop() if self._spare_events else _make_event()
        check(cudart.cudaEventRecord(event, self.stream))
        number = self.traffic.mark()
        self._marks[number] = event
        return number

    def wait(self, mark: int | None = None) -> None:
        """Return when all that was enqueued before a mark is done; None for everything there is."""
        if mark is None:
            check(cudart.cudaStreamSynchronize(self.stream))
            self.traffic.reach(self.traffic.mark())
            return
        check(cudart.cudaEventSynchronize(self._marks[mark]))
        # Marks before it that nobody waited for, as of a round that failed, are behind us too.
        for number in [number for number in self._marks if number <= mark]:
            self._spare_events.append(self._marks.pop(number))
        self.traffic.reach(mark)

    def capture(self, enqueue: Callable[[], None]) -> RecordedWork:
        """Record what ``enqueue`` puts on the stream, without running it.

        Raises:
            NotRecordedError: it does something that cannot be recorded; the stream is usable again.
        """
        self.make_current()
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(cudart.cudaStreamBeginCapture(self.stream, mode))
        try:
            enqueue()
        except BaseException as error:
            # A stream that goes on recording fails every later call. What was recorded so far is of no use.
            status, *graphs = cudart.cudaStreamEndCapture(self.stream)
            if status == cudart.cudaError_t.cudaSuccess:
                cudart.cudaGraphDestroy(*graphs)
            if isinstance(error, EngineError):
                raise NotRecordedError(str(error)) from error
            raise
        try:
            graph = check(cudart.cudaStreamEndCapture(self.stream))
        except EngineError as error:
            raise NotRecordedError(str(error)) from error
        try:
            return RecordedWork(check(cudart.cudaGraphInstantiate(graph, 0)), self.stream)
        except EngineError as error:
            raise NotRecordedError(str(error)) from error
        finally:
            check(cudart.cudaGraphDestroy(graph))

    def close(self) -> None:
        """Free streams and events."""
        for event in (self._event, *self._marks.values(), *self._spare_events):
            check(cudart.cudaEventDestroy(event))
        for stream in (self._uploads, self.stream):
            check(cudart.cudaStreamDestroy(stream))

    def _order(self, first: int, second: int) -> None:
        """Let what is enqueued on the second stream from now on follow all work of the first."""
        check(cudart.cudaEventRecord(self._event, first))
        check(cudart.cudaStreamWaitEvent(second, self._event, 0))


def _make_event() -> Any:
    """An event to order work by, and to wait for without a core that spins.

    On an H200 a wait takes 30 us so and 13 us spinning, and 1 ms of processor instead of all that it lasts.
    """
    flags = cudart.cudaEventDisableTiming | cudart.cudaEventBlockingSync
    return check(cudart.cudaEventCreateWithFlags(flags))


def _make_stream() -> int:
    return int(check(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)))


class RecordedWork:
    """A CUDA graph, ready to be launched again and again on the stream it was recorded from."""

    def __init__(self, executable: Any, stream: int) -> None:
        self._executable = executable
        self._stream = stream

    def launch(self) -> None:
        """Enqueue it."""
        check(cudart.cudaGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        """Free it."""
        check(cudart.cudaGraphExecDestroy(self._executable))
