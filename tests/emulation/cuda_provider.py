"""ONNX Runtime's CUDA provider emulated by the CPU's: sessions whose runs go to an emulated stream.

What the CPU's provider cannot compute, bfloat16, it computes by the graph's twin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
from outrider.engines.onnx.session import WEIGHTS_FOLDER
from outrider.export.certificate.twin import twin_of

from tests.emulation.cuda_runtime import ALIGNMENT, EmulatedCuda

CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"
_PlainSession, _PlainBinding = onnxruntime.InferenceSession, onnxruntime.IOBinding


def cuda_session(cuda: EmulatedCuda) -> type[onnxruntime.InferenceSession]:
    """A class of sessions; those opened for the CPU are plain ones."""

    class Session(_PlainSession):
        def __init__(self, path: str | bytes, options: Any, **given: Any) -> None:
            self.provider = given["providers"][0]
            (asked,) = given["provider_options"]
            self.stream = int(asked.get("user_compute_stream", 0))
            self.recordings: dict[str, object] = {}
            if self.provider == CUDA_PROVIDER:
                assert 0 <= int(asked["device_id"]) < cuda.num_devices
                given |= {"providers": [CPU_PROVIDER], "provider_options": [{}]}
                twin = twin_of(Path(path), kinds={ir.DataType.BFLOAT16})
                if twin is not None:
                    options.add_session_config_entry(WEIGHTS_FOLDER, str(Path(path).parent))
                    path = twin
            super().__init__(path, options, **given)

        def get_providers(self) -> list[str]:
            return [self.provider, CPU_PROVIDER]

        def io_binding(self) -> onnxruntime.IOBinding:
            return _PlainBinding(self) if self.provider == CPU_PROVIDER else Binding(self)

        def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
            if self.provider == CPU_PROVIDER:
                super().run_with_iobinding(binding, options)
                return
            # A replayed graph does not look at what is bound.
            number = _entry(options, "gpu_graph_id")
            if number not in ("", "-1"):
                assert self.recordings.setdefault(number, binding.tensors) == binding.tensors
            assert _entry(options, "disable_synchronize_execution_providers") == "1"
            run = super().run_with_iobinding
            cuda.enqueue(self.stream, lambda: run(binding))

    class Binding(_PlainBinding):
        def __init__(self, session: Session) -> None:
            super().__init__(session)
            self.tensors: dict[str, tuple[object, ...]] = {}

        def bind_input(self, name: str, *place: Any) -> None:
            super().bind_input(name, *self._on_host(name, *place))

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
