"""Certificates: the distance of a bundle's graphs from the checkpoints they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.engines.bundle.manifest import DEVICE_FILE, GROUPED_FILE, Bundle
from outrider.export.certificate.parity import (
    FLOAT32_TOLERANCE,
    check_parity,
    check_rounding,
    prepare_parity,
)
from outrider.export.certificate.reference import Reference
from outrider.export.certificate.tree_parity import (
    TREE_FILES,
    check_tree_parity,
    prepare_tree_parity,
)
from outrider.export.checkpoint import ModelFacts, open_checkpoint
from outrider.export.weights.blocks import BITS
from outrider.export.weights.half_weights import HALF_TYPES
from transformers import PreTrainedModel


def prepare(
    model: PreTrainedModel, facts: ModelFacts, *, max_gamma: int, max_tree_nodes: int
) -> Reference:
    """Return all of a model that ``certify`` with these sizes asks for; it holds the model no longer."""
    reference = Reference(model)
    prepare_parity(reference, facts, max_gamma=max_gamma)
    if max_tree_nodes:
        prepare_tree_parity(reference, facts, max_tree_nodes=max_tree_nodes)
    reference.release()
    return reference


def certify(
    model: PreTrainedModel | Reference,
    path: Path,
    facts: ModelFacts,
    *,
    max_gamma: int,
    max_tree_nodes: int,
    tolerance: float | None,
) -> dict[str, object]:
    """Return the certificate of a canonical graph and of all graphs beside it.

    The model is the reference. Without a tolerance differences are recorded and not judged; without tree
    graphs ``max_tree_nodes`` is 0.

    Raises:
        BundleError: a case lies beyond the tolerance, or is not a number.
    """

    def judge(graph: Path) -> dict[str, object]:
        found = dict(check_parity(model, graph, facts, max_gamma=max_gamma, tolerance=tolerance))
        if max_tree_nodes and graph.name in TREE_FILES:
            found |= check_tree_parity(
                model, graph, facts, max_tree_nodes=max_tree_nodes, tolerance=tolerance
            )
        return found

    certificate = judge(path)
    for other in map(path.with_name, (GROUPED_FILE, DEVICE_FILE)):
        if other.exists():
            certificate[other.stem] = judge(other)
    return certificate


def certify_bundle(bundle: Bundle, checkpoints: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Return the certificate by part of a bundle, made again.

    ``checkpoints`` are folders by "target" and "draft"; parts that the bundle lacks are left out.

    Raises:
        BundleError: a folder is no such checkpoint, or a float32 graph is too far from it.
    """
    manifest = bundle.manifest
    parts = {"target": manifest.target, "draft": manifest.draft}
    certificate = {}
    for name, path in checkpoints.items():
        if (entry := parts[name]) is not None:
            checkpoint = open_checkpoint(path, max_context=manifest.max_context)
            certificate[name] = certify(
                Reference(checkpoint.load()),
                bundle.model_path(entry),
                checkpoint.facts,
                max_gamma=manifest.max_gamma,
                max_tree_nodes=entry.max_tree_nodes,
                # Other weights differ from the checkpoint's by design: recorded, not judged.
                tolerance=FLOAT32_TOLERANCE if entry.weights == "float32" else None,
            )
            if entry.weights in BITS and entry.device_precision in HALF_TYPES:
                certificate[name]["device_rounding"] = check_rounding(
                    bundle.model_path(entry),
                    checkpoint.facts,
                    max_gamma=manifest.max_gamma,
                    tolerance=None,
                )
    return certificate
