"""Parity of a bundle as it serves: the engines' own logits beside PyTorch's, and its certificate made again.

``outrider.testing`` asserts it in users' own test suites. Engines feed several rows in one call, pack them, cache them
and read sources; the certificate alone says nothing of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from outrider.engines.base import Engine, FloatArray, IntArray, Source, Span
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import open_engine
from outrider.export.certificate.certify import certify_bundle, most_different
from outrider.export.certificate.feeds import Sources
from outrider.export.certificate.parity import (
    compare_logits,
    float32_bound,
    judged,
)
from outrider.export.certificate.parity_cases import certified_prompts, certified_sources
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import open_checkpoint

# An engine's kernels beside those of the graphs that were certified.
_MOST_FARTHER = 1.5
_PARTS: Sequence[Literal["target", "draft"]] = ("target", "draft")


def check_bundle(
    root: Path, checkpoints: Mapping[str, Path], *, device: str = "cpu"
) -> dict[str, dict[str, object]]:
    """Return the certificate by part of a bundle, made again, with a case ``engine`` each.

    An engine of float32 weights may be as far from the checkpoint as the graphs may be; of others that much, and half
    as far again as the graphs are.

    Args:
        root: folder of the bundle.
        checkpoints: folders that it was made from, by "target" and "draft".
        device: of the engines.

    Raises:
        BundleError: a graph or an engine is too far from its checkpoint, or it is another checkpoint.
    """
    bundle = load_bundle(root)
    certificate = certify_bundle(bundle, checkpoints)
    for part in (one for one in _PARTS if one in checkpoints):
        farthest = _MOST_FARTHER * most_different(certificate[part])
        certificate[part]["engine"] = _check_engine(
            bundle, part, checkpoints[part], device, farthest
        )
    return certificate


def _check_engine(
    bundle: Bundle,
    part: Literal["target", "draft"],
    path: Path,
    device: str,
    farthest: float,
) -> Mapping[str, object]:
    """Return the case of an engine: sequences in slots side by side, as a prompt and as what is verified behind it."""
    manifest = bundle.manifest
    entry = manifest.target if part == "target" else manifest.draft
    assert entry is not None, "certified"
    checkpoint = open_checkpoint(
        path,
        max_context=manifest.max_context,
        max_source=entry.source.max_source if entry.source else None,
    )
    prompts = certified_prompts(checkpoint.model_config, manifest.max_gamma)[: manifest.max_batch]
    sources = certified_sources(checkpoint.model_config)
    if sources is not None:
        sources = Sources(
            tokens=sources.tokens[: len(prompts)], lengths=sources.lengths[: len(prompts)]
        )
    reference = Reference(checkpoint.load())
    bound = float32_bound(
        reference,
        checkpoint.model_config,
        max_gamma=manifest.max_gamma,
        accepted=manifest.accepted_parity(entry.path),
    )
    if entry.weights != "float32":
        why = (
            f"{_MOST_FARTHER} times what its graphs are from the checkpoint, and as a float32 graph"
        )
        bound = replace(bound, value=farthest + bound.of(0.0), why=why)
    expected = reference.logits(prompts, sources)
    with closing(open_engine(bundle, part, device=device, max_batch=len(prompts))) as engine:
        answered = _logits(engine, prompts, sources, manifest.max_gamma)
    where = bundle.model_path(entry)
    return judged("engine", [compare_logits(answered, expected)], where, bound)


def _logits(
    engine: Engine, prompts: IntArray, sources: Sources | None, max_gamma: int
) -> FloatArray:
    """Return an engine's logits [B, n, V] float32 of whole sequences [B, n]."""
    if sources is not None:
        engine.read(
            [
                Source(slot=slot, tokens=tuple(tokens[:length].tolist()))
                for slot, (tokens, length) in enumerate(
                    zip(sources.tokens, sources.lengths, strict=True)
                )
            ]
        )
    found = []
    cuts = [0, prompts.shape[1] - max_gamma - 1, prompts.shape[1]]
    for start, end in itertools.pairwise(cuts):
        spans = [
            Span(
                slot=slot,
                start=start,
                tokens=tuple(row[start:end].tolist()),
                num_logits=end - start,
                num_settled=end - start,
            )
            for slot, row in enumerate(prompts)
        ]
        found.append(np.array(engine.extend(spans)[: len(prompts), : end - start]))
    return np.concatenate(found, axis=1)
