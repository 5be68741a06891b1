"""Comparison of the tree graphs with the checkpoint: the tree cases of a bundle's certificate.

PyTorch computes a tree in one pass over the whole sequence under an explicit 4-dimensional mask and positions, and
a kept path as the plain sequence of its tokens. The graphs compute as they serve, over one cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.engines.trees import path_to, tree_layout
from outrider.export.certificate.feeds import GraphFeeds, Sources
from outrider.export.certificate.graph_runner import GraphRunner, open_graph
from outrider.export.certificate.parity import (
    Bound,
    CaseResult,
    compare_logits,
    judged,
)
from outrider.export.certificate.parity_cases import (
    draw_sources,
    draw_tokens,
    most_source_columns,
)
from outrider.export.certificate.reference import Logits, LongText, Reference
from outrider.export.certificate.window_cases import long_text, start_behind
from outrider.export.model_config import ModelConfig
from transformers import PreTrainedModel

# Cached tokens of each row before its tree: ragged, one row without any.
_STARTS = (9, 0, 5)
# Of each row.
_SOURCE_LENGTHS = (11, 17, 5)
_NUM_AFTER = 4
# Of a tree across the edge of a window.
_MOST_WINDOW_NODES = 8
# Of a graph for chains, those beside it that verify trees and keep their paths.
TREE_FILES: Mapping[str, tuple[str, str]] = {
    names.MODEL_FILE: (names.TREE_FILE, names.KEEP_PATH_FILE),
    names.DEVICE_FILE: (names.DEVICE_TREE_FILE, names.DEVICE_KEEP_PATH_FILE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """A random tree behind a random text, of one row."""

    text: IntArray
    tokens: IntArray
    parents: tuple[int, ...]
    after: IntArray
    source: Sources | None

    def path(self) -> tuple[int, ...]:
        """Return the path to the deepest token, the last of them if there are several."""
        depths = tree_layout(self.parents).depths
        deepest = len(depths) - 1 - int(depths[::-1].argmax())
        return path_to(deepest, self.parents)

    def expected(self, reference: Reference) -> Logits:
        """Return the reference's logits [nodes, V] of the tree."""
        whole = reference.tree([*self.text, *self.tokens], self.parents, self.source)
        return whole[len(self.text) :]

    def expected_after(self, reference: Reference) -> Logits:
        """Return the reference's logits of what comes behind the deepest path."""
        kept = self.tokens[list(self.path())]
        whole = reference.logits(np.concatenate([self.text, kept, self.after])[None], self.source)
        return whole[0, -_NUM_AFTER:]


def check_tree_parity(
    model: PreTrainedModel | Reference,
    path: Path,
    model_config: ModelConfig,
    *,
    max_tree_nodes: int,
    bound: Bound | None,
    seed: int = 0,
) -> Mapping[str, object]:
    """Return the certificate of the tree graphs beside ``path``, the canonical graph or the accelerators'.

    The model is the reference. Without a bound differences are recorded and not judged.

    Raises:
        BundleError: a case lies beyond the bound, or is not a number.
    """
    reference = model if isinstance(model, Reference) else Reference(model)
    trees = random_trees(model_config, max_tree_nodes, seed)
    tree, keep = TREE_FILES[path.name]
    # Behind the deepest path, which may be the whole tree, comes a chain.
    capacity = max(_STARTS) + len(trees[0].tokens) + _NUM_AFTER
    runner = _TreeRunner(path, model_config, num_rows=len(trees), capacity=capacity)
    masked = _check_masks(reference, runner, trees)
    kept = _check_kept_paths(reference, runner, trees)
    certificate = {
        "tree_masks": judged("tree_masks", masked, path.with_name(tree), bound),
        "tree_paths": judged("tree_paths", kept, path.with_name(keep), bound),
    }
    if (beyond := window_tree(model_config, max_tree_nodes, seed)) is not None:
        found = compare_logits(beyond.run(runner), beyond.expected(reference))
        certificate["tree_window"] = judged("tree_window", [found], path.with_name(tree), bound)
    return certificate


def prepare_tree_parity(
    reference: Reference, model_config: ModelConfig, *, max_tree_nodes: int, seed: int = 0
) -> None:
    """Compute all that ``check_tree_parity`` asks of a reference."""
    for tree in random_trees(model_config, max_tree_nodes, seed):
        tree.expected(reference)
        tree.expected_after(reference)
    if (beyond := window_tree(model_config, max_tree_nodes, seed)) is not None:
        beyond.expected(reference)


def random_trees(model_config: ModelConfig, max_tree_nodes: int, seed: int) -> list[_Tree]:
    """Return a tree behind a text of each length."""
    generator = np.random.default_rng(seed)
    num_nodes = min(max_tree_nodes, model_config.max_position - max(_STARTS) - _NUM_AFTER)
    return [
        _random_tree(
            generator, start, num_nodes, model_config, draw_sources(model_config, [length], seed)
        )
        for start, length in zip(_STARTS, _SOURCE_LENGTHS, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowTree:
    """A random tree across the edge of a window."""

    behind: LongText
    tree: _Tree

    def run(self, runner: _TreeRunner) -> FloatArray:
        """Return a graph's logits [nodes, V]."""
        start_behind(runner.chains, self.behind, len(self.tree.tokens))
        start = np.array([self.behind.past], np.int64)
        logits: FloatArray = runner.extend(self.tree.tokens[None], start, [self.tree.parents])[0]
        return logits

    def expected(self, reference: Reference) -> Logits:
        """Return the reference's logits [nodes, V]."""
        return reference.tree_behind(self.behind, self.tree.tokens, self.tree.parents)


def window_tree(model_config: ModelConfig, max_tree_nodes: int, seed: int) -> _WindowTree | None:
    """Return a tree whose root is the last token that sees the whole text; None without a window."""
    if model_config.window is None:
        return None
    text = long_text(model_config, seed, model_config.window - 1)
    num_nodes = min(max_tree_nodes, _MOST_WINDOW_NODES, model_config.max_position - text.past)
    tree = _random_tree(np.random.default_rng(seed), 0, num_nodes, model_config, None)
    return _WindowTree(behind=text, tree=tree)


class _TreeRunner:
    """A model's three graphs over the same caches; for checks, not for serving."""

    def __init__(
        self, path: Path, model_config: ModelConfig, *, num_rows: int, capacity: int
    ) -> None:
        self.chains = GraphRunner(
            path,
            model_config,
            batch=num_rows,
            capacity=capacity,
            source_capacity=most_source_columns(model_config),
        )
        self._tree, self._keep = (
            open_graph(path.with_name(name)) for name in TREE_FILES[path.name]
        )
        self._feeds = GraphFeeds(self._tree, model_config)

    def extend(
        self, tokens: IntArray, start: IntArray, parents: list[tuple[int, ...]]
    ) -> FloatArray:
        """Return logits [B, T, V] of one tree [T] per row behind ``start`` [B] int64."""
        layouts = [tree_layout(row) for row in parents]
        feeds = self._feeds.span(tokens, start, capacity=self.chains.capacity)
        trees = {
            names.POSITIONS: start[:, None] + np.stack([one.depths for one in layouts]),
            names.ANCESTORS: np.stack([one.ancestors for one in layouts]),
        }
        return self.chains.run(self._tree, {**feeds, **trees})

    def keep(self, row: int, start: int, path: tuple[int, ...]) -> None:
        """Move the cache rows of a path of the last tree behind ``start``."""
        caches = self.chains.caches
        feeds = {
            names.START: np.array([start], np.int64),
            names.COLUMNS: start + np.array(path, np.int64),
        }
        held = {name: cache[row : row + 1] for name, cache in caches.items()}
        for cache, moved in zip(caches.values(), self._keep.run(None, feeds | held), strict=True):
            cache[row] = moved[0]


def _random_tree(
    generator: np.random.Generator,
    start: int,
    num_nodes: int,
    model_config: ModelConfig,
    source: Sources | None,
) -> _Tree:
    """Draw parents among the last few tokens: branches of many depths, siblings and long paths."""
    parents = tuple(
        int(generator.integers(max(0, index - 4), index + 1)) for index in range(num_nodes - 1)
    )
    tokens = draw_tokens(model_config, generator, (start + num_nodes + _NUM_AFTER,))
    text, nodes, after = np.split(tokens, [start, start + num_nodes])
    return _Tree(text=text, tokens=nodes, parents=parents, after=after, source=source)


def _check_masks(reference: Reference, runner: _TreeRunner, trees: list[_Tree]) -> list[CaseResult]:
    """Extend by texts, padded to the longest; then compare every row's tree in one call."""
    runner.chains.read(_together([tree.source for tree in trees]))
    longest = max(_STARTS)
    texts = np.stack([np.resize(np.append(tree.text, 0), longest) for tree in trees])
    runner.chains.extend(texts, np.zeros(len(trees), np.int64))
    tokens = np.stack([tree.tokens for tree in trees])
    start = np.array([len(tree.text) for tree in trees], np.int64)
    answered = runner.extend(tokens, start, [tree.parents for tree in trees])
    pairs = zip(answered, trees, strict=True)
    return [compare_logits(row, tree.expected(reference)) for row, tree in pairs]


def _together(sources: list[Sources | None]) -> Sources | None:
    """Return the sources of all rows in one call; None where there are none."""
    rows = [one for one in sources if one is not None]
    if not rows:
        return None
    longest = max(one.tokens.shape[1] for one in rows)
    tokens = [np.resize(one.tokens[0], longest) for one in rows]
    return Sources(tokens=np.stack(tokens), lengths=np.concatenate([one.lengths for one in rows]))


def _check_kept_paths(
    reference: Reference, runner: _TreeRunner, trees: list[_Tree]
) -> list[CaseResult]:
    """Keep the deepest path of every tree, and compare a chain behind it."""
    lengths = []
    for row, tree in enumerate(trees):
        path = tree.path()
        runner.keep(row, len(tree.text), path)
        lengths.append(len(tree.text) + len(path))
    after = np.stack([tree.after for tree in trees])
    answered = runner.chains.extend(after, np.array(lengths, np.int64))
    pairs = zip(answered, trees, strict=True)
    return [compare_logits(row, tree.expected_after(reference)) for row, tree in pairs]
