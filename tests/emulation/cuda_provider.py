"""ONNX Runtime's CUDA provider emulated by the CPU's: sessions whose runs go to an emulated stream.

Inputs of the host are copied when they are bound and never again, as IO binding copies them. What the CPU's provider
cannot compute, bfloat16, it computes by the graph's twin.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from outrider.engines.onnx.session import WEIGHTS_FOLDER
from outrider.export.certificate.half_emulation import twin_of

from tests.emulation.cuda_runtime import ALIGNMENT, EmulatedCuda

CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"
_PlainSession, _PlainBinding = onnxruntime.InferenceSession, onnxruntime.IOBinding
# Operators whose CUDA kernels read these inputs in the host's memory, so that nothing is moved for them. Those that
# the project's graphs feed with shapes.
_HOST_READERS = {
    "ConstantOfShape": {0},
    "Expand": {1},
    "Pad": {1},
    "Range": {0, 1, 2},
    "Reshape": {1},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Tile": {1},
    "TopK": {1},
}


def host_inputs(file: str | bytes) -> frozenset[str]:
    """Names of the graph's inputs that the CUDA provider reads on the host.

    Its rule (ONNX Runtime 1.31.1, ``GetCpuPreferredNodes``): a node that computes with a shape is moved to the host if
    all it reads are shapes, constants and inputs of the graph, and so are the nodes behind it.
    """
    if isinstance(file, str):
        file = Path(file).read_bytes()
    graph = onnx.load_from_string(file).graph
    inputs = {value.name for value in graph.input}
    free = {"", *inputs, *(value.name for value in graph.initializer)}
    on_host: set[str] = set()
    found: set[str] = set()
    for node in graph.node:  # in topological order
        if node.op_type in ("Constant", "Shape"):
            (free if node.op_type == "Constant" else on_host).update(node.output)
            continue
        readers = _HOST_READERS.get(node.op_type, set())
        read = {name for place, name in enumerate(node.input) if place not in readers}
        if read & on_host and read <= on_host | free:
            on_host.update(node.output)
            found |= read & inputs
    return frozenset(found)


def cuda_session(cuda: EmulatedCuda) -> type[onnxruntime.InferenceSession]:
    """A class of sessions; those opened for the CPU are plain ones."""

    class Session(_PlainSession):
        def __init__(self, path: str | bytes, options: Any, **given: Any) -> None:
            self.provider = given["providers"][0]
            (asked,) = given["provider_options"]
            self.stream = int(asked.get("user_compute_stream", 0))
            if self.provider == CUDA_PROVIDER:
                assert 0 <= int(asked["device_id"]) < cuda.num_devices
                given |= {"providers": [CPU_PROVIDER], "provider_options": [{}]}
                self.host_inputs = host_inputs(path)
                if isinstance(path, str):
                    options.add_session_config_entry(WEIGHTS_FOLDER, str(Path(path).parent))
                    path = twin_of(Path(path), kinds={ir.DataType.BFLOAT16}) or path
            super().__init__(path, options, **given)

        def get_input_memory_infos(self) -> list[Any]:
            if self.provider == CPU_PROVIDER:
                return super().get_input_memory_infos()
            names = [tensor.name for tensor in self.get_inputs()]
            return [
                SimpleNamespace(name="Cpu" if name in self.host_inputs else "Cuda")
                for name in names
            ]

        def get_providers(self) -> list[str]:
            return [self.provider, CPU_PROVIDER]

        def io_binding(self) -> onnxruntime.IOBinding:
            return _PlainBinding(self) if self.provider == CPU_PROVIDER else Binding(self)

        def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
            if self.provider == CPU_PROVIDER:
                super().run_with_iobinding(binding, options)
                return
            assert _entry(options, "disable_synchronize_execution_providers") == "1"
            run = super().run_with_iobinding
            cuda.enqueue(self.stream, lambda: run(binding))

    class Binding(_PlainBinding):
        def __init__(self, session: Session) -> None:
            super().__init__(session)
            self.tensors: dict[str, tuple[object, ...]] = {}
            self._host_inputs = session.host_inputs
            self._copies: list[np.ndarray] = []

        def bind_input(self, name: str, *place: Any) -> None:
            kind, index, dtype, shape, pointer = self._on_host(name, *place)
            if name in self._host_inputs:
                pointer = self._copied(dtype, shape, pointer)
            super().bind_input(name, kind, index, dtype, shape, pointer)

        def _copied(self, dtype: Any, shape: Any, pointer: int) -> int:
            """Address of what lies there once the device is done with all that was enqueued."""
            for stream in cuda.streams.values():
                stream.advance(stream.end.count)
            copy = np.empty(shape, dtype)
            ctypes.memmove(copy.ctypes.data, pointer, copy.nbytes)
            self._copies.append(copy)
            return int(copy.ctypes.data)

        def bind_output(self, name: str, *place: Any) -> None:
            super().bind_output(name, *self._on_host(name, *place))

        def _on_host(self, name: str, kind: str, index: int, *tensor: Any) -> tuple[Any, ...]:
            dtype, shape, pointer = tensor
            assert kind == "cuda"
            assert pointer % ALIGNMENT == 0 or name.startswith("kept")
            self.tensors[name] = tensor
            return ("cpu", 0, dtype, shape, pointer)

    return Session


def _entry(options: Any, name: str) -> str:
    try:
        return str(options.get_run_config_entry(name))
    except RuntimeError:  # no such entry
        return ""
