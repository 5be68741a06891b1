"""The registry of drafters: one line each."""

from __future__ import annotations

from runtime.drafters.base import Drafter, DrafterParts
from runtime.drafters.lookup import LookupDrafter
from runtime.drafters.model import ModelDrafter
from runtime.drafters.none import NoDrafter

__all__ = ["DRAFTER_NAMES", "build_drafters"]

DRAFTER_NAMES = ("none", "lookup", "model")


def build_drafters(parts: DrafterParts) -> dict[str, Drafter]:
    """Every drafter these parts allow, by name; "model" only where there is a draft model."""
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "lookup": LookupDrafter(min_ngram=parts.min_ngram, max_ngram=parts.max_ngram),
    }
    if parts.draft is not None:
        drafters["model"] = ModelDrafter(
            parts.draft, parts.sampler, target_vocab_size=parts.vocab_size, chunk=parts.chunk
        )
    return drafters
