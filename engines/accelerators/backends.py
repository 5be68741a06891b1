"""The backends of this add-on; each implements ``engines.backends.Backend``.

What they import may be missing: CUDA's bindings, ONNX Runtime where plans alone serve, TensorRT.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from outrider.engines.accelerators.device import base
from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.sampling.sampler import GraphSampler
from outrider.engines.accelerators.pair import open_together
from outrider.engines.backends import EngineOptions, Which
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import SAMPLER_FOLDER
from outrider.engines.devices import CUDA
from outrider.engines.pair import Pair

if TYPE_CHECKING:
    from outrider.engines.accelerators.device.cuda import CudaDevice

_NO_BINDINGS = "cuda-bindings is not installed"


class HostBackend:
    """The host as a device, with ONNX Runtime's CPU provider: an accelerator's rounds without one."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Return nothing: the host is there."""
        return ""

    def why_no_sampler(self, bundle: Bundle, index: int) -> str:
        """Say that the bundle lacks the sampler's graphs, if it does."""
        if (bundle.root / SAMPLER_FOLDER).is_dir():
            return ""
        return f"the bundle has no {SAMPLER_FOLDER}/; export it again"

    def open_engine(
        self, bundle: Bundle, entry: ModelEntry, which: Which, index: int, options: EngineOptions
    ) -> PlanEngine:
        """Return one model over a device of its own; see ``Backend.open_engine``."""
        memory = self._open_memory(index)
        with ExitStack() as undo:
            undo.callback(memory.close)
            engine = self._open_model(bundle, entry, which, memory, options, owns_device=True)
            undo.pop_all()
        return engine

    def open_pair(self, bundle: Bundle, index: int, options: EngineOptions, *, reason: str) -> Pair:
        """Return models and sampler over one device, which is closed with them; see ``Backend.open_pair``."""
        max_batch = options.max_batch or bundle.manifest.max_batch
        memory = self._open_memory(index)
        return open_together(
            bundle,
            memory,
            lambda entry, which: self._open_model(bundle, entry, which, memory, options),
            lambda: self._open_sampler(bundle, memory, options, max_batch),
            max_batch=max_batch,
            reason=reason,
        )

    def _open_memory(self, index: int) -> PlanDevice:
        return base.HostDevice()

    def _open_model(
        self,
        bundle: Bundle,
        entry: ModelEntry,
        which: Which,
        memory: Any,
        options: EngineOptions,
        *,
        owns_device: bool = False,
    ) -> PlanEngine:
        from outrider.engines.accelerators.onnx.device_plan import open_on_device

        return open_on_device(
            bundle,
            entry,
            memory,
            num_threads=options.num_threads,
            max_batch=options.max_batch,
            owns_device=owns_device,
            with_trees=options.with_trees,
            provider_options=options.provider_options,
        )

    def _open_sampler(
        self, bundle: Bundle, memory: Any, options: EngineOptions, max_batch: int
    ) -> GraphSampler:
        from outrider.engines.accelerators.onnx.sampler import open_onnx_sampler

        return open_onnx_sampler(
            _sampler_graphs(bundle),
            device=memory,
            num_threads=options.num_threads,
            provider_options=options.provider_options,
            **_sizes(bundle, max_batch),
        )


class CudaBackend(HostBackend):
    """ONNX Runtime's CUDA provider; the sampler as kernels, else as graphs."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Say why the provider cannot start, or has no graphs of the bundle."""
        return _why_no_cuda(index) or _why_no_device_graphs(bundle, index)

    def why_no_sampler(self, bundle: Bundle, index: int) -> str:
        """Say why neither kernels nor graphs run."""
        if not _why_no_kernels(index):
            return ""
        return super().why_no_sampler(bundle, index) or self._why_no_graphs(bundle, index)

    def _why_no_graphs(self, bundle: Bundle, index: int) -> str:
        return _why_no_cuda(index)

    def _open_memory(self, index: int) -> CudaDevice:
        from outrider.engines.accelerators.device.cuda import CudaDevice

        return CudaDevice(index)

    def _open_sampler(
        self, bundle: Bundle, memory: Any, options: EngineOptions, max_batch: int
    ) -> GraphSampler:
        if _why_no_kernels(memory.index):
            return self._open_graphs(bundle, memory, options, max_batch)
        from outrider.engines.accelerators.device.sampling.kernels.compiled import CudaKernels
        from outrider.engines.accelerators.device.sampling.kernels.graphs import open_kernel_sampler

        return open_kernel_sampler(CudaKernels(memory), device=memory, **_sizes(bundle, max_batch))

    def _open_graphs(
        self, bundle: Bundle, memory: Any, options: EngineOptions, max_batch: int
    ) -> GraphSampler:
        return super()._open_sampler(bundle, memory, options, max_batch)


class TensorRtBackend(CudaBackend):
    """TensorRT's plans; the sampler as kernels, else as plans, else as graphs on ONNX Runtime."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Say why no plans of the bundle run."""
        try:
            from outrider.engines.accelerators.tensorrt.engine import check_plans
        except ImportError:
            return _NO_BINDINGS
        try:
            check_plans(bundle, index)
        except EngineError as error:
            return str(error)
        return ""

    def _why_no_graphs(self, bundle: Bundle, index: int) -> str:
        without_plans = _why_no_sampler_plans(bundle, index)
        without_cuda = _why_no_cuda(index) if without_plans else ""
        return f"{without_plans}; {without_cuda}" if without_cuda else ""

    def _open_model(
        self,
        bundle: Bundle,
        entry: ModelEntry,
        which: Which,
        memory: Any,
        options: EngineOptions,
        *,
        owns_device: bool = False,
    ) -> PlanEngine:
        from outrider.engines.accelerators.tensorrt.engine import open_tensorrt

        return open_tensorrt(
            bundle,
            entry,
            which,
            device=memory,
            max_batch=options.max_batch,
            owns_device=owns_device,
            with_trees=options.with_trees,
        )

    def _open_graphs(
        self, bundle: Bundle, memory: Any, options: EngineOptions, max_batch: int
    ) -> GraphSampler:
        if _why_no_sampler_plans(bundle, memory.index):
            return super()._open_graphs(bundle, memory, options, max_batch)
        from outrider.engines.accelerators.tensorrt.sampler import open_tensorrt_sampler

        return open_tensorrt_sampler(bundle, memory, max_batch=max_batch)


def _sizes(bundle: Bundle, max_batch: int) -> dict[str, Any]:
    """Return the sizes of a sampler of a bundle's rows."""
    return {
        "max_batch": max_batch,
        "max_gamma": bundle.manifest.max_gamma,
        "vocab_size": bundle.manifest.target.vocab_size,
    }


def _sampler_graphs(bundle: Bundle) -> dict[str, bytes]:
    """Return the sampler's graphs by file name: a graph is loaded when it is first used, perhaps days from now."""
    names = [name for name in bundle.manifest.files if name.startswith(f"{SAMPLER_FOLDER}/")]
    return {name.removeprefix(f"{SAMPLER_FOLDER}/"): bundle.read(name) for name in names}


def _why_no_kernels(index: int) -> str:
    """Say why the sampler does not run as kernels; the graphs of the bundle may instead."""
    try:
        from outrider.engines.accelerators.device.cuda import compute_capability
        from outrider.engines.accelerators.device.sampling.kernels.compiled import why_no_compiler
    except ImportError:
        return _NO_BINDINGS
    try:
        return why_no_compiler(compute_capability(index))
    except EngineError as error:
        return str(error)


def _why_no_sampler_plans(bundle: Bundle, index: int) -> str:
    """Say why TensorRT does not run the sampler itself; ONNX Runtime's CUDA provider may instead."""
    from outrider.engines.accelerators.tensorrt.sampler import check_sampler_plans

    try:
        check_sampler_plans(bundle, index)
    except EngineError as error:
        return str(error)
    return ""


def _why_no_device_graphs(bundle: Bundle, index: int) -> str:
    from outrider.engines.accelerators.device.cuda import compute_capability

    capability = compute_capability(index)
    models = (bundle.manifest.target, bundle.manifest.draft)
    reasons = (bundle.why_no_device(model, capability) for model in models if model is not None)
    return next(filter(None, reasons), "")


def _why_no_cuda(index: int) -> str:
    try:
        from outrider.engines.onnx.session import why_unavailable
    except ImportError:  # plans alone can serve
        return "onnxruntime is not installed"
    if reason := why_unavailable(CUDA):
        return reason
    try:
        from outrider.engines.accelerators.device.cuda import compute_capability
    except ImportError:
        return _NO_BINDINGS
    try:
        compute_capability(index)
    except EngineError as error:
        return str(error)
    return ""
