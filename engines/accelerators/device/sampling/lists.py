"""The lists of sampling parameters and histories as padded arrays; see ``tensors``.

Every list is at least one entry long, so that no array is empty, and as long as a power of two, so
that the shapes of steps repeat; ids at or beyond V are left out, so that a smaller draft vocabulary
may share the target's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.base import IntArray
from outrider.engines.sampling.base import SamplingParams, SamplingRow

# Which token would repeat an n-gram depends on all of the history and on draft tokens that only the device knows.
NGRAMS = "no_repeat_ngram_size: the sampler's kernels do not look for repeated n-grams"
SIGMA = "top_n_sigma: the sampler's kernels do not measure the deviation of logits"
_Lists = dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]
_Pairs = list[tuple[int, float]]


def describe_lists(rows: Sequence[SamplingRow], num_rows: int, *, vocab_size: int) -> _Lists:
    """All lists of a batch; rows not among ``rows`` have empty ones."""
    seen: list[_Pairs] = [[] for _ in range(num_rows)]
    biases: list[_Pairs] = [[] for _ in range(num_rows)]
    allowed: list[Sequence[int]] = [()] * num_rows
    ends: list[Sequence[int]] = [()] * num_rows
    words: list[Sequence[tuple[int, ...]]] = [()] * num_rows
    for row in rows:
        params = row.params
        seen[row.index] = _seen(row)
        summed: dict[int, float] = {}
        for token, bias in params.logit_bias:
            summed[token] = summed.get(token, 0.0) + bias
        biases[row.index] = list(summed.items())
        allowed[row.index] = params.allowed_token_ids
        ends[row.index] = params.end_token_ids if params.min_tokens > 0 else ()
        words[row.index] = [word for word in params.bad_words if word and word[-1] < vocab_size]
    seen_ids, seen_counts = _pairs(seen, vocab_size)
    bias_ids, bias_values = _pairs(biases, vocab_size)
    return {
        names.SEEN_IDS: seen_ids,
        names.SEEN_COUNTS: seen_counts,
        names.BIAS_IDS: bias_ids,
        names.BIAS_VALUES: bias_values,
        names.ALLOWED_IDS: _ids(allowed, vocab_size),
        names.END_IDS: _ids(ends, vocab_size),
        **_words(rows, words, vocab_size),
    }


def padded_length(length: int) -> int:
    """Length of a list's array: the next power of two, 1 for an empty list."""
    return 1 << max(0, length - 1).bit_length()


def why_not(params: SamplingParams) -> str:
    """Say which of these parameters the kernels do not have; empty where they have all."""
    if params.no_repeat_ngram_size > 0:
        return NGRAMS
    return SIGMA if params.top_n_sigma > 0.0 else ""


def _seen(row: SamplingRow) -> _Pairs:
    """Distinct tokens of the history with 1 + how often the output has them, if that matters."""
    params = row.params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
    if not any(penalties):
        return []
    tokens, counts = np.unique(row.history[row.num_prompt :], return_counts=True)
    in_output = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
    return [(t, 1.0 + in_output.get(t, 0)) for t in np.unique(row.history).tolist()]


def _ids(lists: Sequence[Sequence[int]], vocab_size: int) -> IntArray:
    longest = padded_length(max(map(len, lists)))
    ids = np.full((len(lists), longest), vocab_size, dtype=np.int64)
    for row, entries in enumerate(lists):
        known = [entry for entry in entries if 0 <= entry < vocab_size]
        ids[row, : len(known)] = known
    return ids


def _pairs(lists: Sequence[_Pairs], vocab_size: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    known = [[pair for pair in pairs if 0 <= pair[0] < vocab_size] for pairs in lists]
    ids = _ids([[token for token, _ in pairs] for pairs in known], vocab_size)
    values = np.zeros(ids.shape, dtype=np.float32)
    for row, pairs in enumerate(known):
        values[row, : len(pairs)] = [value for _, value in pairs]
    return ids, values


def _words(
    rows: Sequence[SamplingRow], words: Sequence[Sequence[tuple[int, ...]]], vocab_size: int
) -> _Lists:
    """Bad words by their last token and what must come before it, and the end of the outputs."""
    lasts = _ids([[word[-1] for word in of_row] for of_row in words], vocab_size)
    length = padded_length(max((len(word) - 1 for of_row in words for word in of_row), default=1))
    prefixes = np.full((*lasts.shape, length), names.NO_TOKEN, dtype=np.int64)
    recent = np.full((len(words), length), names.NO_HISTORY, dtype=np.int64)
    for index, of_row in enumerate(words):
        for column, word in enumerate(of_row):
            prefixes[index, column, length - len(word) + 1 :] = word[:-1]
    for row in rows:
        output = row.history[row.num_prompt :][-length:]
        recent[row.index, length - len(output) :] = output
    return {names.BAD_PREFIXES: prefixes, names.BAD_LASTS: lasts, names.RECENT: recent}
