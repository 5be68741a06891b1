"""Opens graphs on ONNX Runtime, and checks that they are the declared ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as library
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.encoder_decoder import (
    CROSS_FILE,
    ENCODE_FILE,
    HIDDEN,
    SOURCE,
    SOURCE_LENGTH,
    SourceEntry,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import (
    FEATURES,
    LOGIT_POSITIONS,
    LOGITS,
    MODEL_FILE,
    RECYCLED,
    START,
    TOKENS,
    past_names,
    present_names,
)
from outrider.engines.bundle.states import StatesEntry, kept_names, place_names
from outrider.engines.devices import threads_of
from outrider.engines.kv_cache import CacheRows, KvCache
from outrider.engines.onnx.cuda_libraries import why_not_loadable, why_two_packages

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# ONNX Runtime's name for the memory of a CUDA device; the host's are "Cpu" and "CudaPinned".
_CUDA_MEMORY = "Cuda"
LIBRARY_VERSION: str = onnxruntime.__version__
_RECORDS = "enable_cuda_graph"
_OWN_OPTIONS = frozenset({"device_id", "user_compute_stream", "has_user_compute_stream"})
# Kernels of attention: Flash 1, memory-efficient 2, unfused 16, and not cuDNN's 8. That would take spans of one
# token alone, so that a step and a verification would differ; it plans for each new shape in the middle of a
# request, and a plan that cannot be made fails the request (1.31.1).
_ATTENTION = "19"
# ONNX Runtime's exceptions have no common base but Exception.
LIBRARY_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    *(
        kind
        for kind in vars(library).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)


_POOL_LOCK = Lock()


def _share_thread_pool(num_threads: int) -> None:
    """Set the size of the process's one pool; engines are opened beside one another."""
    # A cache alone lets two threads in, and the library refuses the second.
    with _POOL_LOCK:
        _set_pool_size(num_threads)


@cache
def _set_pool_size(num_threads: int) -> None:
    """Set it once per size; the library allows one size."""
    try:
        onnxruntime.set_global_thread_pool_sizes(num_threads, 1)
    except LIBRARY_ERRORS as error:
        raise EngineError(
            f"num_threads {num_threads}: the pool all engines share has another size already"
        ) from error


# A Split of unequal parts, made of Slices, would copy tables to the device in every call (1.31.1). Without that
# fusion a layer has two launches less, and a race's noise 71 of 1,323 more.
_DISABLED = {"cpu": [], "cuda": ["GatherSliceToSplitFusion"]}
_BLOCKS_ACCURACY = "session.qdq_matmulnbits_accuracy_level"
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# onnxruntime's severity "error", the first above "warning".
_LOG_ERRORS = 3


def why_unavailable(device: str) -> str:
    """Say why a provider cannot run here; empty where it can, its libraries being loaded."""
    if device not in _PROVIDERS:
        return f"must be one of {', '.join(_PROVIDERS)}"
    if reason := why_two_packages():
        return reason
    if _PROVIDERS[device] not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {_PROVIDERS[device]}; install outrider-server[{device}]"
    return why_not_loadable() if device == "cuda" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """How a session reads weights, and multiplies with them.

    Attributes:
        folder: of a graph given as bytes, where its data lies, if any.
        are_mapped: weights of 16 bits stay in their file, mapped, and each is widened in every call: for checks
            of models that are too large in float32. Otherwise they are widened once, to memory of the session's.
        exact_blocks: multiply with blocks of integers in float32 on the CPU, not in 8 bits.
    """

    folder: Path | None = None
    are_mapped: bool = False
    exact_blocks: bool = False


SERVED_WEIGHTS = WeightOptions()
"""As engines read them."""


def open_session(
    graph: Path | bytes,
    *,
    device: str = "cpu",
    device_index: int = 0,
    num_threads: int = 0,
    copies_caches: bool = False,
    stream: int = 0,
    provider_options: Mapping[str, str] | None = None,
    weights: WeightOptions = SERVED_WEIGHTS,
) -> onnxruntime.InferenceSession:
    """Session over a graph file, on the thread pool that all sessions of the process share.

    Everyone who runs a graph opens it here: once the shared pool exists, ONNX Runtime refuses
    sessions with a pool of their own, and checks should run the kernels that serving runs.

    Args:
        graph: its file, such as ``model.onnx`` of a bundle, or a file's bytes.
        device: key of the provider to run on.
        device_index: which of its devices.
        num_threads: size of the shared pool; 0: one per physical core that this process may use.
        copies_caches: the caller binds past and present to different memory on purpose, so the
            library's warning about it, one line per call and layer, is left out.
        stream: handle of the CUDA stream to enqueue on; 0 for one of the session's own.
        provider_options: of a GPU's provider, as ONNX Runtime documents them.
        weights: how they are read.

    Raises:
        EngineError: unknown device, unloadable graph, an option that cannot be given, a graph that
            the device's provider reads an input of on the host, or the shared pool has another size.
    """
    if reason := why_unavailable(device):
        raise EngineError(f"device {device!r}: {reason}")
    own_options = _provider_options(device, device_index, stream, provider_options or {})
    _share_thread_pool(threads_of(num_threads))
    options = _session_options(weights)
    if copies_caches:
        options.log_severity_level = _LOG_ERRORS
    unfolded = ["ConstantFolding"] if weights.are_mapped else []
    try:
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph),
            options,
            providers=[_PROVIDERS[device]],
            provider_options=[own_options],
            # Otherwise a device that fails is replaced by the CPU, with a line on stdout.
            enable_fallback=False,
            disabled_optimizers=_DISABLED[device] + unfolded,
        )
    except LIBRARY_ERRORS as error:
        words = " ".join(str(error).split())
        raise EngineError(f"ONNX Runtime cannot load the graph: {words}") from error
    if session.get_providers()[0] != _PROVIDERS[device]:
        raise EngineError(f"device {device!r}: {_PROVIDERS[device]} did not start")
    if device == "cuda":
        _check_on_device(session, graph)
    return session


def _session_options(weights: WeightOptions) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    # Weights in blocks of int8 or int4 become MatMulNBits; level 4 is 8-bit products, 1 is float32.
    options.add_session_config_entry(_BLOCKS_ACCURACY, "1" if weights.exact_blocks else "4")
    if weights.folder is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights.folder))
    if weights.are_mapped:
        # The last level reads every weight (1.31.1), whatever it changes.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        # What was widened goes back at once: the arena would keep it, twice over.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    return options


def _check_on_device(session: onnxruntime.InferenceSession, graph: Path | bytes) -> None:
    """Refuse inputs that the provider reads on the host: they are copied when they are bound, and never again."""
    memories = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    on_host = [repr(tensor.name) for tensor, memory in memories if memory.name != _CUDA_MEMORY]
    if on_host:
        name = "/".join(graph.parts[-2:]) if isinstance(graph, Path) else "a graph"
        raise EngineError(
            f"{name}: the CUDA provider reads {', '.join(on_host)} on the host "
            "and would keep the first value; export the bundle again"
        )


def enqueue(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> None:
    """Run a graph over memory of its device without waiting for the device.

    What is bound must be on the device: an array of the host would be copied when it is bound, at
    once and on another stream.

    Args:
        session: over the graph.
        binding: of all its inputs and outputs.

    Raises:
        EngineError: the library refuses, in its own words.
    """
    options = onnxruntime.RunOptions()
    # Otherwise every run ends in a synchronisation of the stream, as does every replay of a CUDA
    # graph before ONNX Runtime's pull request 28686.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    try:
        session.run_with_iobinding(binding, options)
    except LIBRARY_ERRORS as error:
        raise EngineError(f"ONNX Runtime failed: {error}") from error


def bind_caches(
    binding: onnxruntime.IOBinding, cache: KvCache, num_layers: int, *, slot: int, num_rows: int
) -> None:
    """Bind the texts' caches of slots: one memory as past and as present."""
    rows = cache.rows(slot, num_rows)
    bind_past(binding, past_names(num_layers), rows)
    bind_present(binding, present_names(num_layers), rows)


def bind_past(binding: onnxruntime.IOBinding, names: Sequence[str], rows: CacheRows) -> None:
    """Bind the caches of slots as inputs: key.0, value.0, key.1, value.1 ..."""
    for name, (shape, pointer) in zip(names, rows, strict=True):
        binding.bind_input(name, "cpu", 0, np.float32, shape, pointer)


def bind_present(binding: onnxruntime.IOBinding, names: Sequence[str], rows: CacheRows) -> None:
    """Bind the caches of slots as outputs, in the same order."""
    for name, (shape, pointer) in zip(names, rows, strict=True):
        binding.bind_output(name, "cpu", 0, np.float32, shape, pointer)


def records_graphs(provider_options: Mapping[str, str]) -> bool:
    """Return whether runs are recorded as CUDA graphs; by the engine, the provider is not told."""
    return provider_options.get(_RECORDS, "1").lower() in ("1", "true")


def _provider_options(
    device: str, index: int, stream: int, asked: Mapping[str, str]
) -> dict[str, str]:
    if taken := sorted(asked.keys() & _OWN_OPTIONS):
        raise EngineError(f"provider option {taken[0]}: --device and the engine decide it")
    if device == "cpu":
        if asked:
            raise EngineError(f"provider option {min(asked)}: the CPU's provider takes none")
        return {}
    # Float32 means float32; who wants the speed of fewer bits asks for them.
    options = {"device_id": str(index), "use_tf32": "0", "sdpa_kernel": _ATTENTION, **asked}
    options.pop(_RECORDS, None)
    if stream:
        options["user_compute_stream"] = str(stream)
    return options


def check_graph(
    session: onnxruntime.InferenceSession,
    entry: ModelEntry,
    *,
    file: str = MODEL_FILE,
    extra_inputs: Set[str] = frozenset(),
    may_be_by_token: bool = False,
) -> None:
    """Refuse a graph whose tensors are not those its manifest entry declares.

    Caches are [batch, heads, capacity, size]; ``may_be_by_token`` allows [batch, capacity, heads * size].

    Raises:
        BundleError: naming the graph and the tensor.
    """
    past, present = past_names(entry.num_layers), present_names(entry.num_layers)
    if entry.source is not None:
        extra_inputs = extra_inputs | {SOURCE_LENGTH, *cross_past_names(entry.num_layers)}
    kept: tuple[str, ...] = ()
    answered: set[str] = set()
    if entry.reads_features:
        extra_inputs, answered = extra_inputs | {FEATURES}, {RECYCLED}
    if entry.states is not None:
        kept = kept_names(entry.states)
        extra_inputs = extra_inputs | {*kept, *place_names(entry.states)}
    inputs = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    outputs = {tensor.name: tensor.shape for tensor in session.get_outputs()}
    graph = f"{entry.path}/{file}"
    for found, declared in (
        (set(inputs), {TOKENS, START, LOGIT_POSITIONS, *past, *extra_inputs}),
        (set(outputs), {LOGITS, *present, *answered, *(f"new_{name}" for name in kept)}),
    ):
        if found != declared:
            raise BundleError(f"{graph}: tensors missing or unknown: {sorted(found ^ declared)}")
    for layer, (heads, size) in enumerate(entry.heads):
        rows: list[tuple[int, ...]] = [(heads, size)]
        if may_be_by_token:
            rows.append((heads * size,))
        for name in past[2 * layer : 2 * layer + 2]:
            # Without rows and capacity.
            if tuple(inputs[name][1:-2] + inputs[name][-1:]) in rows:
                continue
            raise BundleError(f"{graph}: {name} is {inputs[name]}, the manifest disagrees")
    for name in sorted(answered):
        if outputs[name][2] != entry.reads_features or inputs[FEATURES] != outputs[name]:
            raise BundleError(f"{graph}: {name} is {outputs[name]}, the manifest disagrees")
    if outputs[LOGITS][2] != entry.vocab_size:
        raise BundleError(f"{graph}: logits are {outputs[LOGITS]}, vocab_size {entry.vocab_size}")
    if entry.source is not None:
        _check_source_heads(graph, inputs, entry.num_layers, entry.source)
    if entry.states is not None:
        _check_states(graph, inputs, entry.states)


def check_encode_graph(
    session: onnxruntime.InferenceSession,
    entry: ModelEntry,
    source: SourceEntry,
    *,
    file: str = ENCODE_FILE,
) -> None:
    """Refuse a graph whose tensors are not those its manifest entry declares.

    An encoder may answer HIDDEN too; ``cross.onnx`` reads that instead of tokens.

    Raises:
        BundleError: naming the graph and the tensor.
    """
    past, present = cross_past_names(entry.num_layers), cross_present_names(entry.num_layers)
    inputs = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    outputs = {tensor.name for tensor in session.get_outputs()}
    graph = f"{entry.path}/{file}"
    for found, declared in (
        (set(inputs), {HIDDEN if file == CROSS_FILE else SOURCE, SOURCE_LENGTH, *past}),
        (outputs - {HIDDEN}, set(present)),
    ):
        if found != declared:
            raise BundleError(f"{graph}: tensors missing or unknown: {sorted(found ^ declared)}")
    _check_source_heads(graph, inputs, entry.num_layers, source)


def _check_states(graph: str, inputs: Mapping[str, Sequence[object]], states: StatesEntry) -> None:
    """Refuse a graph whose states, pending rows or windows have other sizes than its manifest entry declares.

    Raises:
        BundleError: naming the graph and the tensor.
    """
    sizes = {
        "state": [states.heads, states.key_size, states.value_size],
        "pending": [states.max_open, states.row],
        "window": [states.window, states.channels],
    }
    for name in kept_names(states):
        if list(inputs[name][1:]) != sizes[name.partition(".")[0]]:
            raise BundleError(f"{graph}: {name} is {inputs[name]}, the manifest disagrees")


def _check_source_heads(
    graph: str, inputs: Mapping[str, Sequence[object]], num_layers: int, source: SourceEntry
) -> None:
    """Refuse a graph whose caches of sources have other sizes than its manifest entry declares.

    Raises:
        BundleError: naming the graph and the tensor.
    """
    for name in cross_past_names(num_layers):
        if [inputs[name][1], inputs[name][3]] != [source.num_heads, source.head_size]:
            raise BundleError(f"{graph}: {name} is {inputs[name]}, the manifest disagrees")
