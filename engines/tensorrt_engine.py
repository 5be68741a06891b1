"""TensorRT plans of a bundle on a CUDA device, behind the engine contract.

One execution context per profile, all over one piece of scratch memory since only one runs at a time:
changing the profile is choosing a context and stalls nothing. The kinds of call that repeat every step
(``step``, ``verify``) are recorded as CUDA graphs, once per shape and place of the rows.

Aliasing: KV_CACHE_UPDATE writes in place only where the plan declares ``new_key.l`` an alias of
``key.l``; both are bound to one address, and a plan that declares no alias is refused at load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engines.base import BundleError, EngineError, EngineLimits
from engines.bundle import (
    LOGIT_POSITIONS,
    START,
    TOKENS,
    Bundle,
    ModelEntry,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from engines.cuda_device import CudaDevice, RecordedWork, compute_capability
from engines.kv_cache import cache_names
from engines.plan_engine import ITEM_BYTES, PlanEngine
from engines.plans import PREFILL, PlanEntry, Shape, why_unfit
from engines.tensorrt_api import TensorRtApi, find_api, make_logger

if TYPE_CHECKING:
    import tensorrt as trt

# Recordings kept per plan; a server sees few decode and verify shapes.
_MAX_RECORDINGS = 64


def open_tensorrt(
    bundle: Bundle,
    model: ModelEntry,
    part: str,
    *,
    index: int = 0,
    device: CudaDevice | None = None,
    max_batch: int | None = None,
) -> PlanEngine:
    """Engine over the plans of one model that fit this machine.

    Args:
        bundle: from ``load_bundle``.
        model: entry of the model in the manifest.
        part: "target" or "draft".
        index: of the CUDA device, where none is given.
        device: to share with others; stays the caller's.
        max_batch: slots; None for all the bundle allows.

    Raises:
        BundleError: a plan is not what the manifest says of it.
        EngineError: no TensorRT, no such device, or no plan that fits them; says why for each plan.
    """
    api = find_api()
    owns_device = device is None
    device = CudaDevice(index) if device is None else device
    manifest = bundle.manifest
    if max_batch is not None and not 1 <= max_batch <= manifest.max_batch:
        raise BundleError(f"max_batch {max_batch}: the bundle allows 1..{manifest.max_batch}")
    entries = choose_plans(
        manifest.plans,
        part,
        flavour=api.flavour,
        version=api.version,
        compute_capability=device.compute_capability,
    )
    plans = [TensorRtPlan(api, device, bundle, model, entry) for entry in entries]
    limits = EngineLimits(
        max_batch=max_batch or manifest.max_batch,
        max_context=manifest.max_context,
        max_extend=manifest.max_extend,
        vocab_size=model.vocab_size,
    )
    return PlanEngine(plans, device, model, limits, owns_device=owns_device)


def check_plans(bundle: Bundle, index: int) -> None:
    """Refuse a machine on which the bundle's plans do not run.

    Raises:
        EngineError: no TensorRT, no such device, or a model without a plan that fits them.
    """
    api = find_api()
    capability = compute_capability(index)
    manifest = bundle.manifest
    for part in ("target",) if manifest.draft is None else ("target", "draft"):
        choose_plans(
            manifest.plans,
            part,
            flavour=api.flavour,
            version=api.version,
            compute_capability=capability,
        )


def choose_plans(
    plans: tuple[PlanEntry, ...],
    part: str,
    *,
    flavour: str,
    version: str,
    compute_capability: str,
) -> list[PlanEntry]:
    """Plans of a part that run here, all of one precision (16 bits before 32).

    Raises:
        EngineError: there is none; says why each one was left aside.
    """
    machine = {"flavour": flavour, "version": version, "compute_capability": compute_capability}
    ours = [plan for plan in plans if plan.part == part]
    reasons = [why_unfit(plan, **machine) for plan in ours]
    fitting = [plan for plan, reason in zip(ours, reasons, strict=True) if not reason]
    if not fitting:
        advice = f"outrider build --flavour {flavour} --compute-capability {compute_capability}"
        text = "; ".join(reasons) or "the bundle has none"
        raise EngineError(f"no TensorRT plan of the {part} fits: {text}; run {advice}")
    order = {precision: rank for rank, precision in enumerate(("float16", "bfloat16", "float32"))}
    best = min(fitting, key=lambda plan: order.get(plan.precision, len(order))).precision
    return [plan for plan in fitting if plan.precision == best]


class TensorRtPlan:
    """One plan, loaded; see ``LoadedPlan``."""

    def __init__(
        self,
        api: TensorRtApi,
        device: CudaDevice,
        bundle: Bundle,
        model: ModelEntry,
        entry: PlanEntry,
    ) -> None:
        self.entry = entry
        self._device = device
        self._model = model
        self._errors: list[str] = []
        self._recordings: dict[tuple[object, ...], RecordedWork] = {}
        # Both must outlive the engine.
        self._logger = make_logger(api.trt, self._errors.append)
        runtime: trt.Runtime = api.trt.Runtime(self._logger)
        self._runtime = runtime
        data = _read_plan(bundle, entry)
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineError(f"{entry.path}: cannot be loaded: {self._last_error()}")
        self._check_aliases(engine)
        self._check_profiles(engine)
        sizes = [
            int(engine.get_device_memory_size_for_profile_v2(index))
            for index in range(len(entry.profiles))
        ]
        self._scratch = device.allocate(max(1, *sizes))
        self._contexts = [
            self._make_context(api, engine, index, max(1, *sizes)) for index in range(len(sizes))
        ]
        device.wait()

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Enqueue the graph; see ``LoadedPlan.run``.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        if self.entry.profiles[profile].name == PREFILL:
            self._enqueue(profile, shape, addresses)
            return
        key = (profile, shape, tuple(sorted(addresses.items())))
        recording = self._recordings.get(key)
        if recording is not None:
            recording.launch()
            return
        # The first run of a shape prepares what a recording must not contain.
        self._enqueue(profile, shape, addresses)
        if len(self._recordings) >= _MAX_RECORDINGS:
            self._drop_recordings()
        self._recordings[key] = self._device.capture(
            lambda: self._enqueue(profile, shape, addresses)
        )

    def close(self) -> None:
        """Free contexts, scratch memory and recordings."""
        self._drop_recordings()
        self._contexts.clear()
        self._device.free(self._scratch)

    def _enqueue(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        context: trt.IExecutionContext = self._contexts[profile]
        model, capacity = self._model, self.entry.capacity
        rows = (shape.batch, model.num_kv_heads, capacity, model.head_size)
        shapes: dict[str, tuple[int, ...]] = {
            TOKENS: (shape.batch, shape.tokens),
            START: (shape.batch,),
            LOGIT_POSITIONS: (shape.batch, shape.wanted),
        }
        shapes |= dict.fromkeys(cache_names(model.num_layers, key_name, value_name), rows)
        are_set = [context.set_input_shape(name, dims) for name, dims in shapes.items()]
        are_set += [context.set_tensor_address(*item) for item in addresses.items()]
        if not all(are_set) or not context.execute_async_v3(self._device.stream):
            raise EngineError(f"{self.entry.path}: cannot run: {self._last_error()}")

    def _make_context(
        self, api: TensorRtApi, engine: trt.ICudaEngine, index: int, num_bytes: int
    ) -> trt.IExecutionContext:
        strategy = api.trt.ExecutionContextAllocationStrategy
        context: trt.IExecutionContext = engine.create_execution_context(strategy.USER_MANAGED)
        if context is None or not context.set_optimization_profile_async(
            index, self._device.stream
        ):
            raise EngineError(f"{self.entry.path}: no context: {self._last_error()}")
        context.set_device_memory(self._scratch, num_bytes)
        return context

    def _check_aliases(self, engine: trt.ICudaEngine) -> None:
        for layer in range(self._model.num_layers):
            for past, present in (
                (key_name(layer), new_key_name(layer)),
                (value_name(layer), new_value_name(layer)),
            ):
                alias = engine.get_aliased_input_tensor(present)
                if alias != past:
                    raise BundleError(
                        f"{self.entry.path}: {present} shares the memory of {alias}, not of {past}"
                    )

    def _check_profiles(self, engine: trt.ICudaEngine) -> None:
        entry = self.entry
        if engine.num_optimization_profiles != len(entry.profiles):
            raise BundleError(f"{entry.path}: its profiles are not those of the manifest")
        for index, profile in enumerate(entry.profiles):
            found = [tuple(dims) for dims in engine.get_tensor_profile_shape(TOKENS, index)]
            if found != list(zip(profile.batch, profile.tokens, strict=True)):
                raise BundleError(f"{entry.path}: profile {profile.name} takes tokens {found}")

    def _drop_recordings(self) -> None:
        for recording in self._recordings.values():
            recording.close()
        self._recordings.clear()

    def _last_error(self) -> str:
        return self._errors[-1] if self._errors else "no reason given"


def _read_plan(bundle: Bundle, entry: PlanEntry) -> bytes:
    """Bytes of a plan, the very ones whose hash was compared: a plan is executable content."""
    data = (bundle.root / entry.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != bundle.manifest.files[entry.path].sha256:
        raise BundleError(f"{entry.path}: content differs from its sha256 in the manifest")
    if entry.precision not in ITEM_BYTES:
        raise BundleError(f"{entry.path}: precision {entry.precision!r} is unknown")
    return data
