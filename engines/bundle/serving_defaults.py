"""Drafting defaults of a bundle, found by measuring it: part of its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engines.bundle.fields import FieldReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDefaults:
    """Drafting of requests for which neither the request nor the operator chooses.

    Attributes:
        drafter: name; "none" where drafting was not found to pay.
        gamma: draft tokens per step; None lets the server choose step by step.
        phrase_length: tokens of a phrase; None where the drafter has no phrases.
        num_phrases: phrases tried per step; None where the drafter tries none.
        window: columns of the lookahead window; None where the drafter has none.
        source: who found it, and on what.
    """

    drafter: str
    gamma: int | None
    phrase_length: int | None = None
    num_phrases: int | None = None
    window: int | None = None
    source: str = ""


def read_serving_defaults(reader: FieldReader) -> ServingDefaults | None:
    """Return those of a manifest; None for a bundle that was never tuned.

    Raises:
        BundleError: a field is missing or of the wrong kind, named.
    """
    if reader.values.get("serving") is None:
        return None
    section = reader.section("serving")
    return ServingDefaults(
        drafter=section.text("drafter"),
        gamma=section.optional_count("gamma"),
        phrase_length=section.optional_count("phrase_length"),
        num_phrases=section.optional_count("num_phrases"),
        # Bundles tuned before there was a window do not say.
        window=section.optional_count("window") if "window" in section.values else None,
        source=section.text("source"),
    )
