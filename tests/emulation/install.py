"""Puts an emulated GPU under the code that drives a real one, for the life of a MonkeyPatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnxruntime
import outrider.engines.accelerators.device.cuda
import outrider.engines.accelerators.device.sampling.kernels.compiled
import outrider.engines.accelerators.tensorrt.api
import outrider.engines.onnx.session
import outrider.export.accelerators.tensorrt.build
import pytest
from outrider.engines.accelerators.device.cuda import CudaDevice

from tests.emulation import tensorrt_runtime
from tests.emulation.cuda_provider import CPU_PROVIDER, CUDA_PROVIDER, cuda_session
from tests.emulation.cuda_runtime import EmulatedCuda
from tests.emulation.kernels.host import HostKernels
from tests.emulation.tensorrt_runtime import emulated_tensorrt


def emulate(
    patch: pytest.MonkeyPatch,
    *,
    has_provider: bool = True,
    has_kernels: bool = True,
    eager: Callable[[int], bool] = lambda number: False,
) -> EmulatedCuda:
    """A GPU with TensorRT-RTX, ONNX Runtime's CUDA provider and the sampler's kernels."""
    cuda = EmulatedCuda(eager=eager)

    class Kernels(HostKernels):
        """They run on the device's stream, when its time has come."""

        def __init__(self, device: CudaDevice) -> None:
            super().__init__()
            self._stream = device.stream

        def launch(self, name: str, width: int, height: int, arguments: Sequence[int]) -> None:
            given = tuple(arguments)
            cuda.enqueue(self._stream, lambda: HostKernels.launch(self, name, width, height, given))

    patch.setattr(
        outrider.engines.accelerators.device.sampling.kernels.compiled, "CudaKernels", Kernels
    )
    missing = "" if has_kernels else "no compiler here"
    patch.setattr(
        outrider.engines.accelerators.device.sampling.kernels.compiled,
        "why_no_compiler",
        lambda capability: missing,
    )
    trt = emulated_tensorrt(cuda)
    patch.setattr(outrider.engines.accelerators.device.cuda, "cudart", cuda)
    patch.setattr(
        outrider.engines.accelerators.tensorrt.api,
        "_import_first",
        lambda names: trt if "tensorrt_rtx_bindings" in names else None,
    )
    patch.setattr(
        outrider.export.accelerators.tensorrt.build, "build_plan", tensorrt_runtime.build_plan
    )
    patch.setattr(onnxruntime, "InferenceSession", cuda_session(cuda))
    providers = [*([CUDA_PROVIDER] if has_provider else []), CPU_PROVIDER]
    patch.setattr(outrider.engines.onnx.session, "why_not_loadable", lambda: "")
    patch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    return cuda
