"""TensorRT's runtime emulated by ONNX Runtime's CPU: plans that hold the graph they would be built from.

Holds callers to what TensorRT's documentation asks of them: shapes inside the profile that a context was
given, aligned addresses of memory that is there, every tensor bound, and no change of a context whose run
was recorded.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from outrider.engines.accelerators.tensorrt.api import TensorRtApi, find_api
from outrider.engines.onnx.session import open_session
from outrider.export.accelerators.tensorrt.network import PlanJob, Report, _input_shapes

from tests.emulation.cuda_runtime import ALIGNMENT, EmulatedCuda

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
_TYPES |= {"tensor(bool)": np.bool_, "tensor(int32)": np.int32, "tensor(uint32)": np.uint32}
_SCRATCH_BYTES = 4096
_HEADER_BYTES = 64


def build_plan(api: TensorRtApi, job: PlanJob, report: Report) -> bytes:
    """What an emulated engine is loaded from: the graph with its weights, and its profiles' shapes."""
    model = onnx.load(job.graph)
    shapes = [
        {value.name: _input_shapes(_Dimensions(value), profile) for value in model.graph.input}
        for profile in job.profiles
    ]
    report("emulated", 1, 1)
    return pickle.dumps((model.SerializeToString(), shapes, dict(job.updates)))


class _Dimensions:
    """A graph's input as TensorRT's parser describes it."""

    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self._axes = value.type.tensor_type.shape.dim
        self.shape = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in self._axes]

    def get_dimension_name(self, place: int) -> str:
        return self._axes[place].dim_param


def emulated_tensorrt(cuda: EmulatedCuda) -> Any:
    """Stands for the module of TensorRT-RTX: everything but its runtime is the real one's."""
    real = find_api("rtx").trt

    class Module:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        class Runtime:
            def __init__(self, logger: Any) -> None:
                assert isinstance(logger, real.ILogger)

                self.logger = logger
                self.engine_header_size = _HEADER_BYTES

            def get_engine_validity(self, header: bytes) -> tuple[Any, int]:
                assert len(header) == _HEADER_BYTES
                if cuda.loads_plans:
                    return real.EngineValidity.VALID, 0
                self.logger.log(real.ILogger.Severity.ERROR, "the driver is too old")
                return real.EngineValidity.INVALID, 1

            def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
                if not cuda.loads_plans:
                    self.logger.log(real.ILogger.Severity.ERROR, "the driver is too old")
                    return None
                cuda.num_loaded += 1
                return Engine(cuda, real, data)

    return Module()


@cache
def _open(graph: bytes) -> onnxruntime.InferenceSession:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.onnx"
        path.write_bytes(graph)
        return open_session(path)


class Engine:
    """``ICudaEngine``."""

    def __init__(self, cuda: EmulatedCuda, trt: Any, data: bytes) -> None:
        graph, self.shapes, self.updates = pickle.loads(data)
        self.session = _open(graph)
        self.name = hashlib.sha256(graph).hexdigest()
        self.cuda, self.trt = cuda, trt
        self.inputs = {tensor.name: _TYPES[tensor.type] for tensor in self.session.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.num_optimization_profiles = len(self.shapes)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.trt.TensorIOMode
        return modes.INPUT if name in self.inputs else modes.OUTPUT

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return list(self.shapes[index][name])

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return _SCRATCH_BYTES * (index + 1)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return next((past for past, present in self.updates.items() if present == name), None)

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Any) -> Context:
        strategies = self.trt.DynamicShapesKernelSpecializationStrategy
        assert config.dynamic_shapes_kernel_specialization_strategy == strategies.NONE
        if self.name not in config.cache.kernels:
            config.cache.kernels.append(self.name)
            self.cuda.num_compiled += 1
        return Context(self)


class Config:
    """``IRuntimeConfig``."""

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        pass

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Cache:
    """``IRuntimeCache``: of the engines whose kernels were compiled, in one environment."""

    environment = "this driver"

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def serialize(self) -> bytes:
        return json.dumps([self.environment, self.kernels]).encode()

    def deserialize(self, data: bytes) -> bool:
        environment, kernels = json.loads(data)
        if environment == self.environment:
            self.kernels = kernels
        return bool(environment == self.environment)


@dataclass
class Run:
    """A run as it was enqueued."""

    shapes: Mapping[str, tuple[int, ...]]
    pointers: Mapping[str, int]
    version: int


class Context:
    """``IExecutionContext``; of one profile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._has_scratch = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pointers: dict[str, int] = {}
        self._version = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert 0 <= profile < self._engine.num_optimization_profiles
        assert int(stream) in self._engine.cuda.streams
        self._profile = profile
        return True

    def set_device_memory(self, pointer: int, num_bytes: int) -> None:
        assert self._profile is not None
        assert num_bytes >= self._engine.get_device_memory_size_for_profile_v2(self._profile)
        self._engine.cuda.check_owned(pointer, num_bytes)
        self._has_scratch = True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name in self._engine.inputs
        least, _, most = self._engine.shapes[self._profile][name]
        if len(shape) != len(least):
            return False
        if self._shapes.get(name) != tuple(shape):
            self._version += 1
        self._shapes[name] = tuple(shape)
        return all(a <= size <= b for a, size, b in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        assert name in self._engine.inputs or name in self._engine.outputs
        if self._pointers.get(name) != pointer:
            self._version += 1
        self._pointers[name] = pointer
        return pointer % ALIGNMENT == 0

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        assert self._has_scratch
        assert self._shapes.keys() == engine.inputs.keys()
        assert self._pointers.keys() == {*engine.inputs, *engine.outputs}
        for past, present in engine.updates.items():
            assert self._pointers[past] == self._pointers[present], "an alias of another address"
        run = Run(dict(self._shapes), dict(self._pointers), self._version)
        engine.cuda.enqueue(stream, lambda: self._compute(run))
        return True

    def _compute(self, run: Run) -> None:
        """Reads and writes what the addresses hold when the stream gets here."""
        engine = self._engine
        feeds = {
            name: self._view(run.pointers[name], run.shapes[name], kind)
            for name, kind in engine.inputs.items()
        }
        binding = engine.session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        aliased = {present: past for past, present in engine.updates.items()}
        for name in engine.outputs:
            if name in aliased:
                array = feeds[aliased[name]]
                place = (array.dtype.type, array.shape, array.ctypes.data)
                binding.bind_output(name, "cpu", 0, *place)
            else:
                binding.bind_output(name, "cpu")
        engine.session.run_with_iobinding(binding)
        values = zip(engine.outputs, binding.get_outputs(), strict=True)
        for name, value in values:
            if name not in aliased:
                found = value.numpy()
                self._view(run.pointers[name], found.shape, found.dtype)[...] = found

    def _view(self, pointer: int, shape: tuple[int, ...], kind: Any) -> np.ndarray:
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        self._engine.cuda.check_owned(pointer, num_bytes)
        array = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * num_bytes).from_address(pointer)
        )
        return array.view(kind).reshape(shape)
