"""Whether a drafter pays on this machine: the least acceptance at which it does, beside what was seen."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_TRIALS = 32.0
"""Draft tokens, judged of late, from which on their share that was kept is spoken of."""
_HALVINGS = 30


def least_alpha(step_s: Sequence[float]) -> float | None:
    """Return the least acceptance at which drafts of some length are faster than none; None where not even 1 is.

    Args:
        step_s: seconds of a step by its draft tokens, 0 to G.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Theorem 3.8, with measured costs.
    """

    def pays(alpha: float) -> bool:
        tokens, kept = 1.0, 1.0
        for seconds in step_s[1:]:
            kept *= alpha
            tokens += kept
            if tokens * step_s[0] > seconds:
                return True
        return False

    low, high = 0.0, 1.0
    if not pays(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def verdict_words(drafter: str, alpha: float | None, least: float | None) -> str:
    """Return in words whether a drafter pays.

    Args:
        drafter: its name.
        alpha: share of its tokens that was kept; None where too few were judged.
        least: share at which it pays; None where none is enough.
    """
    if least is None:
        return f"{drafter} loses here, however many of its tokens are kept"
    if alpha is None:
        return f"{drafter} pays from alpha {least:.2f} on"
    if alpha < least:
        return f"{drafter} loses here: alpha {alpha:.2f}, would need {least:.2f}; off unless gamma is fixed"
    return f"{drafter} pays here: alpha {alpha:.2f}, needs {least:.2f}"
