"""What PyTorch loses in 16 bits: the measure of graphs that compute so.

A wrong rounding, position or mask moves logits by more than another order of sums does; how much that is depends on the
model. So a graph may be twice as far from the model in float32 as PyTorch itself is in the same 16 bits.
"""

from __future__ import annotations

import numpy as np
import torch
from outrider.engines.base import BundleError, FloatArray
from outrider.export.certificate.parity import Bound
from outrider.export.certificate.parity_cases import certified_prompts, certified_sources
from outrider.export.certificate.reference import Reference, reference_logits
from outrider.export.checkpoint import Checkpoint
from outrider.export.weights.half_weights import BFLOAT16, FLOAT16

ALLOWED_LOSS = 2.0
_TYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


def half_logits(checkpoint: Checkpoint, precision: str, *, max_gamma: int) -> FloatArray:
    """Return PyTorch's logits [B, n, V] float32 of a certificate's sequences, computed in 16 bits.

    Raises:
        BundleError: they are not numbers: the model overflows in float16.
    """
    model_config = checkpoint.model_config
    prompts, sources = certified_prompts(model_config, max_gamma), certified_sources(model_config)
    logits = reference_logits(checkpoint.load_as(_TYPES[precision]), prompts, sources)
    if not np.isfinite(logits).all():
        raise BundleError(
            f"{checkpoint.path.name}: PyTorch overflows in {precision}; export with --weights {BFLOAT16}"
        )
    return logits


def half_bound(
    reference: Reference, halved: FloatArray, checkpoint: Checkpoint, *, max_gamma: int
) -> Bound:
    """Return how far from the model in float32 a graph may be, where PyTorch in 16 bits answers ``halved``."""
    model_config = checkpoint.model_config
    expected = reference.logits(
        certified_prompts(model_config, max_gamma), certified_sources(model_config)
    )
    lost = float(np.abs(halved - expected.values).max())
    why = f"{ALLOWED_LOSS:.0f} times what PyTorch loses in 16 bits, {lost:.2g}"
    return Bound(value=ALLOWED_LOSS * lost, why=why, rounding=expected.rounding)
