"""The one place that picks TensorRT or TensorRT-RTX, and what differs between them.

Both flavours have one Python API; whatever the rest of the code uses of it exists in both
(``tests/engines/accelerators/tensorrt/test_api.py`` holds every attribute against the bindings). The differences:

* TensorRT-RTX builds for any listed GPU on a machine without one; TensorRT builds for the GPU at hand.
* TensorRT-RTX compiles kernels when a plan is loaded: it keeps those (``kernel_cache``), and no timing cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outrider.engines.accelerators.tensorrt.kernel_cache import KernelCache
from outrider.engines.base import EngineError
from outrider.engines.bundle.plans import Machine

if TYPE_CHECKING:
    import tensorrt as trt

TENSORRT, RTX = "tensorrt", "rtx"
# The meta package of TensorRT-RTX is called tensorrt_rtx; its wheels alone give the bindings.
MODULES: dict[str, tuple[str, ...]] = {
    TENSORRT: ("tensorrt",),
    RTX: ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
PACKAGES = {
    TENSORRT: "tensorrt",
    RTX: "tensorrt-rtx-cu13-libs and tensorrt-rtx-cu13-bindings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtApi:
    """An installed flavour.

    Attributes:
        flavour: "tensorrt" or "rtx".
        version: of the library.
        trt: its module.
    """

    flavour: str
    version: str
    trt: Any

    @property
    def builds_ahead_of_time(self) -> bool:
        """True if plans for a GPU that is not there can be built."""
        return self.flavour == RTX

    @property
    def has_timing_cache(self) -> bool:
        """True if measured kernel choices can be kept for the next build."""
        return self.flavour == TENSORRT

    def machine(self, compute_capability: str) -> Machine:
        """Return what plans must be built for to run with this library on a GPU."""
        return Machine(self.flavour, self.version, compute_capability)

    def make_context(
        self, engine: trt.ICudaEngine, kernels: KernelCache
    ) -> trt.IExecutionContext | None:
        """A context whose scratch memory is the caller's; None where the library refuses.

        TensorRT-RTX would compile kernels for the shapes it meets, in the background, and change to
        them when they are ready: the same row's last bits would differ from one step to the next,
        and a recorded run would never see them.
        """
        config: trt.IRuntimeConfig = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if self.builds_ahead_of_time:
            strategies = self.trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.NONE
            kernels.attach(config)
        context: trt.IExecutionContext | None = engine.create_execution_context(config)
        return context

    def check_valid(self, plan: Path) -> None:
        """Refuse a plan that does not run on the GPU and the driver here, by its first bytes alone.

        TensorRT-RTX builds ahead of time, and says so; TensorRT builds on the GPU that it serves from.

        Raises:
            EngineError: it does not, in the library's words.
        """
        if not self.builds_ahead_of_time:
            return
        errors: list[str] = []
        runtime: trt.Runtime = self.trt.Runtime(make_logger(self.trt, errors.append))
        with plan.open("rb") as file:
            validity, diagnostics = runtime.get_engine_validity(
                file.read(runtime.engine_header_size)
            )
        if validity == self.trt.EngineValidity.INVALID:
            reason = errors[-1] if errors else f"diagnostics {diagnostics:#x}"
            raise EngineError(f"{plan.name}: does not run here: {reason}")

    def check_compute_capability(self, compute_capability: str) -> None:
        """Refuse GPUs that a flavour which builds ahead of time does not build for.

        Raises:
            EngineError: it is no compute capability such as "8.0", or none of those; names them.
        """
        names = [name for name in self.trt.ComputeCapability.__members__ if name.startswith("SM")]
        known = [f"{name[2:-1]}.{name[-1]}" for name in sorted(names, key=_number)]
        if compute_capability not in known:
            raise EngineError(
                f"compute capability {compute_capability}: TensorRT-RTX {self.version} builds "
                f"for {', '.join(known)}; --flavour tensorrt builds for the GPU it runs on"
            )

    def set_compute_capability(self, config: trt.IBuilderConfig, compute_capability: str) -> None:
        """Build for GPUs of a compute capability such as "8.0".

        Raises:
            EngineError: as ``check_compute_capability``.
        """
        self.check_compute_capability(compute_capability)
        kinds = self.trt.ComputeCapability
        name = f"SM{compute_capability.replace('.', '')}"
        config.num_compute_capabilities = 1
        config.set_compute_capability(kinds.__members__[name], 0)


def find_api(flavour: str | None = None) -> TensorRtApi:
    """The flavour asked for, or the first one installed.

    Raises:
        EngineError: it is unknown or not installed; names the package to install.
    """
    if flavour is not None and flavour not in MODULES:
        raise EngineError(f"flavour {flavour!r}: must be one of {', '.join(MODULES)}")
    wanted = list(MODULES) if flavour is None else [flavour]
    for name in wanted:
        module = _import_first(MODULES[name])
        if module is not None:
            return TensorRtApi(flavour=name, version=str(module.__version__), trt=module)
    packages = " or ".join(PACKAGES[name] for name in wanted)
    raise EngineError(f"no TensorRT is installed; install {packages}")


def installed_apis() -> list[TensorRtApi]:
    """Every flavour installed here.

    Raises:
        EngineError: none is; names the packages to install.
    """
    found = []
    for name in MODULES:
        try:
            found.append(find_api(name))
        except EngineError:  # said for all of them below
            continue
    return found or [find_api()]


def make_logger(trt: Any, report: Callable[[str], None]) -> Any:
    """A TensorRT logger that passes errors on as text and drops other messages."""

    class ErrorLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                report(message)

    return ErrorLogger()


def _number(name: str) -> int:
    return int(name[2:])


def _import_first(names: tuple[str, ...]) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:  # not installed, or its library is not
            continue
    return None
