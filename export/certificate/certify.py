"""Certificates: the distance of a bundle's graphs from the checkpoints they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.engines.bundle.manifest import GROUPED_FILE, HALF_FILE, Bundle
from outrider.export.certificate.parity import FLOAT32_TOLERANCE, check_parity
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.checkpoint import ModelFacts, open_checkpoint
from transformers import PreTrainedModel


def certify(
    model: PreTrainedModel,
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
    certificate = dict(check_parity(model, path, facts, max_gamma=max_gamma, tolerance=tolerance))
    for name in (GROUPED_FILE, HALF_FILE):
        other = path.with_name(name)
        if other.exists():
            certificate[other.stem] = check_parity(
                model, other, facts, max_gamma=max_gamma, tolerance=tolerance
            )
    if max_tree_nodes:
        certificate |= check_tree_parity(
            model, path, facts, max_tree_nodes=max_tree_nodes, tolerance=tolerance
        )
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
                checkpoint.load(),
                bundle.model_path(entry),
                checkpoint.facts,
                max_gamma=manifest.max_gamma,
                max_tree_nodes=entry.max_tree_nodes,
                # Other weights differ from the checkpoint's by design: recorded, not judged.
                tolerance=FLOAT32_TOLERANCE if entry.weights == "float32" else None,
            )
    return certificate
