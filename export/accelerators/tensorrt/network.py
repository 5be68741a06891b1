"""One TensorRT plan from one graph file: parse, read back, set the profiles, build.

Variables that hold a TensorRT object are annotated with its class, so that a test can hold every
attribute used here against the installed bindings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.engines.accelerators.tensorrt.api import TensorRtApi, make_logger
from outrider.engines.base import EngineError
from outrider.engines.bundle.encoder_decoder import cross_past_names, cross_present_names
from outrider.engines.bundle.names import past_names, present_names
from outrider.engines.bundle.plans import Profile, Range

if TYPE_CHECKING:
    import tensorrt as trt

# Called with a phase in words, the step reached and the number of steps.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """One plan to build.

    Attributes:
        graph: file that ``export.accelerators.tensorrt.graph`` wrote.
        num_attentions: attention layers of the graph.
        profiles: in the order of the plan's profile indices.
        precision: of weights, caches and matrix products.
        compute_capability: of the GPUs to build for, for example "8.0".
        timing_cache: file of measured kernel choices, read and renewed where the flavour has them;
            None for none.
        updates: names of tensors read and written in place, such as caches.
    """

    graph: Path
    num_attentions: int
    profiles: tuple[Profile, ...]
    precision: str
    compute_capability: str
    timing_cache: Path | None = None
    updates: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """One attention layer as the parser understood it.

    ``causal_kind`` is "NONE", "UPPER_LEFT" or "LOWER_RIGHT"; -1 in the mask's shape is dynamic.
    """

    name: str
    causal_kind: str
    mask_shape: tuple[int, ...] | None
    has_lengths: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Attention layers of a parsed network, and the names that each KV_CACHE_UPDATE layer reads and writes."""

    attentions: tuple[AttentionFacts, ...]
    cache_updates: frozenset[tuple[str, str]]


def build_plan(api: TensorRtApi, job: PlanJob, report: Report) -> bytes:
    """Return a serialised plan.

    Raises:
        EngineError: the library refuses the graph, or parsed it to another function.
    """
    errors: list[str] = []
    logger: trt.ILogger = make_logger(api.trt, errors.append)
    builder: trt.Builder = api.trt.Builder(logger)
    # No flag for types: both flavours have strongly typed networks only.
    network: trt.INetworkDefinition = builder.create_network(0)
    parse_graph(api, network, logger, job.graph)
    check_network(read_network(api, network), job.num_attentions, job.updates)
    config: trt.IBuilderConfig = builder.create_builder_config()
    if api.builds_ahead_of_time:
        api.set_compute_capability(config, job.compute_capability)
    if job.precision == "float32":
        config.clear_flag(api.trt.BuilderFlag.TF32)
    config.progress_monitor = _make_monitor(api, report)
    for profile in job.profiles:
        _add_profile(builder, config, network, profile)
    if api.has_timing_cache and job.timing_cache is not None:
        _load_timing_cache(config, job.timing_cache)
    plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(f"{api.flavour} {api.version} cannot build the plan: {_last(errors)}")
    if api.has_timing_cache and job.timing_cache is not None:
        _save_timing_cache(config, job.timing_cache)
    return bytes(plan)


def parse_graph(
    api: TensorRtApi, network: trt.INetworkDefinition, logger: trt.ILogger, graph: Path
) -> None:
    """Fill a network from an ONNX file.

    Raises:
        EngineError: the parser refuses a node; names it.
    """
    parser: trt.OnnxParser = api.trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(graph)):
        return
    reasons = []
    for index in range(parser.num_errors):
        error: trt.ParserError = parser.get_error(index)
        reasons.append(f"{error.node_operator()} {error.node_name()}: {error.desc()}")
    raise EngineError(f"{api.flavour} {api.version} cannot parse the graph: {'; '.join(reasons)}")


def read_network(api: TensorRtApi, network: trt.INetworkDefinition) -> NetworkFacts:
    """Return the attention and cache layers of a parsed network, and make every attention decomposable.

    Otherwise an attention without a fused kernel (float32, or a head size below 64) fails the build.
    """
    kinds = api.trt.LayerType
    attentions, updates = [], set()
    for index in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(index)
        if layer.type == kinds.ATTENTION_INPUT:
            # The bindings return every layer as ILayer; this is their documented downcast.
            layer.__class__ = api.trt.IAttentionInputLayer
            attention: trt.IAttention = layer.attention
            attention.decomposable = True
            attentions.append(_read_attention(attention))
        elif layer.type == kinds.KV_CACHE_UPDATE:
            source: trt.ITensor = layer.get_input(0)
            result: trt.ITensor = layer.get_output(0)
            updates.add((str(source.name), str(result.name)))
    return NetworkFacts(attentions=tuple(attentions), cache_updates=frozenset(updates))


def _read_attention(attention: trt.IAttention) -> AttentionFacts:
    kind: trt.CausalMaskKind = attention.causal_kind
    mask: trt.ITensor | None = attention.mask
    return AttentionFacts(
        name=str(attention.name),
        causal_kind=str(kind.name),
        mask_shape=None if mask is None else tuple(mask.shape),
        has_lengths=attention.key_value_lengths is not None,
    )


def check_network(
    facts: NetworkFacts, num_attentions: int, updates: frozenset[tuple[str, str]]
) -> None:
    """Refuse a network that does not compute what its graph does.

    ``updates`` are the tensors that are to be updated in place.

    Raises:
        EngineError: naming the layer and what is wrong with it.
    """
    if len(facts.attentions) != num_attentions:
        raise EngineError(
            f"the parsed network has {len(facts.attentions)} ATTENTION layers, the graph "
            f"{num_attentions}: attention was taken apart, or is not attention"
        )
    for attention in facts.attentions:
        if attention.causal_kind != "NONE" or attention.has_lengths:
            raise EngineError(
                f"{attention.name}: the parser set causal_kind {attention.causal_kind} beside the "
                "graph's own mask; this plan would see the wrong tokens"
            )
        if attention.mask_shape is None or len(attention.mask_shape) != 4:
            raise EngineError(f"{attention.name}: the parser lost the mask of this attention")
    if facts.cache_updates != updates:
        names = sorted(name for pair in facts.cache_updates ^ updates for name in pair)
        raise EngineError(
            "caches without a KV_CACHE_UPDATE layer from input to output, which would be copied "
            f"in every step: {', '.join(names)}"
        )


def cache_updates(num_layers: int) -> frozenset[tuple[str, str]]:
    """Return the names of the layers' caches before and after an update in place."""
    return frozenset(zip(past_names(num_layers), present_names(num_layers), strict=True))


def source_updates(num_layers: int) -> frozenset[tuple[str, str]]:
    """Return the same of the caches of sources, which a graph that reads them writes."""
    return frozenset(
        zip(cross_past_names(num_layers), cross_present_names(num_layers), strict=True)
    )


def _add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    network: trt.INetworkDefinition,
    profile: Profile,
) -> None:
    shapes: trt.IOptimizationProfile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor: trt.ITensor = network.get_input(index)
        shapes.set_shape(tensor.name, *_input_shapes(tensor, profile))
    if config.add_optimization_profile(shapes) < 0:
        raise EngineError(f"profile {profile.name}: the library refuses it")


def _input_shapes(tensor: trt.ITensor, profile: Profile) -> list[tuple[int, ...]]:
    """Return the least, tuned and greatest shape of a graph input, whose open axes have names."""
    axes = profile.axes()
    ranges = [
        Range(size, size, size) if size >= 0 else axes[tensor.get_dimension_name(place)]
        for place, size in enumerate(tuple(tensor.shape))
    ]
    return [tuple(sizes) for sizes in zip(*ranges, strict=True)]


def _load_timing_cache(config: trt.IBuilderConfig, path: Path) -> None:
    data = path.read_bytes() if path.is_file() else b""
    cache: trt.ITimingCache = config.create_timing_cache(data)
    # Strict: a cache of another GPU or version is left aside by the library.
    config.set_timing_cache(cache, ignore_mismatch=False)


def _save_timing_cache(config: trt.IBuilderConfig, path: Path) -> None:
    cache: trt.ITimingCache = config.get_timing_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_bytes(bytes(cache.serialize()))
    unfinished.replace(path)


def _make_monitor(api: TensorRtApi, report: Report) -> Any:
    """Return a progress monitor of the builder that reports each phase's steps."""
    base = api.trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc, valid-type]  # which bindings is known at run time
        def __init__(self) -> None:
            base.__init__(self)
            self._sizes: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._sizes[phase_name] = num_steps
            report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            report(phase_name, step + 1, self._sizes[phase_name])
            return True

        def phase_finish(self, phase_name: str) -> None:
            size = self._sizes.pop(phase_name)
            report(phase_name, size, size)

    return Monitor()


def _last(errors: list[str]) -> str:
    return errors[-1] if errors else "no reason given"
