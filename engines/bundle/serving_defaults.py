"""Drafting defaults of a bundle, found by measuring it: part of its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engines.bundle.fields import Size, Text


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

    drafter: Text
    gamma: Size | None
    phrase_length: Size | None = None
    num_phrases: Size | None = None
    window: Size | None = None
    source: Text = ""
