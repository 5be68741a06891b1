"""From a checkpoint pair to a bundle: the stages in order, all or nothing.

Everything is written into a sibling folder that only a rename turns into the bundle; the manifest
comes last. So a killed export leaves nothing that loads.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from engines.base import BundleError
from engines.bundle import (
    MODEL_FILE,
    TOKENIZER_FILE,
    Bundle,
    Manifest,
    ModelEntry,
    load_bundle,
    write_manifest,
)
from engines.bundle_files import hash_files
from engines.sampler_tensors import SAMPLER_FOLDER
from export.checkpoint import (
    Checkpoint,
    ModelFacts,
    check_same_tokens,
    check_tokenizer,
    open_checkpoint,
)
from export.half_weights import FLOAT16, FLOAT16_TOLERANCE, store_float16
from export.parity import FLOAT32_TOLERANCE, check_parity
from export.quantize import BITS, quantize_file
from export.sampler_graphs import write_sampler_graphs
from export.to_onnx import export_model
from export.tree_graph import derive_tree_graphs
from export.tree_parity import check_tree_parity

WEIGHT_KINDS = ("float32", FLOAT16, *BITS)
MAX_EXTEND = 512
# The graph is written once in float32, and once more by a pass that rewrites its weights.
_DISK_COPIES = 2
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
    max_batch: int = 8,
    max_gamma: int = 8,
    max_tree_nodes: int = 64,
    progress: Callable[[str], None],
) -> Bundle:
    """Export a target and (maybe) its draft to the new folder ``out`` and load it.

    Args:
        target: checkpoint folder.
        draft: checkpoint folder of the draft model, or None for a bundle without one.
        out: folder to make; it must not exist.
        max_context: tokens of one slot that may ever be valid.
        max_batch: slots at most.
        max_gamma: draft tokens per step at most.
        max_tree_nodes: tokens of the largest tree verified in one step, its root included; 0 for
            a bundle that verifies chains alone.
        weights: storage of the target's weights, one of ``WEIGHT_KINDS``.
        draft_weights: of the draft's; None for the same.
        progress: told the start of each stage, in words.

    Raises:
        BundleError: refused before any work (see ``open_checkpoint``), ``out`` exists, the disk is
            too full, or a graph does not answer as the checkpoint does or takes no tree mask.
    """
    _check_arguments(out, weights, draft_weights or weights, max_batch, max_gamma, max_tree_nodes)
    parts = {"target": (open_checkpoint(target, max_context=max_context), weights)}
    if draft is not None:
        opened = open_checkpoint(draft, max_context=max_context)
        parts["draft"] = (opened, draft_weights or weights)
    _check_tokens({name: checkpoint for name, (checkpoint, _) in parts.items()})
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(out.parent, [checkpoint for checkpoint, _ in parts.values()])
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        shutil.copyfile(target / TOKENIZER_FILE, building / TOKENIZER_FILE)
        entries, certificate = {}, {}
        for name, (checkpoint, kind) in parts.items():
            entries[name], certificate[name] = _export_part(
                name,
                checkpoint,
                kind,
                building,
                certify=_Certifier(max_gamma=max_gamma, max_tree_nodes=max_tree_nodes),
                progress=progress,
            )
        progress("sampler: writing its graphs")
        write_sampler_graphs(
            building / SAMPLER_FOLDER,
            vocab_size=entries["target"].vocab_size,
            draft_vocab_size=entries["draft"].vocab_size if draft is not None else None,
            max_gamma=max_gamma,
        )
        progress("manifest: hashing files")
        facts = parts["target"][0].facts
        write_manifest(
            building,
            Manifest(
                target=entries["target"],
                draft=entries.get("draft"),
                max_context=max_context,
                max_batch=max_batch,
                max_gamma=max_gamma,
                max_extend=max(MAX_EXTEND, max_gamma + 1, max_tree_nodes),
                eos_token_ids=facts.eos_token_ids,
                bos_token_id=facts.bos_token_id,
                files=hash_files(building),
                versions={name: version(name) for name in _PACKAGES},
                certificate=certificate,
            ),
        )
        building.chmod(0o755)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return load_bundle(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Certifier:
    """Finishes a model's graphs by those for trees and holds them all against the checkpoint."""

    max_gamma: int
    max_tree_nodes: int

    def __call__(
        self, model: PreTrainedModel, path: Path, facts: ModelFacts, *, tolerance: float | None
    ) -> dict[str, object]:
        """Certificate of the graph at ``path`` and of the tree graphs made from it here."""
        certificate = dict(
            check_parity(model, path, facts, max_gamma=self.max_gamma, tolerance=tolerance)
        )
        if self.max_tree_nodes:
            derive_tree_graphs(path)
            certificate |= check_tree_parity(
                model, path, facts, max_tree_nodes=self.max_tree_nodes, tolerance=tolerance
            )
        return certificate


def _export_part(
    name: str,
    checkpoint: Checkpoint,
    weights: str,
    root: Path,
    *,
    certify: _Certifier,
    progress: Callable[[str], None],
) -> tuple[ModelEntry, object]:
    facts, path = checkpoint.facts, root / name / MODEL_FILE
    progress(f"{name}: loading {checkpoint.config.model_type}")
    model = checkpoint.load()
    progress(f"{name}: writing the graph ({facts.num_layers} layers)")
    export_model(model, path)
    progress(f"{name}: comparing with the checkpoint")
    certificate = certify(model, path, facts, tolerance=FLOAT32_TOLERANCE)
    if weights in BITS:
        progress(f"{name}: storing the weights as {weights}")
        quantize_file(path, weights)
        # Judged before: the graph. Recorded here: what the coarser weights change.
        certificate[weights] = certify(model, path, facts, tolerance=None)
    elif weights == FLOAT16:
        progress(f"{name}: storing the weights as {weights}")
        store_float16(path)
        certificate[weights] = certify(model, path, facts, tolerance=FLOAT16_TOLERANCE)
    entry = ModelEntry(
        path=name,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        vocab_size=facts.vocab_size,
        weights=weights,
        max_tree_nodes=certify.max_tree_nodes,
    )
    return entry, certificate


def _check_arguments(
    out: Path,
    weights: str,
    draft_weights: str,
    max_batch: int,
    max_gamma: int,
    max_tree_nodes: int,
) -> None:
    if out.exists():
        raise BundleError(f"{out.name}: exists already; remove it or name another folder")
    for kind in (weights, draft_weights):
        if kind not in WEIGHT_KINDS:
            raise BundleError(f"weights {kind!r} are not one of {', '.join(WEIGHT_KINDS)}")
    if max_batch < 1 or max_gamma < 0:
        raise BundleError("max_batch must be at least 1 and max_gamma at least 0")
    if max_tree_nodes < 0 or max_tree_nodes == 1:
        raise BundleError("max_tree_nodes must be at least 2, or 0 for no trees")


def _check_tokens(checkpoints: dict[str, Checkpoint]) -> None:
    tokenizers = {name: check_tokenizer(checkpoint) for name, checkpoint in checkpoints.items()}
    if "draft" in tokenizers:
        check_same_tokens(tokenizers["target"], tokenizers["draft"])


def _check_disk(folder: Path, checkpoints: list[Checkpoint]) -> None:
    # Checkpoints in 16 bits double when written as float32.
    weight_bytes = sum(2 * checkpoint.num_weight_bytes() for checkpoint in checkpoints)
    wanted = _DISK_COPIES * weight_bytes + _DISK_MARGIN_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise BundleError(
            f"{wanted >> 20} MiB of disk are wanted for the export, {free >> 20} free"
        )
