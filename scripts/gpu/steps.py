"""Single tokens against one span: what decoding reads of its own steps' cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from outrider.engines.base import Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.opening import open_engine

from scripts.gpu.parity import Part

NUM_STEPS = 64
# Of logits up to some 10, in 16 bits; a wrong token or position moves them by 1.
ALLOWED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCheck:
    """Logits of a text by single tokens against those of one span.

    Attributes:
        part: which model.
        num_steps: tokens fed one by one.
        first_wrong: the first step whose logits differ by more than ``ALLOWED``; None where there is none.
        max_difference: of all steps' logits; None where one is not a number.
    """

    part: str
    num_steps: int
    first_wrong: int | None
    max_difference: float | None

    @property
    def has_passed(self) -> bool:
        """True where every step answers as the span does."""
        return self.first_wrong is None


def check_steps(
    bundle: Bundle, device: str, part: Part, *, provider_options: Mapping[str, str]
) -> StepsCheck:
    """Extend one slot by a random text at once and another by its tokens, each step of one shape."""
    engine = open_engine(
        bundle, part, device=device, max_batch=2, provider_options=provider_options
    )
    limits = engine.limits
    count = min(NUM_STEPS, limits.max_context, limits.max_extend)
    text = tuple(np.random.default_rng(0).integers(0, limits.vocab_size, count).tolist())
    whole = engine.extend([Span(slot=1, start=0, tokens=text, num_logits=count)])[0].copy()
    steps = [
        engine.extend([Span(slot=0, start=start, tokens=(token,), num_logits=1)])[0, 0].copy()
        for start, token in enumerate(text)
    ]
    engine.close()
    differences = np.abs(np.stack(steps) - whole[:count]).max(axis=1)
    wrong = np.flatnonzero(~(differences <= ALLOWED))
    worst = float(differences.max())
    return StepsCheck(
        part=part, num_steps=count, first_wrong=int(wrong[0]) if wrong.size else None,
        max_difference=worst if np.isfinite(worst) else None,
    )  # fmt: skip
