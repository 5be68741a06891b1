"""Export of one model of a pair: its graphs, its weights as they were asked for, its certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE, SourceEntry
from outrider.engines.bundle.manifest import (
    ACCEPTED_PARITY,
    NO_DEVICE,
    TEXT_PART_OF,
    W8A8,
    ModelEntry,
    RingsEntry,
    ring_columns,
)
from outrider.engines.bundle.names import DEVICE_FILE, MODEL_FILE
from outrider.export.certificate.certify import CHAIN_FILES, certify, prepare
from outrider.export.certificate.half_loss import half_bound, half_logits
from outrider.export.certificate.parity import (
    Bound,
    check_parity,
    check_rounding,
    float32_bound,
)
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import Checkpoint
from outrider.export.exporters import device_graphs
from outrider.export.gguf.folder import GGUF, KEPT_KINDS, open_weights
from outrider.export.graph.attention_kinds import has_sinks
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.narrow_spans import NARROWEST_SPAN
from outrider.export.graph.rings import derive_ring_graph, ring_layers
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.heads.part import (
    HeadPart,
    check_features,
    features_text,
    target_features,
)
from outrider.export.model_config import ModelConfig
from outrider.export.progress import Progress
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.given_text import given_text
from outrider.export.weights.half_weights import BFLOAT16, FLOAT32, HALF_TYPES, store_halves
from outrider.export.weights.lookup import part_shared_blocks
from outrider.export.weights.packed.blocks import keep_blocks
from outrider.export.weights.packed.matrices import PACKED_KINDS
from outrider.export.weights.shared_data import share_data
from outrider.export.weights.w8a8 import INTEGER_KINDS, quantize_static
from transformers import PreTrainedModel

HALF = "half"
"""The 16-bit type that suits a checkpoint; see ``Checkpoint.half_precision``."""
WEIGHT_KINDS = (FLOAT32, HALF, *HALF_TYPES, *INTEGER_KINDS)
MAX_EXTEND = 512
# Rings have to be so many times smaller than the context: they take no trees, and prefixes at some lengths alone.
_RINGS_WORTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of a bundle; see ``pipeline.ExportOptions``."""

    max_context: int
    max_batch: int
    max_gamma: int
    max_tree_nodes: int

    @property
    def max_extend(self) -> int:
        """Return the tokens of the longest span."""
        return max(MAX_EXTEND, self.max_gamma + 1, self.max_tree_nodes)


@dataclass(frozen=True, slots=True)
class Part:
    """A model to export.

    Attributes:
        name: "target" or "draft".
        weights: one of ``WEIGHT_KINDS`` or, as the checkpoint has them, of ``KEPT_KINDS``.
        precision: what accelerators compute in; empty where there are no graphs for them.
        calibration: rows [B, T] int64 of text that integers are rounded by; None for text that the model writes.
        accepted: how far its float32 graph may be from the checkpoint; None for what rounding explains.
        head: that reads its features; None without one.
    """

    name: str
    checkpoint: Checkpoint
    weights: str
    precision: str
    calibration: IntArray | None = None
    accepted: float | None = None
    head: HeadPart | None = None


def make_part(name: str, checkpoint: Checkpoint, asked: str | None) -> Part:
    """Return a model to export with the weights asked for, one of ``WEIGHT_KINDS``, or with the checkpoint's.

    Raises:
        BundleError: weights that are packed would be rounded again, or a GGUF file's are of a type that is not kept.
    """
    packed = checkpoint.packed
    if packed is not None and asked not in (None, FLOAT32):
        raise BundleError(
            f"{name}: its weights are packed ({packed.kind}) and would be rounded again as {asked}; leave out "
            "--weights to keep them as they are, or take float32, which holds them exactly"
        )
    weights = checkpoint.half_precision() if asked == HALF else asked
    if weights is None and checkpoint.is_gguf:
        open_weights(checkpoint.path).refuse_unkept()
        weights = GGUF
    if weights is None:
        weights = FLOAT32 if packed is None else packed.kind
    if weights == W8A8 or checkpoint.model_config.has_experts or checkpoint.states is not None:
        # Accelerators would dequantise every weight in every call, or wait for the host to count rows of experts;
        # recurrent states are kept on the CPU alone.
        precision = ""
    elif weights in INTEGER_KINDS or weights in KEPT_KINDS:
        precision = checkpoint.half_precision()
    else:
        precision = weights
    return Part(name, checkpoint, weights, precision)


def export_part(
    part: Part, root: Path, sizes: Sizes, progress: Progress
) -> tuple[ModelEntry, dict[str, object]]:
    """Write the graphs of one model below ``root``; return its entry in the manifest and its certificate.

    Raises:
        BundleError: a graph does not answer as the checkpoint does, takes no tree mask, or cannot be stored as asked.
    """
    return _Export(part, root, sizes, progress).run()


class _Export:
    """The stages of one model's export, from its checkpoint to its certificate."""

    def __init__(self, part: Part, root: Path, sizes: Sizes, progress: Progress) -> None:
        self._part = part
        self._states = part.checkpoint.slot_states(sizes.max_gamma)
        self._model_config = with_rings(part.checkpoint.model_config, sizes)
        self._rings: RingsEntry | None = None
        if self._states is not None or self._model_config.ring_columns:
            # A tree would need a state per branch, and masks of a ring know chains alone.
            sizes = replace(sizes, max_tree_nodes=0)
        self._sizes = sizes
        self._path = root / part.name / MODEL_FILE
        self._device_graphs = device_graphs()
        # What accelerators compute in, as far as is known.
        self._precision = part.precision if self._device_graphs is not None else ""
        self._progress = progress

    def run(self) -> tuple[ModelEntry, dict[str, object]]:
        """Return the entry of the manifest and the certificate."""
        part, sizes, model_config = self._part, self._sizes, self._model_config
        name, whole = part.checkpoint.config.model_type, part.checkpoint.whole
        if whole is not None:
            name = f"{whole.model_type}, of which the text part is exported: images are refused"
        self._tell(f"loading {name}")
        halved = self._half_logits()
        model = part.checkpoint.load()
        self._tell("computing what it answers, to compare with")
        reference = prepare(
            model,
            model_config,
            max_gamma=sizes.max_gamma,
            max_tree_nodes=sizes.max_tree_nodes,
            load=part.checkpoint.load,
            report=self._progress.steps(f"{part.name}: cases answered by PyTorch"),
        )
        own = float32_bound(reference, model_config, max_gamma=sizes.max_gamma)
        exact = own.accepting(part.accepted)
        halves = None
        if halved is not None:
            halves = half_bound(reference, halved, part.checkpoint, max_gamma=sizes.max_gamma)
        decoder, features = part.checkpoint.decoder_of(model), None
        if part.head is not None:
            features = target_features(part.head, decoder, features_text(model_config))
        self._write_graphs(decoder)
        del decoder, model  # and its pages, which would stand beside those of the graphs
        self._tell("comparing with the checkpoint")
        if part.weights == FLOAT32:
            _share(part, self._path)
        no_device = self._why_no_device()
        if no_device:
            self._precision = ""
        if part.weights == GGUF:
            certificate = self._kept(reference, exact)
        else:
            certificate = self._certified(reference, exact, device="" if no_device else FLOAT32)
        if features is not None:
            certificate["features"] = check_features(
                self._path, model_config, features, exact_blocks=part.weights == GGUF
            )
        if part.weights != FLOAT32:
            certificate[part.weights] = self._stored(reference, halves)
        if part.weights in PACKED_KINDS:
            certificate["kept_blocks"] = self._kept(reference, exact)
        if no_device:
            certificate[NO_DEVICE] = no_device
        if exact is not own:
            certificate[ACCEPTED_PARITY] = exact.accepted
        if whole is not None:
            certificate[TEXT_PART_OF] = whole.model_type
        return self._entry(), certificate

    def _why_no_device(self) -> str:
        """Return why accelerators have no graphs of a model, whatever its weights; empty where they have."""
        if self._device_graphs is None:
            return "it was exported without the add-on for accelerators"
        if self._model_config.has_experts:  # see ``make_part``
            return "accelerators would wait for the host to count the rows of experts"
        if self._states is not None:
            return "it keeps recurrent states, which were not measured on accelerators"
        if self._part.head is not None:
            return "its draft is a head, for which accelerators have no rounds"
        if not self._model_config.has_equal_layers:
            return "its layers share caches or have some of other sizes, for which accelerators have no graphs"
        if has_sinks(self._path):
            # ONNX Runtime 1.31.1: "Only kNone and kQK output modes are supported in unified unfused attention".
            return "the CUDA provider gives no scores behind a mask, which attention sinks are computed from"
        return ""

    def _tell(self, stage: str) -> None:
        self._progress.tell(f"{self._part.name}: {stage}")

    def _half_logits(self) -> FloatArray | None:
        """Return PyTorch's logits in 16 bits, where any graph computes or is stored so; settles the precision."""
        weights = self._part.weights
        if not HALF_TYPES.keys() & {self._precision, weights}:
            return None
        half, halved = halved_logits(self._part, self._sizes.max_gamma)
        if self._precision:
            # Weights stored in 16 bits are read in no others.
            self._precision = FLOAT32 if weights in HALF_TYPES and half != weights else half
        return halved

    def _write_graphs(self, model: PreTrainedModel) -> None:
        model_config, sizes = self._model_config, self._sizes
        layers = f"{model_config.num_layers} layers"
        if self._states is not None:
            layers += f" with a cache, {self._states.mixers} with a recurrent state"
        self._tell(f"writing the graph ({layers})")
        # What is stored otherwise is made of the checkpoint's own bits, which take half the disk.
        export_model(
            model,
            self._path,
            num_positions=sizes.max_context + sizes.max_extend,
            num_source_positions=model_config.source.max_source if model_config.source else None,
            max_open=1 if self._states is None else self._states.max_open,
            keeps_halves=self._part.weights != FLOAT32,
            keeps_blocks=self._part.weights == GGUF,
            taps=None if self._part.head is None else self._part.head.tapped(),
        )

    def _certified(
        self, reference: Reference, bound: Bound | None, *, device: str
    ) -> dict[str, object]:
        """Derive all graphs from the canonical one and return their certificate."""
        path, sizes = self._path, self._sizes
        self._derive_host_graphs()
        if sizes.max_tree_nodes:
            derive_tree_graphs(path)
        if self._device_graphs is not None:
            if device:
                self._derive_device_graphs(device)
            else:
                self._device_graphs.drop_device_graphs(path)
        return self._compared(reference, bound, CHAIN_FILES)

    def _derive_host_graphs(self) -> None:
        path, model_config = self._path, self._model_config
        layers = ring_layers(path) if model_config.ring_columns else ()
        is_grouped = False
        if self._states is None and model_config.has_equal_layers:
            is_grouped = derive_grouped_graph(path, has_rings=bool(layers))
        if not layers:
            return
        if not is_grouped:
            derive_ring_graph(path)
        assert model_config.window is not None
        self._rings = RingsEntry(
            window=model_config.window, columns=model_config.ring_columns, layers=layers
        )

    def _derive_device_graphs(self, precision: str) -> None:
        assert self._device_graphs is not None
        has_trees = self._sizes.max_tree_nodes > 0
        self._device_graphs.derive_device_graphs(self._path, precision, with_trees=has_trees)

    def _compared(
        self, reference: Reference, bound: Bound | None, graphs: Sequence[str]
    ) -> dict[str, object]:
        return certify(
            reference,
            self._path,
            self._model_config,
            max_gamma=self._sizes.max_gamma,
            max_tree_nodes=self._sizes.max_tree_nodes,
            bound=bound,
            graphs=graphs,
            report=self._progress.steps(f"{self._part.name}: cases compared"),
        )

    def _stored(self, reference: Reference, halves: Bound | None) -> dict[str, object]:
        """Store the weights as asked and return the certificate of what computes from them."""
        part = self._part
        if part.weights != GGUF:
            self._tell(f"storing the weights as {part.weights}")
            _store(part, self._path, self._progress)
        _share(part, self._path)
        part_shared_blocks(self._path)
        try:
            return self._certified_as_stored(reference, halves)
        except BundleError as error:
            if self._precision not in HALF_TYPES:
                raise
            # Activations beyond 16 bits, for example.
            self._precision = FLOAT32
            found = self._certified_as_stored(reference, halves)
            self._tell(f"accelerators compute in float32: {error}")
            return found

    def _kept(self, reference: Reference, exact: Bound) -> dict[str, object]:
        """Return how far blocks that were kept are from the checkpoint where they multiply in float32: no farther."""
        found = check_parity(
            reference,
            self._path,
            self._model_config,
            max_gamma=self._sizes.max_gamma,
            bound=exact,
            exact_blocks=True,
        )
        return dict(found)

    def _certified_as_stored(self, reference: Reference, halves: Bound | None) -> dict[str, object]:
        device = self._precision
        if self._part.weights in HALF_TYPES:
            return self._certified(reference, halves, device=device)
        # The float32 graph was judged before; here the change by coarser weights is recorded.
        found = self._certified(reference, None, device=device)
        if device in HALF_TYPES:
            try:
                found["device_rounding"] = check_rounding(
                    self._path,
                    self._model_config,
                    max_gamma=self._sizes.max_gamma,
                    bound=halves,
                )
            except BundleError as error:
                self._precision = FLOAT32
                self._derive_device_graphs(FLOAT32)
                found |= self._compared(reference, None, [DEVICE_FILE])
                self._tell(f"accelerators compute in float32: {error}")
        return found

    def _entry(self) -> ModelEntry:
        model_config = self._model_config
        return ModelEntry(
            path=self._part.name,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_size=model_config.head_size,
            caches=model_config.caches,
            vocab_size=model_config.vocab_size,
            weights=self._part.weights,
            max_tree_nodes=self._sizes.max_tree_nodes,
            narrowest_span=NARROWEST_SPAN,
            device_precision=self._precision,
            source=_source_entry(model_config),
            states=self._states,
            rings=self._rings,
            gives_features=model_config.feature_size,
            parallel_token=model_config.parallel_token if self._part.name == "draft" else None,
        )


def with_rings(model_config: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Return a model's sizes, with rings for its layers with a window where these save enough of a slot.

    A target of a head has none: the head reads features of the whole text.
    """
    if (
        model_config.window is None
        or model_config.kinds
        or model_config.source
        or model_config.feature_size
    ):
        return model_config
    columns = ring_columns(model_config.window, max(1, sizes.max_gamma), sizes.max_extend)
    is_worth = columns * _RINGS_WORTH <= sizes.max_context
    return replace(model_config, ring_columns=columns) if is_worth else model_config


def _source_entry(model_config: ModelConfig) -> SourceEntry | None:
    if model_config.source is None:
        return None
    return SourceEntry(
        num_heads=model_config.source.num_heads,
        head_size=model_config.source.head_size,
        max_source=model_config.source.max_source,
        vocab_size=model_config.source.vocab_size,
        hidden_size=model_config.source.hidden_size,
    )


def halved_logits(part: Part, max_gamma: int) -> tuple[str, FloatArray]:
    """Return the 16-bit type of accelerators, and PyTorch's logits in it; without any, in that of the weights.

    Where float16 overflows it is bfloat16, unless accelerators were asked to compute in it: the CPU does in float32.
    With an encoder they do too, then.

    Raises:
        BundleError: PyTorch overflows in float16, which was asked for.
    """
    kind = part.precision or part.weights
    try:
        return kind, half_logits(part.checkpoint, kind, max_gamma=max_gamma)
    except BundleError:
        if part.weights == part.precision and part.checkpoint.model_config.source is None:
            raise
    return BFLOAT16, half_logits(part.checkpoint, BFLOAT16, max_gamma=max_gamma)


def _store(part: Part, path: Path, progress: Progress) -> None:
    """Rewrite the canonical graph with the weights that were asked for."""
    checkpoint, steps = part.checkpoint, progress.steps(f"{part.name}: weights")
    model_config, text = checkpoint.model_config, None
    if part.calibration is not None:
        text = given_text(path, model_config, part.calibration)
    if part.weights == W8A8:
        count = quantize_static(path, model_config, text, steps)
        progress.tell(f"{part.name}: {count} products take 8-bit activations")
    elif part.weights in INTEGER_KINDS:
        quantize_file(path, part.weights, model_config, text, steps)
    elif part.weights in PACKED_KINDS:
        assert checkpoint.packed is not None
        count = keep_blocks(path, checkpoint.path, checkpoint.packed, steps)
        progress.tell(f"{part.name}: {count} products keep the checkpoint's blocks")
    else:
        store_halves(path, part.weights, steps)


def _share(part: Part, path: Path) -> None:
    """Have the data file of the graphs as they are served, where there are two canonical ones."""
    if part.checkpoint.model_config.source is not None:
        share_data(path, path.with_name(ENCODE_FILE))
