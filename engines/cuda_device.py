"""Memory, streams, events and graphs of a CUDA device, through NVIDIA's own Python bindings.

cuda-python (``cuda.bindings``) and not CuPy: nothing here computes, plain allocations and copies are
all that is needed, and the bindings bring neither kernels nor a memory pool of their own.

Every call that waits for the device or copies between it and the host is counted (``Traffic``), so
that a step's round trips are a figure and not a belief.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime as cudart

from engines.base import EngineError


@dataclass(slots=True)
class Traffic:
    """What crossed between host and device since the counters were made."""

    num_waits: int = 0
    num_to_device: int = 0
    num_to_host: int = 0
    num_launches: int = 0


class Rows(NamedTuple):
    """First byte of the first row, and how many bytes apart rows are."""

    pointer: int
    pitch: int


def check(result: tuple[Any, ...]) -> Any:
    """Value of a CUDA runtime call.

    Raises:
        EngineError: the call failed, in CUDA's words.
    """
    status, *values = result
    if status != cudart.cudaError_t.cudaSuccess:
        _, text = cudart.cudaGetErrorString(status)
        raise EngineError(f"CUDA: {text.decode() if text else status}")
    return values[0] if values else None


def num_devices() -> int:
    """CUDA devices that this process can use.

    Raises:
        EngineError: no driver, or one that is too old; says which.
    """
    return int(check(cudart.cudaGetDeviceCount()))


def compute_capability(index: int) -> str:
    """Compute capability of a device, for example "8.0".

    Raises:
        EngineError: there is no such device.
    """
    count = num_devices()
    if index >= count:
        raise EngineError(f"device {index}: this machine has {count} CUDA devices")
    kinds = cudart.cudaDeviceAttr
    major = check(cudart.cudaDeviceGetAttribute(kinds.cudaDevAttrComputeCapabilityMajor, index))
    minor = check(cudart.cudaDeviceGetAttribute(kinds.cudaDevAttrComputeCapabilityMinor, index))
    return f"{major}.{minor}"


def use_device(index: int) -> None:
    """Make a device the current one of this thread."""
    check(cudart.cudaSetDevice(index))


class DeviceMemory:
    """Zeroed bytes of the current device, freed by ``free``."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.pointer = int(check(cudart.cudaMalloc(num_bytes)))
        check(cudart.cudaMemset(self.pointer, 0, num_bytes))

    def free(self) -> None:
        """Give the memory back; once."""
        check(cudart.cudaFree(self.pointer))


class PinnedArray:
    """An array of page-locked host memory, which copies to and from a device need to overlap."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype)
        self.num_bytes = int(np.prod(shape)) * kind.itemsize
        self.pointer = int(check(cudart.cudaHostAlloc(self.num_bytes, cudart.cudaHostAllocDefault)))
        memory = (ctypes.c_byte * self.num_bytes).from_address(self.pointer)
        view = np.frombuffer(memoryview(memory), dtype=np.uint8)
        self.array: npt.NDArray[Any] = view.view(kind).reshape(shape)
        self.array.fill(0)

    def free(self) -> None:
        """Give the memory back; the array must not be used afterwards."""
        check(cudart.cudaFreeHost(self.pointer))


class Stream:
    """Work that the device does in order.

    Args:
        traffic: counts this stream's waits, copies and launches.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        flags = cudart.cudaStreamNonBlocking
        self.handle = int(check(cudart.cudaStreamCreateWithFlags(flags)))

    def wait(self) -> None:
        """Return when everything enqueued so far is done."""
        self.traffic.num_waits += 1
        check(cudart.cudaStreamSynchronize(self.handle))

    def copy_to_device(self, destination: int, source: PinnedArray, num_bytes: int) -> None:
        """Enqueue a copy of the first bytes of a host array."""
        self.traffic.num_to_device += 1
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(cudart.cudaMemcpyAsync(destination, source.pointer, num_bytes, kind, self.handle))

    def copy_to_host(self, destination: PinnedArray, source: int, num_bytes: int) -> None:
        """Enqueue a copy into the first bytes of a host array; valid after the next ``wait``."""
        self.traffic.num_to_host += 1
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(cudart.cudaMemcpyAsync(destination.pointer, source, num_bytes, kind, self.handle))

    def copy_rows(self, destination: Rows, source: Rows, *, width: int, rows: int) -> None:
        """Enqueue a copy on the device of ``width`` bytes of each of ``rows`` rows."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(
            cudart.cudaMemcpy2DAsync(
                destination.pointer,
                destination.pitch,
                source.pointer,
                source.pitch,
                width,
                rows,
                kind,
                self.handle,
            )
        )

    def zero_rows(self, destination: Rows, *, width: int, rows: int) -> None:
        """Enqueue zeros for ``width`` bytes of each of ``rows`` rows."""
        check(
            cudart.cudaMemset2DAsync(
                destination.pointer, destination.pitch, 0, width, rows, self.handle
            )
        )

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What ``enqueue`` puts on this stream, recorded and not run.

        Raises:
            EngineError: it does something that cannot be recorded; the stream is usable again.
        """
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(cudart.cudaStreamBeginCapture(self.handle, mode))
        try:
            enqueue()
        finally:
            # Also ends a capture that failed; its error follows the first one.
            ended = cudart.cudaStreamEndCapture(self.handle)
        graph = check(ended)
        try:
            return Graph(check(cudart.cudaGraphInstantiate(graph, 0)))
        finally:
            check(cudart.cudaGraphDestroy(graph))

    def launch(self, graph: Graph) -> None:
        """Enqueue a recorded graph."""
        self.traffic.num_launches += 1
        check(cudart.cudaGraphLaunch(graph.executable, self.handle))

    def close(self) -> None:
        """Free the stream."""
        check(cudart.cudaStreamDestroy(self.handle))


class Graph:
    """Recorded work, ready to be launched again and again."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable

    def close(self) -> None:
        """Free the recording."""
        check(cudart.cudaGraphExecDestroy(self.executable))
