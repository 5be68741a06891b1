"""The likeliest continuations of a text, read from a row of logits where it lies; beam search uses them.

A row leaves a few numbers, not its vocabulary. Log-probabilities are those of ``engines.sampling.draws.raw_logprobs``.
Bans (allowed ids, bad words, min_tokens, repeated n-grams) leave tokens out and change no other number.
"""

from __future__ import annotations

import math

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.sampling.adjust import process_logits
from outrider.engines.sampling.base import Continuations, SamplingParams
from outrider.engines.sampling.draws import in_place, log_norm
from outrider.engines.sampling.truncation import ranked_greatest


def continuations_of(
    logits: FloatArray, count: int, params: SamplingParams, history: IntArray, num_prompt: int
) -> Continuations | None:
    """Return the ``count`` likeliest tokens of one row, of equals the lower ids; fewer where fewer can follow.

    Args:
        logits: [V] float32.
        count: at least 1.
        params: of its processors only those that ban are meant; temperature and truncation are not read.
        history: [n] int64, the text that the row follows.
        num_prompt: leading tokens of it that are prompt.

    Returns:
        Best first; None where the row is not finite.
    """
    if not math.isfinite(float(logits.max())):
        return None
    logits = in_place(logits)
    allowed = process_logits(logits, params, history, num_prompt)
    ids = ranked_greatest(allowed, min(count, len(allowed)))
    ids = ids[np.isfinite(allowed[ids])]
    return Continuations(tokens=ids, log_probs=logits[ids].astype(np.float64) - log_norm(logits))
