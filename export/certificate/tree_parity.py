"""The exported tree graphs against the checkpoint: the tree cases of a bundle's certificate.

PyTorch answers a tree in one pass over the whole sequence under an explicit 4-dimensional mask and
explicit positions; a kept path it answers as the plain sequence that the path spells. The graphs
answer as they serve: chains by ``model.onnx``, trees by ``tree.onnx``, over one cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import manifest as bundle
from outrider.engines.onnx.session import open_session
from outrider.engines.reference.torch_engine import tree_logits
from outrider.engines.trees import path_to, tree_layout
from outrider.export.certificate.parity import (
    FLOAT32_TOLERANCE,
    CaseResult,
    compare_logits,
    judged,
    reference_logits,
)
from outrider.export.checkpoint import ModelFacts
from transformers import PreTrainedModel

# Cached tokens of each row before its tree: ragged, one row without any.
_STARTS = (9, 0, 5)
_NUM_AFTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """A random tree behind a random text, of one row."""

    text: IntArray
    tokens: IntArray
    parents: tuple[int, ...]
    after: IntArray

    def path(self) -> tuple[int, ...]:
        """From the root to the deepest token, the last of them if there are several."""
        depths = tree_layout(self.parents).depths
        deepest = len(depths) - 1 - int(depths[::-1].argmax())
        return path_to(deepest, self.parents)


def check_tree_parity(
    model: PreTrainedModel,
    path: Path,
    facts: ModelFacts,
    *,
    max_tree_nodes: int,
    tolerance: float | None = FLOAT32_TOLERANCE,
    seed: int = 0,
) -> Mapping[str, object]:
    """Certificate of the tree graphs beside ``path``: masks, and the path kept after them.

    Args:
        model: the checkpoint's model, the reference.
        path: the canonical graph, ``model.onnx``.
        facts: of the model.
        max_tree_nodes: tokens of the largest tree; at least 2.
        tolerance: greatest difference allowed; None records without judging.
        seed: of the random trees.

    Raises:
        BundleError: a case lies beyond the tolerance, or is not a number.
    """
    generator = np.random.default_rng(seed)
    num_nodes = min(max_tree_nodes, facts.max_position - max(_STARTS) - _NUM_AFTER)
    trees = [_random_tree(generator, start, num_nodes, facts.vocab_size) for start in _STARTS]
    # Behind the deepest path, which may be the whole tree, comes a chain.
    capacity = max(_STARTS) + num_nodes + _NUM_AFTER
    runner = _TreeRunner(path, facts, num_rows=len(trees), capacity=capacity)
    masked = _check_masks(model, runner, trees)
    kept = _check_kept_paths(model, runner, trees)
    return {
        "tree_masks": judged("tree_masks", masked, path.with_name(bundle.TREE_FILE), tolerance),
        "tree_paths": judged("tree_paths", kept, path.with_name(bundle.KEEP_PATH_FILE), tolerance),
    }


class _TreeRunner:
    """A model's three graphs over caches held as arrays; for checks, not for serving."""

    def __init__(self, path: Path, facts: ModelFacts, *, num_rows: int, capacity: int) -> None:
        self._chain = open_session(path, copies_caches=True)
        self._tree = open_session(path.parent / bundle.TREE_FILE, copies_caches=True)
        self._keep = open_session(path.parent / bundle.KEEP_PATH_FILE, copies_caches=True)
        shape = (num_rows, facts.num_kv_heads, capacity, facts.head_size)
        layers = range(facts.num_layers)
        names = [*map(bundle.key_name, layers), *map(bundle.value_name, layers)]
        # Not zeros: whatever lies beyond a row's length must not be seen.
        self._caches = {name: np.full(shape, 7.0, np.float32) for name in names}

    def extend(
        self, tokens: IntArray, start: IntArray, parents: list[tuple[int, ...]] | None = None
    ) -> FloatArray:
        """Logits [B, T, V] of T tokens per row behind start [B] int64: chains, or trees.

        Args:
            tokens: [B, T] int64.
            start: [B] int64.
            parents: one tree per row; None for chains.
        """
        columns = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.int64)
        feeds = {bundle.TOKENS: tokens, bundle.START: start, bundle.LOGIT_POSITIONS: columns}
        session = self._chain
        if parents is not None:
            session = self._tree
            layouts = [tree_layout(row) for row in parents]
            feeds[bundle.POSITIONS] = start[:, None] + np.stack([one.depths for one in layouts])
            feeds[bundle.ANCESTORS] = np.stack([one.ancestors for one in layouts])
        logits, *caches = session.run(None, feeds | self._caches)
        self._caches = self._renamed(session, caches)
        return logits  # type: ignore[no-any-return]

    def keep(self, row: int, start: int, path: tuple[int, ...]) -> None:
        """Move the cache rows of a path of the last tree behind ``start``."""
        feeds = {
            bundle.START: np.array([start], np.int64),
            bundle.COLUMNS: start + np.array(path, np.int64),
        }
        held = {name: cache[row : row + 1] for name, cache in self._caches.items()}
        moved = self._renamed(self._keep, self._keep.run(None, feeds | held))
        for name, cache in moved.items():
            self._caches[name][row] = cache[0]

    def _renamed(self, session: object, caches: list[FloatArray]) -> dict[str, FloatArray]:
        outputs = [one.name for one in session.get_outputs()]  # type: ignore[attr-defined]
        present = [name for name in outputs if name != bundle.LOGITS]
        return {
            name.removeprefix("new_"): cache for name, cache in zip(present, caches, strict=True)
        }


def _random_tree(
    generator: np.random.Generator, start: int, num_nodes: int, vocab_size: int
) -> _Tree:
    """Parents among the last few tokens: branches of many depths, siblings and long paths."""
    parents = tuple(
        int(generator.integers(max(0, index - 4), index + 1)) for index in range(num_nodes - 1)
    )
    tokens = generator.integers(0, vocab_size, start + num_nodes + _NUM_AFTER, dtype=np.int64)
    text, nodes, after = np.split(tokens, [start, start + num_nodes])
    return _Tree(text=text, tokens=nodes, parents=parents, after=after)


def _check_masks(
    model: PreTrainedModel, runner: _TreeRunner, trees: list[_Tree]
) -> list[CaseResult]:
    """Texts first, padded to the longest; then every row's tree in one call."""
    longest = max(_STARTS)
    texts = np.stack([np.resize(np.append(tree.text, 0), longest) for tree in trees])
    runner.extend(texts, np.zeros(len(trees), np.int64))
    tokens = np.stack([tree.tokens for tree in trees])
    start = np.array([len(tree.text) for tree in trees], np.int64)
    answered = runner.extend(tokens, start, [tree.parents for tree in trees])
    results = []
    for row, tree in enumerate(trees):
        whole = tree_logits(model, [*tree.text, *tree.tokens], tree.parents)
        results.append(compare_logits(answered[row], whole[len(tree.text) :]))
    return results


def _check_kept_paths(
    model: PreTrainedModel, runner: _TreeRunner, trees: list[_Tree]
) -> list[CaseResult]:
    """The deepest path of every tree is kept and followed by a chain."""
    lengths, histories = [], []
    for row, tree in enumerate(trees):
        path = tree.path()
        runner.keep(row, len(tree.text), path)
        lengths.append(len(tree.text) + len(path))
        histories.append(np.concatenate([tree.text, tree.tokens[list(path)]]))
    after = np.stack([tree.after for tree in trees])
    start = np.array(lengths, np.int64)
    answered = runner.extend(after, start)
    results = []
    for row, history in enumerate(histories):
        whole = reference_logits(model, np.concatenate([history, after[row]])[None])[0]
        results.append(compare_logits(answered[row], whole[-_NUM_AFTER:]))
    return results
