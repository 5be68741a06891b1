"""Facts of the machine of a check, and its best rates: copies and matrix products per second."""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from outrider.engines.accelerators.device.base import (
    Call,
    DeviceTensor,
    HostDevice,
    PlanDevice,
    Rows,
)
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import EngineError
from outrider.engines.devices import CPU, CUDA, Device
from outrider.engines.onnx.session import open_session, why_unavailable

from scripts.tools.results import installed_versions

PACKAGES = (
    "numpy", "torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13-libs", "cuda-bindings",
)  # fmt: skip
_COPY_BYTES = {CPU: 1 << 26, CUDA: 1 << 28}
_SIZES = {CPU: 512, CUDA: 8192}
_REPEATS = 20
_KINDS = {
    "float32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A machine's best rates.

    Attributes:
        bytes_per_s: read and written together, by a copy within the device's memory.
        products_per_s: multiply-adds of a large matrix product; infinite where it was not measured.
        missing: why it was not, in words.
    """

    bytes_per_s: float
    products_per_s: float
    missing: str = ""


def open_memory(device: Device) -> PlanDevice:
    """The memory and stream of a device."""
    if device.kind == CPU:
        return HostDevice()
    from outrider.engines.accelerators.device.cuda import CudaDevice

    return CudaDevice(device.index)


def measure_rates(device: Device, precision: str) -> Rates:
    """Rates of a device; products in a precision, on ONNX Runtime's provider for it, else PyTorch's.

    Args:
        device: which.
        precision: of the products; 16 bits of any kind count as float16.
    """
    memory = open_memory(device)
    num_bytes = _COPY_BYTES[memory.kind]
    pieces = [memory.allocate(num_bytes) for _ in range(2)]
    source, destination = (Rows(piece, num_bytes) for piece in pieces)

    def copy() -> None:
        memory.copy_rows(destination, source, width=num_bytes, rows=1)

    copy_s = per_call_s(copy, memory.wait, _REPEATS)
    for piece in pieces:
        memory.free(piece)
    missing, products = why_unavailable(CPU if device.kind == CPU else CUDA), float("inf")
    if not missing:
        products = _products_per_s(memory, precision)
    elif torch.cuda.is_available():
        missing, products = "", torch_products_per_s(f"cuda:{device.index}", precision)
    memory.close()
    return Rates(bytes_per_s=2 * num_bytes / copy_s, products_per_s=products, missing=missing)


def _products_per_s(memory: PlanDevice, precision: str) -> float:
    size = _SIZES[memory.kind]
    # The host has no arithmetic in 16 bits worth measuring.
    kind, dtype = _KINDS["float32" if precision == "float32" or memory.kind == CPU else "float16"]
    values = [helper.make_tensor_value_info(name, kind, (size, size)) for name in "abc"]
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([node], "product", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.onnx"
        onnx.save(model, path)
        session = BoundSession(
            open_session(path, device=memory.kind, device_index=memory.index, stream=memory.stream),
            memory,
        )
    pieces = [memory.allocate(size * size * dtype.itemsize) for _ in range(3)]
    tensors = {
        name: DeviceTensor(piece, (size, size), dtype)
        for name, piece in zip("abc", pieces, strict=True)
    }
    _randomise(memory, [tensors["a"], tensors["b"]])
    call = Call("product", lambda: tensors)
    seconds = per_call_s(lambda: session.run(call), memory.wait, _REPEATS)
    session.close()
    for piece in pieces:
        memory.free(piece)
    return size**3 / seconds


def _randomise(memory: PlanDevice, tensors: Sequence[DeviceTensor]) -> None:
    """Fill tensors with random numbers: a GPU multiplies zeros an eighth faster."""
    generator = np.random.default_rng(0)
    for tensor in tensors:
        staging = memory.stage(tensor.num_bytes)
        values = generator.standard_normal(tensor.shape, dtype=np.float32).astype(tensor.dtype)
        staging.array[...] = values.reshape(-1).view(np.uint8)
        memory.upload(tensor.pointer, staging, tensor.num_bytes)
        memory.wait()
        staging.free()


def torch_products_per_s(where: str, precision: str) -> float:
    """The same by PyTorch: for machines that have no CUDA provider beside TensorRT.

    Args:
        where: device as PyTorch calls it.
        precision: of the products; 16 bits of any kind count as float16.
    """
    device = torch.device(where)
    size = _SIZES[device.type]
    kind = torch.float32 if precision == "float32" or device.type == CPU else torch.float16
    matrices = [torch.randn(size, size, device=device).to(kind) for _ in range(3)]

    def wait() -> None:
        if device.type != CPU:
            torch.cuda.synchronize(device)

    seconds = per_call_s(lambda: torch.matmul(*matrices[:2], out=matrices[2]), wait, _REPEATS)
    return size**3 / seconds


def per_call_s(enqueue: Callable[[], object], wait: Callable[[], None], repeats: int) -> float:
    """Seconds of a call among many that are enqueued one after another; median of three."""
    enqueue()
    wait()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            enqueue()
        wait()
        seconds.append((time.perf_counter() - began) / repeats)
    return statistics.median(seconds)


def describe_machine(device: Device) -> dict[str, str]:
    """Return the facts that every figure needs beside it: device, versions, date."""
    facts = {
        "device": str(device),
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.kind != CPU:
        from outrider.engines.accelerators.device.cuda import compute_capability, device_name

        capability = compute_capability(device.index)
        facts["gpu"] = f"{device_name(device.index)} (compute capability {capability})"
    if device.kind not in (CPU, CUDA):
        facts |= _tensorrt_facts()
    return facts | installed_versions(PACKAGES)


def _tensorrt_facts() -> dict[str, str]:
    from outrider.engines.accelerators.tensorrt.api import installed_apis

    try:
        apis = installed_apis()
    except EngineError as error:
        return {"flavours": str(error)}
    return {"flavours": ", ".join(f"{api.flavour} {api.version}" for api in apis)}
