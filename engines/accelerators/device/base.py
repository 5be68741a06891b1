"""The device contract of engines over plans: bytes, copies, zeros, and one wait.

Addresses are integers. Everything is enqueued in order; only ``wait`` returns when it is done, up to a
mark or altogether, so that the device may have work beyond what the host waits for.
``HostDevice`` does the same with the host's memory, so that the engine runs without a GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from outrider.engines.base import EngineError

# CUDA's own allocations and TensorRT's tensors start at multiples of this many bytes.
ALIGNMENT = 256


class Rows(NamedTuple):
    """First byte of the first row, and how many bytes apart rows are."""

    pointer: int
    pitch: int


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A contiguous tensor in a device's memory; ``pointer`` is the address of its first element."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Size of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one run of a graph, described only where they were not met before.

    Attributes:
        key: says which tensors these are: calls of a graph with equal keys have equal tensors.
        describe: every input and output by name.
    """

    key: Hashable
    describe: Callable[[], Mapping[str, DeviceTensor]]


@dataclass(slots=True)
class CopyCounters:
    """Counts of waits and copies between host and device since the counters were made.

    Attributes:
        num_marked: marks set so far; see ``PlanDevice.mark``.
        num_reached: how many of them, from the first on, have all their work done for certain.
    """

    num_waits: int = 0
    num_to_device: int = 0
    num_to_host: int = 0
    num_marked: int = 0
    num_reached: int = 0

    def mark(self) -> int:
        """Number of a new mark."""
        self.num_marked += 1
        return self.num_marked

    def reach(self, mark: int) -> None:
        """A mark was waited for."""
        self.num_waits += 1
        self.num_reached = max(self.num_reached, mark)


class NotRecordedError(EngineError):
    """Work cannot be recorded; nothing else came of it."""


class Recording(Protocol):
    """Work of a device that can be started again as it was."""

    def launch(self) -> None:
        """Enqueue it."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class Staging(Protocol):
    """Bytes of the host that a device copies from and to."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """[num_bytes] uint8."""
        ...

    def free(self) -> None:
        """Give the memory back; the array must not be used afterwards."""
        ...


class PlanDevice(Protocol):
    """Memory and order of one device."""

    @property
    def kind(self) -> str:
        """Name of its kind, "cpu" or "cuda"."""
        ...

    @property
    def index(self) -> int:
        """Number among the devices of its kind."""
        ...

    @property
    def compute_capability(self) -> str:
        """Of a GPU, for example "8.0"; empty for the host."""
        ...

    @property
    def stream(self) -> int:
        """Handle of the queue that everything is enqueued on; 0 where enqueuing is doing."""
        ...

    @property
    def traffic(self) -> CopyCounters:
        """Counters of waits and of copies over the host's border."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Address of new zeroed bytes, a multiple of ``ALIGNMENT``."""
        ...

    def free(self, pointer: int) -> None:
        """Give memory of ``allocate`` back, after all work enqueued so far."""
        ...

    def stage(self, num_bytes: int) -> Staging:
        """Memory of the host to copy from and to."""
        ...

    def upload(self, destination: int, source: Staging, num_bytes: int) -> None:
        """Enqueue a copy of the first bytes to the device."""
        ...

    def download(self, destination: Staging, source: int, num_bytes: int) -> None:
        """Enqueue a copy to the host; valid after a ``wait`` for it."""
        ...

    def mark(self) -> int:
        """Mark this place in the order of work; its number, for one ``wait``."""
        ...

    def copy_rows(self, destination: Rows, source: Rows, *, width: int, rows: int) -> None:
        """Enqueue a copy on the device of ``width`` bytes of each of ``rows`` rows."""
        ...

    def zero_rows(self, destination: Rows, *, width: int, rows: int) -> None:
        """Enqueue zeros for ``width`` bytes of each of ``rows`` rows."""
        ...

    def wait(self, mark: int | None = None) -> None:
        """Return when all that was enqueued before a mark is done; None for everything there is."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Recording:
        """Record what ``enqueue`` puts on the stream, without running it.

        Raises:
            NotRecordedError: it cannot be recorded; the stream is as it was.
        """
        ...

    def close(self) -> None:
        """Free what the device itself holds; memory it gave is freed before."""
        ...


class HostStaging:
    """Staging memory of a device that is the host."""

    def __init__(self, num_bytes: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.zeros(num_bytes, dtype=np.uint8)

    def free(self) -> None:
        """Drop the array."""
        self.array = np.zeros(0, dtype=np.uint8)


class HostDevice:
    """The host as a device; enqueuing is doing."""

    kind = "cpu"
    index = 0
    compute_capability = ""
    stream = 0

    def __init__(self) -> None:
        self.traffic = CopyCounters()
        self._memory: dict[int, npt.NDArray[Any]] = {}

    def allocate(self, num_bytes: int) -> int:
        """Address of new zeroed bytes."""
        memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
        pointer = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._memory[pointer] = memory
        return pointer

    def free(self, pointer: int) -> None:
        """Drop the bytes."""
        del self._memory[pointer]

    def stage(self, num_bytes: int) -> HostStaging:
        """Bytes of the host."""
        return HostStaging(num_bytes)

    def upload(self, destination: int, source: Staging, num_bytes: int) -> None:
        """Copy bytes in."""
        self.traffic.num_to_device += 1
        ctypes.memmove(destination, source.array.ctypes.data, num_bytes)

    def download(self, destination: Staging, source: int, num_bytes: int) -> None:
        """Copy bytes out."""
        self.traffic.num_to_host += 1
        ctypes.memmove(destination.array.ctypes.data, source, num_bytes)

    def copy_rows(self, destination: Rows, source: Rows, *, width: int, rows: int) -> None:
        """Copy row by row."""
        for row in range(rows):
            ctypes.memmove(
                destination.pointer + row * destination.pitch,
                source.pointer + row * source.pitch,
                width,
            )

    def zero_rows(self, destination: Rows, *, width: int, rows: int) -> None:
        """Clear row by row."""
        for row in range(rows):
            ctypes.memset(destination.pointer + row * destination.pitch, 0, width)

    def mark(self) -> int:
        """Count a mark."""
        return self.traffic.mark()

    def wait(self, mark: int | None = None) -> None:
        """Count a wait; nothing is ever under way."""
        self.traffic.reach(self.mark() if mark is None else mark)

    def capture(self, enqueue: Callable[[], None]) -> Recording:
        """Refuse: what is enqueued here is done at once."""
        raise NotRecordedError("the host records nothing")

    def close(self) -> None:
        """Drop all memory."""
        self._memory.clear()
