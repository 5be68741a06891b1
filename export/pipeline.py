"""Export of a checkpoint pair to a bundle: the stages in order, all or nothing.

Files are written to a sibling folder, the manifest last, and a rename makes it the bundle: a killed export leaves
nothing that loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from outrider.engines.base import BundleError, FloatArray
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import W8A8, Manifest, ModelEntry, write_manifest
from outrider.engines.bundle.names import MODEL_FILE
from outrider.engines.bundle.text2text import ENCODE_FILE, SourceEntry
from outrider.engines.device.sampling.tensors import SAMPLER_FOLDER
from outrider.export.certificate.certify import certify, prepare
from outrider.export.certificate.half_loss import half_logits, half_tolerance
from outrider.export.certificate.parity import check_rounding, float32_tolerance
from outrider.export.checkpoint import Checkpoint, ModelFacts, open_checkpoint
from outrider.export.graph.device_graphs import FLOAT32, derive_device_graphs, drop_device_graphs
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.narrow_spans import NARROWEST_SPAN
from outrider.export.graph.shared_encoder import share_encoder
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.sampler_graphs import write_sampler_graphs
from outrider.export.scratch import scratch_folder
from outrider.export.vocabulary import check_tokens, write_texts
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.half_weights import BFLOAT16, HALF_TYPES, store_halves
from outrider.export.weights.shared_data import share_data
from outrider.export.weights.w8a8 import INTEGER_KINDS, quantize_static

HALF = "half"
"""The 16-bit type that suits a checkpoint; see ``Checkpoint.half_precision``."""
WEIGHT_KINDS = (FLOAT32, HALF, *HALF_TYPES, *INTEGER_KINDS)
MAX_EXTEND = 512
# Weights are written as the checkpoint has them, then as the bundle wants them. Of a checkpoint that has 16 bits and
# float32 the first are float32 throughout, twice its size; of int8 and int4 an embedding stays float32.
_DISK_COPIES = 3.0
_DISK_MARGIN_BYTES = 64 << 20
_PACKAGES = ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime")


def export_bundle(
    *,
    target: Path,
    draft: Path | None,
    out: Path,
    weights: str = "float32",
    draft_weights: str | None = None,
    max_context: int = 1024,
    max_source: int | None = None,
    max_batch: int = 8,
    max_gamma: int = 8,
    max_tree_nodes: int = 64,
    progress: Callable[[str], None],
) -> Bundle:
    """Export a target, with its draft if given, to the new folder ``out``; return the loaded bundle.

    Args:
        target: checkpoint folder.
        draft: checkpoint folder of the draft model, or None for a bundle without one.
        out: folder to make; it must not exist.
        max_context: tokens of one slot that may ever be valid.
        max_source: tokens of a source at most, where the target has an encoder; None for 512, or as many
            positions as the encoders know.
        max_batch: slots at most.
        max_gamma: draft tokens per step at most.
        max_tree_nodes: tokens of the largest tree verified in one step, its root included; 0 for
            a bundle that verifies chains alone.
        weights: storage of the target's weights, one of ``WEIGHT_KINDS``.
        draft_weights: of the draft's; None for the same.
        progress: called at the start of each stage, with its name.

    Raises:
        BundleError: refused before any work (see ``open_checkpoint``), ``out`` exists, the disk is
            too full, or a graph does not answer as the checkpoint does or takes no tree mask.
    """
    sizes = _Sizes(
        max_context=max_context,
        max_batch=max_batch,
        max_gamma=max_gamma,
        max_tree_nodes=max_tree_nodes,
    )
    _check_arguments(out, (weights, draft_weights or weights), sizes)
    wanted = {"target": (target, weights)}
    if draft is not None:
        wanted["draft"] = (draft, draft_weights or weights)
    checkpoints = {
        name: open_checkpoint(path, max_context=max_context, max_source=max_source)
        for name, (path, _) in wanted.items()
    }
    _check_sources(checkpoints, max_source)
    check_tokens(checkpoints)
    parts = {name: _part(name, checkpoints[name], kind) for name, (_, kind) in wanted.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(out.parent, checkpoints.values())
    with scratch_folder(out.parent, f".{out.name}.export-") as building:
        _write(building, parts, sizes, progress)
        building.chmod(0o755)
        building.rename(out)
    return load_bundle(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Limits of a bundle; see ``export_bundle``."""

    max_context: int
    max_batch: int
    max_gamma: int
    max_tree_nodes: int

    @property
    def max_extend(self) -> int:
        """Return the tokens of the longest span."""
        return max(MAX_EXTEND, self.max_gamma + 1, self.max_tree_nodes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A model to export: "target" or "draft", its checkpoint, its weights and what accelerators compute in.

    That is empty where there are no graphs for them.
    """

    name: str
    checkpoint: Checkpoint
    weights: str
    precision: str


def _part(name: str, checkpoint: Checkpoint, asked: str) -> _Part:
    weights = checkpoint.half_precision() if asked == HALF else asked
    if weights == W8A8:
        precision = ""  # accelerators would dequantise every weight in every call
    elif weights in INTEGER_KINDS:
        precision = checkpoint.half_precision()
    else:
        precision = weights
    return _Part(name, checkpoint, weights, precision)


def _write(
    root: Path, parts: Mapping[str, _Part], sizes: _Sizes, progress: Callable[[str], None]
) -> None:
    """Write tokenizers, graphs, samplers and, last, the manifest to ``root``."""
    text2text = write_texts(parts["target"].checkpoint, root)
    entries, certificate = {}, {}
    for name, part in parts.items():
        entries[name], certificate[name] = _export_part(part, root, sizes, progress)
    target, draft = entries["target"], _beside(root, entries, progress)
    progress("sampler: writing its graphs")
    write_sampler_graphs(
        root / SAMPLER_FOLDER,
        vocab_size=target.vocab_size,
        draft_vocab_size=None if draft is None else draft.vocab_size,
        max_gamma=sizes.max_gamma,
    )
    progress("manifest: hashing files")
    facts = parts["target"].checkpoint.facts
    manifest = Manifest(
        target=target,
        draft=draft,
        max_context=sizes.max_context,
        max_batch=sizes.max_batch,
        max_gamma=sizes.max_gamma,
        max_extend=sizes.max_extend,
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id,
        files=hash_files(root),
        versions={name: version(name) for name in _PACKAGES},
        certificate=certificate,
        text2text=text2text,
    )
    write_manifest(root, manifest)


def _beside(
    root: Path, entries: Mapping[str, ModelEntry], progress: Callable[[str], None]
) -> ModelEntry | None:
    """Return the draft's entry, which shares the target's encoder if both have the same."""
    target, draft = entries["target"], entries.get("draft")
    if draft is None or draft.source is None or target.source is None:
        return draft
    if target.source.max_source != draft.source.max_source:
        return draft
    encoders = (root / one.path / ENCODE_FILE for one in (target, draft))
    if not share_encoder(*encoders, hidden_size=target.source.hidden_size):
        return draft
    progress("draft: the target's encoder answers for its own")
    return replace(draft, source=replace(draft.source, shares_encoder=True))


def _export_part(
    part: _Part, root: Path, sizes: _Sizes, progress: Callable[[str], None]
) -> tuple[ModelEntry, dict[str, object]]:
    name, weights, facts = part.name, part.weights, part.checkpoint.facts
    path, precision, max_gamma = root / name / MODEL_FILE, part.precision, sizes.max_gamma
    progress(f"{name}: loading {part.checkpoint.config.model_type}")
    halves_tolerance = None
    halved: FloatArray | None = None
    if HALF_TYPES.keys() & {precision, weights}:
        half, halved = _half_logits(part, max_gamma)
        if precision:
            # Weights stored in 16 bits are read in no others.
            precision = FLOAT32 if weights in HALF_TYPES and half != weights else half
    model = part.checkpoint.load()

    def certified(tolerance: float | None, *, device: str) -> dict[str, object]:
        derive_grouped_graph(path)
        has_trees = sizes.max_tree_nodes > 0
        if has_trees:
            derive_tree_graphs(path)
        if device:
            derive_device_graphs(path, device, with_trees=has_trees)
        else:
            drop_device_graphs(path)
        return certify(
            reference,
            path,
            facts,
            max_gamma=max_gamma,
            max_tree_nodes=sizes.max_tree_nodes,
            tolerance=tolerance,
        )

    def certified_as_stored(device: str) -> dict[str, object]:
        if weights in HALF_TYPES:
            return certified(halves_tolerance, device=device)
        # The float32 graph was judged before; here the change by coarser weights is recorded.
        found = certified(None, device=device)
        if device in HALF_TYPES:
            found["device_rounding"] = check_rounding(
                path, facts, max_gamma=max_gamma, tolerance=halves_tolerance
            )
        return found

    progress(f"{name}: writing the graph ({facts.num_layers} layers)")
    num_positions = sizes.max_context + sizes.max_extend
    # What is stored otherwise is made of the checkpoint's own bits, which take half the disk.
    export_model(
        model,
        path,
        num_positions=num_positions,
        num_source_positions=facts.source.max_source if facts.source else None,
        keeps_halves=weights != FLOAT32,
    )
    progress(f"{name}: comparing with the checkpoint")
    reference = prepare(model, facts, max_gamma=max_gamma, max_tree_nodes=sizes.max_tree_nodes)
    del model  # and its pages, which would stand beside those of the graphs
    if halved is not None:
        halves_tolerance = half_tolerance(reference, halved, part.checkpoint, max_gamma=max_gamma)
    exact = float32_tolerance(reference, facts, max_gamma=max_gamma)
    if weights == FLOAT32:
        _share(part, path)
    certificate = certified(exact, device=FLOAT32)
    if weights != FLOAT32:
        progress(f"{name}: storing the weights as {weights}")
        _store(part, path, progress)
        _share(part, path)
        try:
            certificate[weights] = certified_as_stored(precision)
        except BundleError as error:
            if precision not in HALF_TYPES:
                raise
            # Activations beyond 16 bits, for example.
            precision = FLOAT32
            certificate[weights] = certified_as_stored(precision)
            progress(f"{name}: accelerators compute in float32: {error}")
    entry = ModelEntry(
        path=name,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        vocab_size=facts.vocab_size,
        weights=weights,
        max_tree_nodes=sizes.max_tree_nodes,
        narrowest_span=NARROWEST_SPAN,
        device_precision=precision,
        source=_source_entry(facts),
    )
    return entry, certificate


def _source_entry(facts: ModelFacts) -> SourceEntry | None:
    if facts.source is None:
        return None
    return SourceEntry(
        num_heads=facts.source.num_heads,
        head_size=facts.source.head_size,
        max_source=facts.source.max_source,
        vocab_size=facts.source.vocab_size,
        hidden_size=facts.source.hidden_size,
    )


def _half_logits(part: _Part, max_gamma: int) -> tuple[str, FloatArray]:
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
        if part.weights == part.precision and part.checkpoint.facts.source is None:
            raise
    return BFLOAT16, half_logits(part.checkpoint, BFLOAT16, max_gamma=max_gamma)


def _store(part: _Part, path: Path, progress: Callable[[str], None]) -> None:
    """Rewrite the canonical graph with the weights that were asked for."""
    if part.weights == W8A8:
        count = quantize_static(path, part.checkpoint.facts)
        progress(f"{part.name}: {count} products take 8-bit activations")
    elif part.weights in INTEGER_KINDS:
        quantize_file(path, part.weights, part.checkpoint.facts)
    else:
        store_halves(path, part.weights)


def _share(part: _Part, path: Path) -> None:
    """Have the data file of the graphs as they are served, where there are two canonical ones."""
    if part.checkpoint.facts.source is not None:
        share_data(path, path.with_name(ENCODE_FILE))


def _check_arguments(out: Path, kinds: Iterable[str], sizes: _Sizes) -> None:
    if out.exists():
        raise BundleError(f"{out.name}: exists already; remove it or name another folder")
    for kind in kinds:
        if kind not in WEIGHT_KINDS:
            raise BundleError(f"weights {kind!r} are not one of {', '.join(WEIGHT_KINDS)}")
    if sizes.max_batch < 1 or sizes.max_gamma < 0:
        raise BundleError("max_batch must be at least 1 and max_gamma at least 0")
    if sizes.max_tree_nodes < 0 or sizes.max_tree_nodes == 1:
        raise BundleError("max_tree_nodes must be at least 2, or 0 for no trees")


def _check_sources(checkpoints: Mapping[str, Checkpoint], max_source: int | None) -> None:
    """Refuse an encoder that nobody gives sources to, and a draft's that cannot read the target's."""
    target = checkpoints["target"].facts.source
    if target is None and max_source is not None:
        raise BundleError("max_source: the target has no encoder")
    if "draft" not in checkpoints:
        return
    draft = checkpoints["draft"].facts.source
    if target is None:
        if draft is not None:
            raise BundleError("draft: its encoder wants sources, but the target has no encoder")
    elif draft is None:
        raise BundleError("draft: it has no encoder to read the target's sources")
    elif draft.max_source < target.max_source:
        raise BundleError(
            f"draft: its encoder reads {draft.max_source} tokens, the target's "
            f"{target.max_source}; export with max_source <= {draft.max_source}"
        )
    elif draft.vocab_size < target.vocab_size:
        raise BundleError(
            f"draft: its encoder knows {draft.vocab_size} tokens, the target's {target.vocab_size}; "
            "use a draft of the target's family"
        )


def _check_disk(folder: Path, checkpoints: Iterable[Checkpoint]) -> None:
    weight_bytes = sum(checkpoint.num_weight_bytes() for checkpoint in checkpoints)
    wanted = int(_DISK_COPIES * weight_bytes) + _DISK_MARGIN_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise BundleError(
            f"{wanted >> 20} MiB of disk are wanted for the export, {free >> 20} free"
        )
