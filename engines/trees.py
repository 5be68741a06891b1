"""The shape of a tree of tokens: parents, depths and ancestors.

A tree is a span whose tokens need not follow one another. Token 0, the root, follows the cached
text; the parent of token i + 1 is token ``parents[i]``, an index in 0..i, so a parent always stands
before its children. A chain is the tree with parents 0, 1, 2, ...

Pure: numpy alone; knows neither tokens nor caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from outrider.engines.base import EngineError, IntArray

BoolArray = npt.NDArray[np.bool_]

# Drafters mostly repeat a few shapes; a layout of 64 nodes costs 0.1 ms to build and 5 KB to keep.
_MAX_LAYOUTS = 256


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """Inputs of attention over a tree of n tokens. Read-only: layouts are shared.

    Attributes:
        depths: [n] int64, edges to the root; a token's position is its root's plus its depth.
        ancestors: [n, n] bool, entry (i, j) true where j is i or stands above it.
    """

    depths: IntArray
    ancestors: BoolArray


@lru_cache(maxsize=_MAX_LAYOUTS)
def tree_layout(parents: tuple[int, ...]) -> TreeLayout:
    """Layout of a tree of ``len(parents) + 1`` tokens.

    Args:
        parents: of tokens 1, 2, ...; ``check_parents`` holds.
    """
    num_nodes = len(parents) + 1
    depths = np.zeros(num_nodes, dtype=np.int64)
    ancestors = np.eye(num_nodes, dtype=np.bool_)
    for node, parent in enumerate(parents, start=1):
        depths[node] = depths[parent] + 1
        ancestors[node] |= ancestors[parent]
    depths.setflags(write=False)
    ancestors.setflags(write=False)
    return TreeLayout(depths=depths, ancestors=ancestors)


def check_parents(parents: Sequence[int]) -> None:
    """Refuse parents that do not stand before their children.

    Raises:
        EngineError: naming the token.
    """
    for index, parent in enumerate(parents):
        if not 0 <= parent <= index:
            raise EngineError(f"tree: the parent of token {index + 1} must be one of 0..{index}")


def check_path(path: Sequence[int], parents: Sequence[int]) -> None:
    """Refuse a path that does not lead from the root downwards, edge by edge.

    Raises:
        EngineError: naming the rule.
    """
    if not path or path[0] != 0:
        raise EngineError("path: must begin at the root, token 0")
    for above, node in pairwise(path):
        if not 1 <= node <= len(parents) or parents[node - 1] != above:
            raise EngineError(f"path: token {node} is no child of token {above}")


def chain_length(parents: Sequence[int]) -> int:
    """Tokens from the root on that follow one another without a gap: at least 1."""
    for index, parent in enumerate(parents):
        if parent != index:
            return index + 1
    return len(parents) + 1


def path_to(node: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Tokens from the root to ``node``, both included, ascending."""
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1] - 1])
    return tuple(reversed(path))
