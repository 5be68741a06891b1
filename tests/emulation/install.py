"""Puts an emulated GPU under the code that drives a real one, for the life of a MonkeyPatch."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime
import outrider.engines.device.cuda
import outrider.engines.onnx.session
import outrider.engines.tensorrt.api
import outrider.export.tensorrt.build
import pytest

from tests.emulation import tensorrt_runtime
from tests.emulation.cuda_provider import CPU_PROVIDER, CUDA_PROVIDER, cuda_session
from tests.emulation.cuda_runtime import EmulatedCuda
from tests.emulation.tensorrt_runtime import emulated_tensorrt


def emulate(
    patch: pytest.MonkeyPatch,
    *,
    has_provider: bool = True,
    eager: Callable[[int], bool] = lambda number: False,
) -> EmulatedCuda:
    """A GPU with TensorRT-RTX and, if wanted, ONNX Runtime's CUDA provider."""
    cuda = EmulatedCuda(eager=eager)
    trt = emulated_tensorrt(cuda)
    patch.setattr(outrider.engines.device.cuda, "cudart", cuda)
    patch.setattr(
        outrider.engines.tensorrt.api,
        "_import_first",
        lambda names: trt if "tensorrt_rtx_bindings" in names else None,
    )
    patch.setattr(outrider.export.tensorrt.build, "build_plan", tensorrt_runtime.build_plan)
    patch.setattr(onnxruntime, "InferenceSession", cuda_session(cuda))
    providers = [*([CUDA_PROVIDER] if has_provider else []), CPU_PROVIDER]
    patch.setattr(outrider.engines.onnx.session, "why_not_loadable", lambda: "")
    patch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    return cuda
