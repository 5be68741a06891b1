"""The backends of this add-on; each implements ``engines.backends.Backend``.

What they import may be missing: CUDA's bindings, ONNX Runtime where plans alone serve, TensorRT.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from outrider.engines.accelerators.device import base
from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.sampling.kernels.launches import Kernels
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler, why_too_large
from outrider.engines.accelerators.pair import open_together
from outrider.engines.backends import EngineOptions, Which
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.devices import CUDA
from outrider.engines.pair import Pair

if TYPE_CHECKING:
    from outrider.engines.accelerators.device.cuda import CudaDevice

_NO_BINDINGS = "cuda-bindings is not installed"
_NO_HOST_KERNELS = "the sampler's kernels are for GPUs; the host has a sampler of its own"


class HostBackend:
    """The host as a device, with ONNX Runtime's CPU provider, for tests of an accelerator's code."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Return nothing: the host is there."""
        return ""

    def why_no_sampler(self, bundle: Bundle, index: int) -> str:
        """Say that the host has no kernels."""
        return _NO_HOST_KERNELS

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
            lambda: self._open_sampler(bundle, memory, max_batch),
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

    def _open_sampler(self, bundle: Bundle, memory: PlanDevice, max_batch: int) -> DeviceSampler:
        return DeviceSampler(
            self._open_kernels(memory),
            max_batch=max_batch,
            max_gamma=bundle.manifest.max_gamma,
            vocab_size=bundle.manifest.target.vocab_size,
            device=memory,
        )

    def _open_kernels(self, memory: Any) -> Kernels:
        raise EngineError(_NO_HOST_KERNELS)


class CudaBackend(HostBackend):
    """ONNX Runtime's CUDA provider."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Say why the provider cannot start, or has no graphs of the bundle."""
        return _why_no_cuda(index) or _why_no_device_graphs(bundle, index)

    def why_no_sampler(self, bundle: Bundle, index: int) -> str:
        """Say why the kernels do not run, or not over the bundle's vocabulary."""
        return why_too_large(bundle.manifest.target.vocab_size) or _why_no_kernels(index)

    def _open_memory(self, index: int) -> CudaDevice:
        from outrider.engines.accelerators.device.cuda import CudaDevice

        return CudaDevice(index)

    def _open_kernels(self, memory: CudaDevice) -> Kernels:
        from outrider.engines.accelerators.device.sampling.kernels.compiled import CudaKernels

        return CudaKernels(memory)


class TensorRtBackend(CudaBackend):
    """TensorRT's plans."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Say why no plans of the bundle run."""
        try:
            from outrider.engines.accelerators.tensorrt.engine import check_plans
        except ImportError:
            return _NO_BINDINGS
        try:
            check_plans(bundle, index)
        except (EngineError, BundleError) as error:
            return str(error)
        return ""

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


def _why_no_kernels(index: int) -> str:
    try:
        from outrider.engines.accelerators.device.cuda import compute_capability
        from outrider.engines.accelerators.device.sampling.kernels.compiled import why_no_compiler
    except ImportError:
        return _NO_BINDINGS
    try:
        return why_no_compiler(compute_capability(index))
    except EngineError as error:
        return str(error)


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
