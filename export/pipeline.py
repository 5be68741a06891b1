"""Export of a checkpoint pair to a bundle: the stages in order, all or nothing.

Files are written to a sibling folder, the manifest last, and a rename makes it the bundle: a killed export leaves
nothing that loads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, ModelEntry, required, write_manifest
from outrider.engines.bundle.names import MODEL_FILE
from outrider.engines.bundle.renewal import SERVER
from outrider.engines.memory.sizes import machine_memory_bytes, size_words
from outrider.engines.onnx.session import LIBRARY_VERSION
from outrider.export.certificate.certify import OTHER_TOKENS
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.context import default_context, export_memory_bytes
from outrider.export.exporters import device_graphs
from outrider.export.graph.other_ids import map_ids
from outrider.export.graph.shared_encoder import share_encoder
from outrider.export.heads.checkpoint import is_head
from outrider.export.heads.part import HeadPart, head_beside
from outrider.export.heads.part import export_part as export_head
from outrider.export.hub import Located
from outrider.export.part import WEIGHT_KINDS, Part, Sizes, export_part, make_part
from outrider.export.progress import Progress
from outrider.export.scratch import scratch_folder
from outrider.export.sources import located
from outrider.export.tokenizers.twins import TokenMaps
from outrider.export.vocabulary import check_tokens, prompt_tokenizer, write_texts
from outrider.export.weights.given_text import read_rows
from outrider.export.weights.w8a8 import INTEGER_KINDS
from outrider.export.weights.written_text import write_text

# Weights are written as the checkpoint has them, then as the bundle wants them. Of a checkpoint that has 16 bits and
# float32 the first are float32 throughout, twice its size; of int8 and int4 blocks are written twice.
_DISK_COPIES = 3.0
_DISK_MARGIN_BYTES = 64 << 20
# Below such a share of tokens with a twin a draft's bound costs more than a sibling of the target's family would.
_ENOUGH_TWINS = 0.95
_PACKAGES = (SERVER, "torch", "transformers", "optimum", "onnx", "onnxscript")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What a bundle is to hold.

    Attributes:
        weights: storage of the target's weights, one of ``WEIGHT_KINDS``; None for float32 or, where they are packed as
            integers, for the checkpoint's own.
        draft_weights: of the draft's; None for the same.
        max_context: tokens of one slot that may ever be valid; None for as many as ``context.default_context`` says.
        max_source: tokens of a source at most, where the target has an encoder; None for 512, or as many
            positions as the encoders know.
        max_batch: slots at most.
        max_gamma: draft tokens per step at most.
        max_tree_nodes: tokens of the largest tree verified in one step, its root included; 0 for
            a bundle that verifies chains alone.
        calibration_text: file of text that integer weights are rounded by; None for text that the models write.
        accept_parity: how far from its checkpoint's logits a float32 graph may be; None for what rounding explains.
    """

    weights: str | None = None
    draft_weights: str | None = None
    max_context: int | None = None
    max_source: int | None = None
    max_batch: int = 8
    max_gamma: int = 8
    max_tree_nodes: int = 64
    calibration_text: Path | None = None
    accept_parity: float | None = None

    @property
    def kinds(self) -> dict[str, str | None]:
        """Weights by model."""
        return {"target": self.weights, "draft": self.draft_weights or self.weights}


DEFAULT_OPTIONS = ExportOptions()


def export_bundle(
    *,
    target: Path,
    draft: Path | None,
    out: Path,
    options: ExportOptions = DEFAULT_OPTIONS,
    progress: Callable[[str], None],
    report: Callable[[str, int, int], None] | None = None,
) -> Bundle:
    """Export a target, with its draft if given, to the new folder ``out``; return the loaded bundle.

    Args:
        target: checkpoint folder, a name on the Hub (see ``hub.locate``), or a GGUF file.
        draft: that of the draft model, or None for a bundle without one.
        out: folder to make; it must not exist.
        options: what the bundle is to hold.
        progress: called at the start of each stage, with its name.
        report: called with a long phase's name, how many of its steps are done and of how many.

    Raises:
        BundleError: refused before any work (see ``open_checkpoint``), ``out`` exists, the disk is
            too full, or a graph does not answer as the checkpoint does or takes no tree mask.
    """
    _check_options(out, options)
    told = Progress(progress, report)
    asked = {"target": target} | ({} if draft is None else {"draft": draft})
    with located(asked, out.parent, told) as found:
        _export(found, out, options, told)
    return load_bundle(out)


def _export(
    found: Mapping[str, Located], out: Path, options: ExportOptions, told: Progress
) -> None:
    """Export checkpoints by "target" and "draft" to the new folder ``out``."""
    head_path = found["draft"].path if "draft" in found else None
    head_path = head_path if head_path is not None and is_head(head_path) else None
    checkpoints = {
        name: open_checkpoint(
            one.path, max_context=options.max_context, max_source=options.max_source
        )
        for name, one in found.items()
        if name == "target" or head_path is None
    }
    _check_sources(checkpoints, options.max_source)
    maps = check_tokens(checkpoints)
    head = None if head_path is None else head_beside(head_path, checkpoints["target"])
    if head is not None:
        checkpoints["target"] = checkpoints["target"].with_features(head.size)
    parts = _parts(checkpoints, options, head)
    max_context = options.max_context
    if max_context is None:
        max_context = _default_context(checkpoints, options.max_gamma, told)
        parts = {
            name: replace(part, checkpoint=part.checkpoint.within(max_context))
            for name, part in parts.items()
        }
    sizes = Sizes(
        max_context=max_context,
        max_batch=options.max_batch,
        max_gamma=options.max_gamma,
        max_tree_nodes=options.max_tree_nodes,
    )
    sources = {name: one.source for name, one in found.items() if one.source}
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_machine(out.parent, checkpoints.values(), told)
    with scratch_folder(out.parent, f".{out.name}.export-") as building:
        _write(building, parts, sizes, sources, told, options.kinds["draft"], maps)
        building.chmod(0o755)
        building.rename(out)


def _parts(
    checkpoints: Mapping[str, Checkpoint], options: ExportOptions, head: HeadPart | None
) -> dict[str, Part]:
    """Return the models to export but a head, with a text that their weights are rounded by where one is given."""
    kinds = options.kinds
    parts = {
        name: replace(make_part(name, one, kinds[name]), accepted=options.accept_parity, head=head)
        for name, one in checkpoints.items()
    }
    text = options.calibration_text
    return parts if text is None else _calibrated(parts, text)


def _calibrated(parts: Mapping[str, Part], text: Path) -> dict[str, Part]:
    """Return the models with rows of a text for those whose weights are rounded by it.

    Raises:
        BundleError: none is, or the text is none or too short.
    """
    rounded = [name for name, part in parts.items() if part.weights in INTEGER_KINDS]
    if not rounded:
        raise BundleError(
            f"calibration_text: only weights {', '.join(INTEGER_KINDS)} are rounded by a text"
        )
    rows = read_rows(text, prompt_tokenizer(parts["target"].checkpoint))
    return {
        name: replace(part, calibration=rows) if name in rounded else part
        for name, part in parts.items()
    }


def _default_context(
    checkpoints: Mapping[str, Checkpoint], max_gamma: int, progress: Progress
) -> int:
    states = [one.slot_states(max_gamma) for one in checkpoints.values()]
    found, words = default_context(
        {name: one.model_config for name, one in checkpoints.items()},
        slot_bytes=sum(one.slot_bytes for one in states if one is not None),
    )
    progress.tell(words)
    return found


def _write(
    root: Path,
    parts: Mapping[str, Part],
    sizes: Sizes,
    sources: Mapping[str, str],
    progress: Progress,
    draft_weights: str | None,
    maps: TokenMaps | None,
) -> None:
    """Write tokenizers, graphs and, last, the manifest to ``root``."""
    text2text = write_texts(parts["target"].checkpoint, root)
    entries, certificate = {}, {}
    for name, part in parts.items():
        entries[name], certificate[name] = export_part(part, root, sizes, progress)
    if (head := parts["target"].head) is not None:
        num_positions = sizes.max_context + sizes.max_extend
        entries["draft"], certificate["draft"] = export_head(
            head, root, draft_weights, num_positions, progress
        )
    if maps is not None:
        entries["draft"], certificate["draft"][OTHER_TOKENS] = _mapped(
            root, parts["target"], entries["draft"], maps, progress
        )
    target, draft = entries["target"], _beside(root, entries, progress)
    if device_graphs() is None:
        progress.tell("no add-on for accelerators is installed: their graphs are left out")
    progress.tell("manifest: hashing files")
    model_config = parts["target"].checkpoint.model_config
    manifest = Manifest(
        target=target,
        draft=draft,
        max_context=sizes.max_context,
        max_batch=sizes.max_batch,
        max_gamma=sizes.max_gamma,
        max_extend=sizes.max_extend,
        eos_token_ids=model_config.eos_token_ids,
        bos_token_id=model_config.bos_token_id,
        files=hash_files(root),
        # Of ONNX Runtime the package's own word: two distributions hold it.
        versions={name: version(name) for name in _PACKAGES} | {"onnxruntime": LIBRARY_VERSION},
        certificate=certificate,
        text2text=text2text,
        sources=sources,
        requires=required(target, draft),
    )
    write_manifest(root, manifest)


def _mapped(
    root: Path, target: Part, draft: ModelEntry, maps: TokenMaps, progress: Progress
) -> tuple[ModelEntry, dict[str, float]]:
    """Give a draft's graphs the target's ids; return its entry, and what share of tokens it can propose."""
    text = target.calibration
    if text is None:
        progress.tell("draft: its tokenizer is another one; the target writes a text to compare")
        text = write_text(root / target.name / MODEL_FILE, target.checkpoint.model_config).tokens
    shares = {"of_text": maps.share_of(text), "of_vocabulary": maps.share_of_vocabulary}
    advice = (
        "" if shares["of_text"] >= _ENOUGH_TWINS else "; a draft of the target's family does better"
    )
    progress.tell(
        f"draft: it has {shares['of_vocabulary']:.2f} of the target's vocabulary and {shares['of_text']:.3f} of the "
        f"tokens of {text.size} that the target wrote: no more of its drafts are ever kept{advice}"
    )
    map_ids(root / draft.path, maps)
    return replace(draft, vocab_size=len(maps.draft_ids)), shares


def _beside(root: Path, entries: Mapping[str, ModelEntry], progress: Progress) -> ModelEntry | None:
    """Return the draft's entry, which shares the target's encoder if both have the same."""
    target, draft = entries["target"], entries.get("draft")
    if draft is None or draft.source is None or target.source is None:
        return draft
    if target.source.max_source != draft.source.max_source:
        return draft
    encoders = (root / one.path / ENCODE_FILE for one in (target, draft))
    if not share_encoder(*encoders, hidden_size=target.source.hidden_size):
        return draft
    progress.tell("draft: the target's encoder answers for its own")
    return replace(draft, source=replace(draft.source, shares_encoder=True))


def _check_options(out: Path, options: ExportOptions) -> None:
    if out.exists():
        raise BundleError(f"{out.name}: exists already; remove it or name another folder")
    for kind in options.kinds.values():
        if kind is not None and kind not in WEIGHT_KINDS:
            raise BundleError(f"weights {kind!r} are not one of {', '.join(WEIGHT_KINDS)}")
    max_context = options.max_context or 0
    if max_context == 1 or max_context < 0:
        raise BundleError("max_context must be at least 2")
    if options.max_batch < 1 or options.max_gamma < 0:
        raise BundleError("max_batch must be at least 1 and max_gamma at least 0")
    if options.max_tree_nodes < 0 or options.max_tree_nodes == 1:
        raise BundleError("max_tree_nodes must be at least 2, or 0 for no trees")
    if options.accept_parity is not None and not 0 < options.accept_parity < math.inf:
        raise BundleError("accept_parity must be a number above 0")


def _check_sources(checkpoints: Mapping[str, Checkpoint], max_source: int | None) -> None:
    """Refuse an encoder that nobody gives sources to, and a draft's that cannot read the target's."""
    target = checkpoints["target"].model_config.source
    if target is None and max_source is not None:
        raise BundleError("max_source: the target has no encoder")
    if "draft" not in checkpoints:
        return
    draft = checkpoints["draft"].model_config.source
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


def _check_machine(folder: Path, checkpoints: Collection[Checkpoint], progress: Progress) -> None:
    """Tell what the export wants of disk and memory.

    Raises:
        BundleError: the disk has less.
    """
    weight_bytes = sum(checkpoint.num_weight_bytes() for checkpoint in checkpoints)
    wanted = int(_DISK_COPIES * weight_bytes) + _DISK_MARGIN_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise BundleError(
            f"{wanted >> 20} MiB of disk are wanted for the export, {free >> 20} free"
        )
    memory = export_memory_bytes(
        (one.num_parameters(), one.model_config.vocab_size) for one in checkpoints
    )
    has = machine_memory_bytes()
    of_machine = "" if has is None else f", of {size_words(has)}"
    progress.tell(
        f"the export wants {size_words(wanted)} of disk, of {size_words(free)} free, and about {size_words(memory)} of "
        f"memory{of_machine}"
    )
