"""The CUDA runtime's calls over memory of the host, with streams that run as late or as early as allowed.

Proves nothing of a GPU: it runs the code that drives one. Every call is first made of the real bindings,
which convert its arguments and then answer that there is no driver, so a call that they do not take
fails here too. Work is ordered by what streams and events order and by nothing else: a stream that is
not ``eager`` runs only what somebody waits for, an eager one runs ahead as far as events let it.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import runtime as real

ALIGNMENT = 256
_OK = real.cudaError_t.cudaSuccess
_KINDS = real.cudaMemcpyKind
_POISON = 0xAA
_NUM_FREED_KEPT = 64
# Calls that need no device.
_PURE = frozenset({"cudaGetErrorString"})


@dataclass
class Place:
    """Where a stream was when an event was recorded: so many of its works are before it."""

    stream: Stream
    count: int


@dataclass
class Stream:
    """Works in order; ``works`` are those not yet done, of which ``num_done`` came before."""

    is_eager: bool
    works: deque[Callable[[], None] | Place] = field(default_factory=deque)
    num_done: int = 0
    captured: list[Callable[[], None]] | None = None

    @property
    def end(self) -> Place:
        return Place(self, self.num_done + len(self.works))

    def advance(self, count: int) -> None:
        """Run until so many works are done, and of other streams no more than they wait for."""
        while self.num_done < count:
            work = self.works.popleft()
            if isinstance(work, Place):
                work.stream.advance(work.count)
            else:
                work()
            self.num_done += 1

    def run_ahead(self) -> None:
        """Run what waits for nobody."""
        while self.works:
            work = self.works[0]
            if isinstance(work, Place) and work.stream.num_done < work.count:
                return
            self.advance(self.num_done + 1)


@dataclass
class Memory:
    """Bytes that were given."""

    array: np.ndarray
    pointer: int
    num_bytes: int
    is_host: bool


class EmulatedCuda:
    """Stands for the module ``cuda.bindings.runtime``; names it does not emulate are the real ones.

    Args:
        num_devices: that there seem to be.
        capability: compute capability of all of them.
        eager: whether the n-th stream that is made, from 0 on, runs ahead.
    """

    def __init__(
        self,
        *,
        num_devices: int = 1,
        capability: tuple[int, int] = (8, 0),
        eager: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.num_devices, self.capability, self.eager = num_devices, capability, eager
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Place | None] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.memory: dict[int, Memory] = {}
        self._pointers: list[int] = []
        self._freed: deque[Memory] = deque(maxlen=_NUM_FREED_KEPT)
        self.num_launched = 0
        self.can_record = True
        self.loads_plans = True
        self.num_compiled = self.num_loaded = 0
        self._num_made = self._num_streams = 0
        self._has_driver = real.cudaGetDeviceCount()[0] == _OK

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        emulated = getattr(type(self), f"_{name}", None)
        if emulated is None:
            is_call = callable(value) and not isinstance(value, type)
            assert not is_call or name in _PURE, f"{name} is not emulated"
            return value

        def call(*arguments: Any) -> Any:
            if not self._has_driver:
                status, *_ = value(*arguments)
                assert status == real.cudaError_t.cudaErrorInsufficientDriver, (name, status)
            result = emulated(self, *arguments)
            if isinstance(result, real.cudaError_t):
                return (result, None)
            for stream in self.streams.values():
                if stream.is_eager:
                    stream.run_ahead()
            return (_OK, *result) if isinstance(result, tuple) else (_OK,)

        return call

    def enqueue(self, handle: int, work: Callable[[], None]) -> None:
        """What a library puts on a stream."""
        stream = self.streams[int(handle)]
        if stream.captured is not None:
            stream.captured.append(work)
            return
        stream.works.append(work)
        if stream.is_eager:
            stream.run_ahead()

    def check_owned(self, pointer: int, num_bytes: int, *, is_host: bool = False) -> None:
        """Refuse bytes that lie outside what was given, or in what was freed."""
        place = bisect_right(self._pointers, pointer) - 1
        piece = self.memory[self._pointers[place]] if place >= 0 else None
        assert piece is not None and pointer + num_bytes <= piece.pointer + piece.num_bytes, (
            f"{num_bytes} bytes at {pointer:#x} are not allocated"
        )
        assert piece.is_host == is_host, "memory of the other side of the border"

    def _number(self) -> int:
        self._num_made += 1
        return self._num_made

    def _give(self, num_bytes: int, *, is_host: bool) -> int:
        assert num_bytes > 0
        array = np.full(num_bytes + ALIGNMENT, _POISON, np.uint8)
        pointer = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.memory[pointer] = Memory(array, pointer, num_bytes, is_host)
        insort(self._pointers, pointer)
        return pointer

    def _outside_captures(self) -> None:
        recording = [one for one in self.streams.values() if one.captured is not None]
        assert not recording, "not allowed while a stream is recorded"

    def _cudaGetDeviceCount(self) -> tuple[int]:
        return (self.num_devices,)

    def _cudaDeviceGetAttribute(self, kind: Any, index: int) -> tuple[int]:
        assert 0 <= index < self.num_devices
        major = real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        return (self.capability[0 if kind == major else 1],)

    def _cudaGetDeviceProperties(self, index: int) -> tuple[Any]:
        return (SimpleNamespace(name=b"Emulated GPU" + bytes(16)),)

    def _cudaSetDevice(self, index: int) -> None:
        assert 0 <= index < self.num_devices

    def _cudaMalloc(self, num_bytes: int) -> tuple[int]:
        self._outside_captures()
        return (self._give(num_bytes, is_host=False),)

    def _cudaFree(self, pointer: int) -> None:
        """Waits for the device, as CUDA does."""
        self._outside_captures()
        for stream in self.streams.values():
            stream.advance(stream.end.count)
        self._free(pointer, is_host=False)

    def _free(self, pointer: int, *, is_host: bool) -> None:
        piece = self.memory.pop(pointer)
        assert piece.is_host == is_host
        self._pointers.remove(pointer)
        piece.array.fill(_POISON)
        # Not given again soon, so that a late reader is caught.
        self._freed.append(piece)

    def _cudaHostAlloc(self, num_bytes: int, flags: int) -> tuple[int]:
        self._outside_captures()
        return (self._give(num_bytes, is_host=True),)

    def _cudaFreeHost(self, pointer: int) -> None:
        self._free(pointer, is_host=True)

    def _cudaMemcpyAsync(self, to: int, source: int, size: int, kind: Any, stream: Any) -> None:
        to_host = kind == _KINDS.cudaMemcpyDeviceToHost
        assert to_host or kind == _KINDS.cudaMemcpyHostToDevice
        self.check_owned(to, size, is_host=to_host)
        self.check_owned(source, size, is_host=not to_host)
        if to_host:
            # Who reads before it has waited reads this.
            ctypes.memset(to, _POISON, size)

        def copy() -> None:
            self.check_owned(to, size, is_host=to_host)
            self.check_owned(source, size, is_host=not to_host)
            ctypes.memmove(to, source, size)

        self.enqueue(stream, copy)

    def _cudaMemcpy2DAsync(
        self, to: int, pitch: int, source: int, from_pitch: int, width: int, rows: int, *rest: Any
    ) -> None:
        kind, stream = rest
        assert kind == _KINDS.cudaMemcpyDeviceToDevice
        assert width <= min(pitch, from_pitch)

        def copy() -> None:
            for row in range(rows):
                self.check_owned(to + row * pitch, width)
                self.check_owned(source + row * from_pitch, width)
                ctypes.memmove(to + row * pitch, source + row * from_pitch, width)

        self.enqueue(stream, copy)

    def _cudaMemsetAsync(self, pointer: int, value: int, size: int, stream: Any) -> None:
        self.check_owned(pointer, size)
        self.enqueue(stream, lambda: self._set(pointer, value, size))

    def _cudaMemset2DAsync(
        self, pointer: int, pitch: int, value: int, width: int, rows: int, stream: Any
    ) -> None:
        assert width <= pitch

        def clear() -> None:
            for row in range(rows):
                self._set(pointer + row * pitch, value, width)

        self.enqueue(stream, clear)

    def _set(self, pointer: int, value: int, size: int) -> None:
        self.check_owned(pointer, size)
        ctypes.memset(pointer, value, size)

    def _cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any]:
        number = self._number()
        self.streams[number] = Stream(is_eager=self.eager(self._num_streams))
        self._num_streams += 1
        return (real.cudaStream_t(number),)

    def _cudaStreamDestroy(self, stream: Any) -> None:
        one = self.streams.pop(int(stream))
        one.advance(one.end.count)

    def _cudaStreamSynchronize(self, stream: Any) -> None:
        self._outside_captures()
        one = self.streams[int(stream)]
        one.advance(one.end.count)

    def _cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        place = self.events[int(event)]
        if place is not None:
            self.streams[int(stream)].works.append(place)

    def _cudaEventCreateWithFlags(self, flags: int) -> tuple[Any]:
        number = self._number()
        self.events[number] = None
        return (real.cudaEvent_t(init_value=number),)

    def _cudaEventDestroy(self, event: Any) -> None:
        del self.events[int(event)]

    def _cudaEventRecord(self, event: Any, stream: Any) -> None:
        self.events[int(event)] = self.streams[int(stream)].end

    def _cudaEventSynchronize(self, event: Any) -> None:
        self._outside_captures()
        place = self.events[int(event)]
        if place is not None:
            place.stream.advance(place.count)

    def _cudaStreamBeginCapture(self, stream: Any, mode: Any) -> None:
        self._outside_captures()
        self.streams[int(stream)].captured = []

    def _cudaStreamEndCapture(self, stream: Any) -> Any:
        one = self.streams[int(stream)]
        works, one.captured = one.captured, None
        if not self.can_record:
            return real.cudaError_t.cudaErrorStreamCaptureUnsupported
        assert works, "nothing was recorded"
        return (real.cudaGraph_t(init_value=self._keep(works)),)

    def _keep(self, works: list[Callable[[], None]]) -> int:
        number = self._number()
        self.graphs[number] = works
        return number

    def _cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any]:
        return (real.cudaGraphExec_t(init_value=self._keep(self.graphs[int(graph)])),)

    def _cudaGraphDestroy(self, graph: Any) -> None:
        del self.graphs[int(graph)]

    def _cudaGraphLaunch(self, executable: Any, stream: Any) -> None:
        self.num_launched += 1
        for work in self.graphs[int(executable)]:
            self.enqueue(stream, work)

    def _cudaGraphExecDestroy(self, executable: Any) -> None:
        """What is under way is waited for, as CUDA does."""
        del self.graphs[int(executable)]
