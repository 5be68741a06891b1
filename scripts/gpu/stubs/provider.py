"""What ONNX Runtime's CUDA provider does with a graph, seen from the stub libraries.

Runs in the environment of ``scripts.gpu.stubs.environment`` alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from outrider.engines.accelerators.device.base import (
    Call,
    DeviceTensor,
    HostDevice,
    NotRecordedError,
)
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import EngineError
from outrider.engines.onnx.session import open_session

from scripts.tools.library_log import WARNINGS, log_of_libraries, num_memcpys, sessions_made_by

_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": np.uint16,
    "tensor(bool)": np.bool_,
    "tensor(int32)": np.int32,
}
_CUDA, _DEVICE_MEMORY = "CUDAExecutionProvider", "Cuda"
# Of cudaStreamBeginCapture, as CudaDevice asks for it.
_THREAD_LOCAL = 1
# Parts of kernels' names, in the order in which they are looked for.
_ATTENTION = {
    "cudnn plan": "cuDNN",
    "flash": "Flash",
    "attention_kernel_batched_impl": "memory-efficient",
    "oftmax": "unfused",
}
_SUBMISSIONS = ("launch", "product", "cudnn", "copy", "set")


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a graph asked of CUDA.

    Attributes:
        sizes: of the dimensions that have names.
        events: how often each call was made, by the first word of its event, and copies by direction.
        kernels: how often each kernel was launched, products and cuDNN's plans among them.
        num_submissions: pieces of work given to the device: kernels, products, cuDNN's plans, copies.
        num_uploads: copies from the host among them.
        num_waits: calls that wait for the device, and copies to the host.
        attention: the kind of kernel that attended; empty if none did.
    """

    sizes: Mapping[str, int]
    events: Mapping[str, int]
    kernels: Mapping[str, int]
    num_submissions: int
    num_uploads: int
    num_waits: int
    attention: str


@dataclass(slots=True)
class Placement:
    """Where a graph's nodes and tensors lie, and what its runs ask of CUDA.

    Attributes:
        refused: why ``open_session`` refuses the graph; empty where it opens it.
        on_device: number of nodes on the device.
        on_host: the others, as "Operator name".
        num_memcpys: nodes that ONNX Runtime added to copy between host and device.
        host_inputs: inputs that are read on the host; ``host_outputs`` likewise.
        records: whether a CUDA graph of it was recorded and replayed.
        why_not_recorded: the library's words.
        failure: of a run, in the library's words.
    """

    graph: str
    refused: str = ""
    on_device: int = 0
    on_host: list[str] = field(default_factory=list)
    num_memcpys: int = 0
    host_inputs: list[str] = field(default_factory=list)
    host_outputs: list[str] = field(default_factory=list)
    records: bool = False
    why_not_recorded: str = ""
    runs: list[Run] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StubRecording:
    """A graph of the stub's."""

    library: ctypes.CDLL
    graph: ctypes.c_void_p
    stream: int

    def launch(self) -> None:
        """Note that it was launched."""
        self.library.cudaGraphLaunch(self.graph, ctypes.c_void_p(self.stream))

    def close(self) -> None:
        """Nothing is held."""


class StubDevice(HostDevice):
    """Memory of the host that is given to the CUDA provider as a device's, with a stream of the stub's."""

    kind = "cuda"
    compute_capability = "9.0"  # as in cudart.c

    def __init__(self) -> None:
        super().__init__()
        handle = ctypes.c_void_p()
        self._library = ctypes.CDLL("libcudart.so.13")
        self._library.stub_take_events.restype = ctypes.c_char_p
        self._library.stub_used_code.restype = ctypes.c_size_t
        self._library.cudaStreamCreate(ctypes.byref(handle))
        assert handle.value is not None
        self.stream = handle.value

    def capture(self, enqueue: Callable[[], None]) -> StubRecording:
        """Record on the stub's stream.

        Raises:
            NotRecordedError: something was asked for that CUDA refuses while a stream is recorded.
        """
        stream, graph = ctypes.c_void_p(self.stream), ctypes.c_void_p()
        self._library.cudaStreamBeginCapture(stream, _THREAD_LOCAL)
        try:
            enqueue()
        except EngineError as error:
            self._library.cudaStreamEndCapture(stream, ctypes.byref(graph))
            raise NotRecordedError(str(error)) from error
        if status := self._library.cudaStreamEndCapture(stream, ctypes.byref(graph)):
            raise NotRecordedError(f"the capture ended with CUDA's error {status}")
        return StubRecording(self._library, graph, self.stream)

    def used_code(self) -> tuple[list[int], int]:
        """Return the provider's fat binaries of which a kernel was launched, by rank, and of how many they are."""
        total = ctypes.c_size_t()
        room = self._library.stub_used_code(None, ctypes.c_size_t(0), ctypes.byref(total))
        ranks = (ctypes.c_size_t * max(1, room))()
        self._library.stub_used_code(ranks, ctypes.c_size_t(room), ctypes.byref(total))
        return sorted(ranks[:room]), total.value

    def take_events(self) -> list[str]:
        """Return what was asked of CUDA since the last call, in order."""
        return str(self._library.stub_take_events().decode()).splitlines()


def place(path: Path, name: str, shapes: list[Mapping[str, int]], device: StubDevice) -> Placement:
    """Open a graph as the engine does, and run it at each shape.

    Args:
        path: of the graph.
        name: what the result calls it.
        shapes: sizes of the dimensions that have names.
        device: to run on.
    """
    found = Placement(name)
    with watching() as watched:
        try:
            open_session(path, device="cuda", stream=device.stream)
        except EngineError as error:
            found.refused = str(error)
    found.num_memcpys = num_memcpys(watched.log)
    for session in watched.sessions:
        _note_places(session, found)
    if found.refused:
        return found
    (session,) = watched.sessions
    try:
        for sizes in shapes:
            found.runs.append(_run(BoundSession(session, device), session, sizes, device))
        _try_recording(path, shapes[0], device, found)
    except EngineError as error:
        found.failure = str(error)
    return found


def record_round(
    draft: Path, target: Path, sizes: Mapping[str, int], gamma: int, device: StubDevice
) -> list[str]:
    """Return the events of a round's models recorded as one CUDA graph: draft steps, then a verification.

    Raises:
        NotRecordedError: something was asked for that CUDA refuses while a stream is recorded.
    """
    calls = []
    for path, tokens, count in ((draft, 1, gamma), (target, gamma + 1, 1)):
        session = open_session(path, device="cuda", stream=device.stream)
        bound = BoundSession(session, device)
        call = _call(session, {**sizes, "tokens": tokens}, device)
        calls += [(bound, call)] * count

    def enqueue() -> None:
        for bound, call in calls:
            bound.run(call)

    enqueue()  # allocates, and plans
    device.take_events()
    device.capture(enqueue).launch()
    return device.take_events()


def _note_places(session: onnxruntime.InferenceSession, found: Placement) -> None:
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        if part.ep_name == _CUDA:
            found.on_device += len(nodes)
        else:
            found.on_host += [f"{node.op_type} {node.name}" for node in nodes]
    places = (
        (found.host_inputs, session.get_inputs(), session.get_input_memory_infos()),
        (found.host_outputs, session.get_outputs(), session.get_output_memory_infos()),
    )
    for names, tensors, memories in places:
        both = zip(tensors, memories, strict=True)
        names += [tensor.name for tensor, memory in both if memory.name != _DEVICE_MEMORY]


def _run(
    bound: BoundSession,
    session: onnxruntime.InferenceSession,
    sizes: Mapping[str, int],
    device: StubDevice,
) -> Run:
    """Run twice, since the first run also allocates and plans; tell of the second."""
    call = _call(session, sizes, device)
    bound.run(call)
    device.take_events()
    bound.run(call)
    events, kernels = Counter[str](), Counter[str]()
    for event in device.take_events():
        kind, _, what = event.partition(" ")
        if kind in ("copy", "wait_for_copy"):
            events[f"{kind} {what.split()[0]}"] += 1
        elif kind != "default":
            events[kind] += 1
        if kind in ("launch", "product", "cudnn"):
            kernels[what if kind == "launch" else event] += 1
    waits = (kind for kind in events if kind.startswith("wait") or kind.endswith("_to_host"))
    return Run(
        sizes=dict(sizes),
        events=dict(events),
        kernels=dict(kernels),
        num_submissions=sum(events[kind] for kind in events if kind.split()[0] in _SUBMISSIONS),
        num_uploads=events["copy host_to_device"],
        num_waits=sum(events[kind] for kind in waits),
        attention=next(
            (kind for part, kind in _ATTENTION.items() if part in " ".join(kernels)), ""
        ),
    )


def _call(
    session: onnxruntime.InferenceSession, sizes: Mapping[str, int], device: StubDevice
) -> Call:
    """Every tensor in memory of its own, but for caches, which are updated in place."""
    tensors: dict[str, DeviceTensor] = {}
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        dtype = np.dtype(_TYPES[tensor.type])
        old = tensors.get(tensor.name.removeprefix("new_"))
        num_bytes = max(1, int(np.prod(shape))) * dtype.itemsize
        pointer = old.pointer if old is not None else device.allocate(num_bytes)
        tensors[tensor.name] = DeviceTensor(pointer, shape, dtype)
    return Call(tuple(tensors.items()), lambda: tensors)


def _try_recording(
    path: Path, sizes: Mapping[str, int], device: StubDevice, found: Placement
) -> None:
    try:
        with watching():
            session = open_session(path, device="cuda", stream=device.stream)
    except EngineError as error:
        found.why_not_recorded = str(error)
        return
    bound, call = BoundSession(session, device, records=True), _call(session, sizes, device)
    device.take_events()
    for _ in range(3):  # alone, recorded, replayed
        bound.run(call)
    events = device.take_events()
    found.records = events.count("end_capture") == 1 and events[-1].startswith("replay")
    if not found.records:
        found.why_not_recorded = "it was opened, and nothing was recorded"


@dataclass(slots=True)
class Watched:
    """Graphs that were opened, their sessions where they could be, and what the library logged."""

    paths: list[Path] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)
    log: str = ""


@contextmanager
def watching() -> Iterator[Watched]:
    """Note sessions, with their assignment of nodes, and take the library's log from stderr."""
    watched = Watched()

    def make(plain: Any, path: str, options: onnxruntime.SessionOptions, **given: object) -> object:
        watched.paths.append(Path(path))
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.log_severity_level = WARNINGS
        session = plain(path, options, **given)
        watched.sessions.append(session)
        return session

    with log_of_libraries() as log, sessions_made_by(make):
        try:
            yield watched
        finally:
            watched.log = log.take()
