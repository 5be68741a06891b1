"""One TensorRT plan, loaded: it runs over tensors of a CUDA device, and what repeats is recorded.

One execution context per profile, all over one piece of scratch memory since only one runs at a time:
changing the profile is choosing a context and stalls nothing. Runs that repeat are recorded as CUDA
graphs, once per shape and place of their tensors, each with a context of its own over the same scratch
memory: a context whose shapes change makes what was recorded from it undefined (TensorRT's developer
guide, "CUDA Graphs").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.engines.accelerators.device.base import (
    Call,
    DeviceTensor,
    NotRecordedError,
    Recording,
)
from outrider.engines.accelerators.device.cuda import CudaDevice
from outrider.engines.accelerators.device.recordings import Recordings
from outrider.engines.accelerators.tensorrt.api import TensorRtApi, make_logger
from outrider.engines.accelerators.tensorrt.kernel_cache import KernelCache
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import SOURCE
from outrider.engines.bundle.names import ANCESTORS, COLUMNS, TOKENS
from outrider.engines.bundle.plans import PlanEntry

if TYPE_CHECKING:
    import tensorrt as trt

# Recordings kept per plan.
_MAX_RECORDINGS = 128
# Inputs whose second axis is a profile's tokens.
_SPANS = (TOKENS, ANCESTORS, SOURCE)


class TensorRtProgram:
    """A plan's engine and contexts on a device.

    Raises:
        BundleError: the file is not the one whose hash the manifest holds, or its profiles are not
            those declared.
        EngineError: the library cannot load it, in its own words.
    """

    def __init__(
        self,
        api: TensorRtApi,
        device: CudaDevice,
        bundle: Bundle,
        entry: PlanEntry,
        kernels: KernelCache,
    ) -> None:
        self.entry = entry
        self._api, self._kernels = api, kernels
        self._device = device
        self._errors: list[str] = []
        self._recordings = Recordings(entry.path, _MAX_RECORDINGS)
        self._contexts: list[Any] = []
        self._spent: list[Any] = []
        self._scratch = (0, 0)
        # Both must outlive the engine.
        self._logger = make_logger(api.trt, self._errors.append)
        runtime: trt.Runtime = api.trt.Runtime(self._logger)
        self._runtime = runtime
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(bundle.read(entry.path))
        if engine is None:
            raise EngineError(f"{entry.path}: cannot be loaded: {self._last_error()}")
        self._engine = engine
        self.inputs, self.outputs = self._read_names(engine)
        self._check_profiles(engine)

    @property
    def scratch_bytes(self) -> int:
        """Memory that a run needs beside its tensors."""
        engine: trt.ICudaEngine = self._engine
        sizes = [
            int(engine.get_device_memory_size_for_profile_v2(index))
            for index in range(len(self.entry.profiles))
        ]
        return max(1, *sizes)

    def prepare(self, scratch: int, num_bytes: int) -> None:
        """Make the contexts, over scratch memory that runs of the same stream may share.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        self._scratch = (scratch, num_bytes)
        self._contexts = [self._make_context(index) for index in range(len(self.entry.profiles))]

    def check_aliases(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Refuse a plan that would copy what must be updated in place.

        Args:
            pairs: input and output that are one piece of memory.

        Raises:
            BundleError: the plan declares it otherwise.
        """
        engine: trt.ICudaEngine = self._engine
        for past, present in pairs:
            alias = engine.get_aliased_input_tensor(present)
            if alias != past:
                raise BundleError(
                    f"{self.entry.path}: {present} shares the memory of {alias}, not of {past}"
                )

    def run(self, profile: int, call: Call, *, may_record: bool = True) -> None:
        """Enqueue the plan.

        Args:
            profile: index of one that holds the shapes.
            call: its tensors.
            may_record: whether this very call comes again and again.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        self._device.make_current()
        if not may_record:
            self._enqueue(self._contexts[profile], call.describe())
            return
        self._recordings.run(
            (profile, call.key),
            lambda: self._enqueue(self._contexts[profile], call.describe()),
            lambda: self._record(profile, call.describe()),
        )

    def close(self) -> None:
        """Free contexts and recordings; scratch memory is the caller's."""
        self._recordings.close()
        self._contexts.clear()
        self._spent.clear()

    def _make_context(self, profile: int) -> Any:
        context: trt.IExecutionContext | None = self._api.make_context(self._engine, self._kernels)
        if context is None or not context.set_optimization_profile_async(
            profile, self._device.stream
        ):
            raise EngineError(f"{self.entry.path}: no context: {self._last_error()}")
        context.set_device_memory(*self._scratch)
        return context

    def _record(self, profile: int, tensors: Mapping[str, DeviceTensor]) -> _Recording:
        context = self._make_context(profile)
        # The first run of a shape prepares what a recording must not contain.
        self._enqueue(context, tensors)
        try:
            work = self._device.capture(lambda: self._enqueue(context, tensors))
        except NotRecordedError:
            # Its run is under way, and to wait for it would end what others enqueued as one round.
            self._spent.append(context)
            raise
        return _Recording(context, work)

    def _enqueue(self, context: trt.IExecutionContext, tensors: Mapping[str, DeviceTensor]) -> None:
        are_set = [
            context.set_input_shape(name, tensor.shape)
            for name, tensor in tensors.items()
            if name in self.inputs
        ]
        are_set += [
            context.set_tensor_address(name, tensor.pointer) for name, tensor in tensors.items()
        ]
        if not all(are_set) or not context.execute_async_v3(self._device.stream):
            raise EngineError(f"{self.entry.path}: cannot run: {self._last_error()}")

    def _read_names(self, engine: trt.ICudaEngine) -> tuple[frozenset[str], tuple[str, ...]]:
        names = [str(engine.get_tensor_name(index)) for index in range(engine.num_io_tensors)]
        modes = self._api.trt.TensorIOMode
        inputs = [name for name in names if engine.get_tensor_mode(name) == modes.INPUT]
        return frozenset(inputs), tuple(name for name in names if name not in inputs)

    def _check_profiles(self, engine: trt.ICudaEngine) -> None:
        """Compare rows and tokens; the other axes were derived from them."""
        entry = self.entry
        if engine.num_optimization_profiles != len(entry.profiles):
            raise BundleError(f"{entry.path}: its profiles are not those of the manifest")
        for index, profile in enumerate(entry.profiles):
            for name in sorted(self.inputs):
                axes = (profile.batch, profile.tokens) if name in _SPANS else (profile.batch,)
                axes = (profile.tokens,) if name == COLUMNS else axes
                shapes = engine.get_tensor_profile_shape(name, index)
                found = [tuple(dims)[: len(axes)] for dims in shapes]
                if found != list(zip(*axes, strict=True)):
                    raise BundleError(
                        f"{entry.path}: profile {profile.name}: {name} takes shapes {found}"
                    )

    def _last_error(self) -> str:
        return self._errors[-1] if self._errors else "no reason given"


class _Recording:
    """A CUDA graph, and the context that it was recorded from, which nobody else changes."""

    def __init__(self, context: Any, work: Recording) -> None:
        self._context = context
        self._work = work

    def launch(self) -> None:
        """Enqueue it."""
        self._work.launch()

    def close(self) -> None:
        """Free it; what is under way on the device is waited for by CUDA."""
        self._work.close()
        self._context = None
