"""A corpus of tokens with all its suffixes sorted, on disk and memory-mapped.

``tokens.npy`` holds the texts end to end, a separator (the vocabulary size) after each;
``suffixes.npy`` the positions of all tokens in the order of what follows there, compared over
``SORTED_DEPTH`` tokens; ``keys.npy`` the first tokens of each suffix packed into one integer, so
that most of a search is one binary search over a plain array.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from outrider.engines.base import BundleError, IntArray

SORTED_DEPTH = 32
KEY_BITS = 63
COUNTED_TOGETHER = 1 << 22
"""Tokens."""
FORMAT = 1
MANIFEST = "datastore.json"
ARRAYS = {"tokens": np.int32, "suffixes": np.int32, "keys": np.int64}


@dataclass(frozen=True, slots=True)
class Datastore:
    """A searchable corpus.

    Attributes:
        tokens: [n] int32; ``vocab_size`` separates texts.
        suffixes: [n] int32, positions in sorted order.
        keys: [n] int64 ascending: ``key_tokens`` tokens of each suffix, each plus one, 0 beyond the
            end.
    """

    tokens: npt.NDArray[np.int32]
    suffixes: npt.NDArray[np.int32]
    keys: IntArray
    vocab_size: int

    @classmethod
    def open(cls, root: Path, *, vocab_size: int) -> Self:
        """Map a datastore that ``write_datastore`` made.

        Raises:
            BundleError: it is not one, or was made for another vocabulary.
        """
        try:
            manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
            arrays = {name: np.load(root / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
            found = (manifest["format"], manifest["vocab_size"], manifest["num_tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"datastore {root.name}: cannot be read") from error
        if found[0] != FORMAT or found[1] != vocab_size:
            raise BundleError(f"datastore {root.name}: made for another format or vocabulary")
        for name, dtype in ARRAYS.items():
            if arrays[name].shape != (found[2],) or arrays[name].dtype != dtype:
                raise BundleError(f"datastore {root.name}: {name} has the wrong shape or type")
        # Plain views of the maps: the subclass costs a microsecond per access.
        return cls(
            tokens=arrays["tokens"].view(np.ndarray),
            suffixes=arrays["suffixes"].view(np.ndarray),
            keys=arrays["keys"].view(np.ndarray),
            vocab_size=vocab_size,
        )

    def find(self, pattern: Sequence[int]) -> range:
        """Return indices into ``suffixes`` of all occurrences of a pattern.

        Args:
            pattern: 1..SORTED_DEPTH tokens of the vocabulary.
        """
        bits, num_packed = _packing(self.vocab_size)
        head = pattern[:num_packed]
        key = 0
        for token in head:
            key = (key << bits) | (token + 1)
        shift = bits * (num_packed - len(head))
        low, high = np.searchsorted(self.keys, (key << shift, (key + 1) << shift)).tolist()
        found = range(low, high)
        for depth in range(num_packed, len(pattern)):
            if not found:
                break
            found = self._narrow(found, depth, pattern[depth])
        return found

    def longest_suffix(
        self, context: Sequence[int], *, shortest: int, longest: int
    ) -> tuple[int, range]:
        """Find the longest end of ``context`` that occurs, by bisection, and its occurrences.

        Returns:
            Its length, 0 if even ``shortest`` tokens do not occur.
        """
        size, best = 0, range(0)
        low, high = shortest, min(longest, len(context), SORTED_DEPTH)
        probe = low
        while low <= high:
            found = self.find(context[len(context) - probe :])
            if found:
                size, best = probe, found
                low = probe + 1
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return size, best

    def counts(self) -> IntArray:
        """Return how often each token of the vocabulary occurs, [V] int64."""
        counts = np.zeros(self.vocab_size + 1, dtype=np.int64)
        # In parts: the library widens what it counts.
        for start in range(0, len(self.tokens), COUNTED_TOGETHER):
            part = self.tokens[start : start + COUNTED_TOGETHER]
            counts += np.bincount(part, minlength=len(counts))
        return counts[: self.vocab_size]

    def successors(self, token: int) -> tuple[IntArray, IntArray]:
        """Return the tokens that follow a token anywhere, ascending, and how often each does, [n] int64 both.

        Suffixes that begin with the token lie together, sorted by what follows it: the counts are the lengths of runs.
        """
        bits, num_packed = _packing(self.vocab_size)
        assert num_packed >= 2, "a token of a vocabulary takes less than half a key"
        found = self.find((token,))
        keys = self.keys[found.start : found.stop] >> bits * (num_packed - 2)
        seconds = (keys & ((1 << bits) - 1)) - 1
        ids, counts = np.unique(seconds, return_counts=True)
        # Neither the end of the corpus, -1, nor a separator is a token.
        is_token = (ids >= 0) & (ids < self.vocab_size)
        return ids[is_token], counts[is_token]

    def _narrow(self, found: range, depth: int, token: int) -> range:
        tokens, suffixes, num_tokens = self.tokens, self.suffixes, len(self.tokens)

        def at(index: int) -> int:
            position = int(suffixes[index]) + depth
            return int(tokens[position]) if position < num_tokens else -1

        low = bisect_left(found, token, key=at)
        high = bisect_right(found, token, lo=low, key=at)
        return found[low:high]


def sort_suffixes(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return positions [n] int32 in the order of the ``SORTED_DEPTH`` tokens that follow, ties by position.

    Prefix doubling: ranks of length 2k come from pairs of ranks of length k.
    """
    num_tokens = len(tokens)
    rank = tokens.astype(np.int64) + 1
    depth = 1
    while depth < SORTED_DEPTH and num_tokens:
        behind = np.zeros(num_tokens, dtype=np.int64)
        behind[:-depth] = rank[depth:]
        _, inverse = np.unique(rank * (int(rank.max()) + 1) + behind, return_inverse=True)
        rank = inverse.astype(np.int64) + 1
        depth *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def write_datastore(texts: Iterable[Sequence[int]], out: Path, *, vocab_size: int) -> int:
    """Build a datastore from tokenised texts; it appears at ``out`` whole or not at all.

    Returns:
        Tokens written.

    Raises:
        BundleError: the place is taken, or there is nothing to write.
    """
    if out.exists():
        raise BundleError(f"datastore {out.name}: exists already")
    pieces = [np.array([*text, vocab_size], dtype=np.int32) for text in texts if len(text)]
    if not pieces:
        raise BundleError("datastore: no text has a token")
    tokens = np.concatenate(pieces)
    suffixes = sort_suffixes(tokens)
    bits, num_packed = _packing(vocab_size)
    padded = np.concatenate([tokens.astype(np.int64) + 1, np.zeros(num_packed, np.int64)])
    keys = np.zeros(len(tokens), dtype=np.int64)
    for depth in range(num_packed):
        keys = (keys << bits) | padded[suffixes + depth]
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.new")
    unfinished.mkdir(parents=True)
    try:
        for name, array in (("tokens", tokens), ("suffixes", suffixes), ("keys", keys)):
            np.save(unfinished / f"{name}.npy", array)
        manifest = {"format": FORMAT, "vocab_size": vocab_size, "num_tokens": len(tokens)}
        (unfinished / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return len(tokens)


def _packing(vocab_size: int) -> tuple[int, int]:
    """Return the bits of one token, separators and the end included, and how many tokens a key holds."""
    bits = (vocab_size + 1).bit_length()
    return bits, min(KEY_BITS // bits, SORTED_DEPTH)
