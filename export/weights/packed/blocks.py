"""Weights that the checkpoint has packed (``matrices``), stored as they are: no integer, scale or zero point changes.

Requires a canonical graph whose float32 weights are what the packed ones stand for. Each constant is found again by
its columns among the packed weights, alone or several side by side, so that no name and no architecture is known.
Ensures DequantizeLinear in blocks of the very integers instead. Equal zero points in the middle of the range are left
away, as signed integers say the same.

A block is a part of a group and repeats its scale: longer blocks give a row other bits beside others (``blocks``).
Where groups are not runs of rows, rows are stored in the order of their groups, and a Gather orders what they multiply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.engines.base import BundleError, FloatArray
from outrider.export.graph.edits import drop_unused, put
from outrider.export.progress import Steps
from outrider.export.weights.blocks import (
    Blocks,
    constant_weight,
    replace_weight,
    split_gemms,
)
from outrider.export.weights.packed.matrices import PackedFiles, PackedLayout, PackedMatrix
from outrider.export.weights.widened import canonical_graphs, load_widened, save_over

# The first that every group is made of; see ``blocks``.
_BLOCK_SIZES = {8: (64, 32, 16), 4: (32, 16)}


def keep_blocks(path: Path, checkpoint: Path, layout: PackedLayout, report: Steps) -> int:
    """Rewrite the canonical graph at ``path`` with the weights of a packed checkpoint; return how many products.

    ``path``.data is replaced too, and ``encode.onnx`` beside it, if there is one, is rewritten likewise.

    Args:
        path: of the canonical graph.
        checkpoint: its folder.
        layout: of the checkpoint.
        report: called with how many packed weights were read, and of how many.

    Raises:
        BundleError: a packed weight is not that of a product, or its groups cannot be stored.
    """
    total = 0
    with PackedFiles(checkpoint, layout) as files:
        known = _Known(files, report)
        for one in canonical_graphs(path):
            model = load_widened(one)
            split_gemms(model.graph)
            total += _keep(model.graph, known, layout.bits, checkpoint.name)
            save_over(model, one)
        left = known.unused()
    if left:
        raise BundleError(
            f"{checkpoint.name}: {left[0]} is packed, but no product of the graph has its weight as it is"
            f" ({len(left)} of {len(known.names)}); export with --weights float32"
        )
    return total


class _Known:
    """The packed weights of a checkpoint, found by their columns; each is unpacked again whenever it is compared."""

    def __init__(self, files: PackedFiles, report: Steps) -> None:
        self._files = files
        self._by_column: dict[bytes, list[str]] = defaultdict(list)
        self._used: set[str] = set()
        self.names = files.names()
        for index, name in enumerate(self.names, start=1):
            first = files.matrix(name).weight()[:, 0]
            self._by_column[first.tobytes()].append(name)
            report(index, len(self.names))

    def parts_of(self, weight: FloatArray) -> list[PackedMatrix]:
        """Return the packed weights that stand side by side in a weight [K, N]; none if it has any other column."""
        found, names, at = [], [], 0
        while at < weight.shape[1]:
            for name in self._by_column.get(weight[:, at].tobytes(), ()):
                matrix = self._files.matrix(name)
                width = matrix.integers.shape[1]
                if np.array_equal(matrix.weight(), weight[:, at : at + width]):
                    break
            else:
                return []
            found.append(matrix)
            names.append(name)
            at += width
        self._used.update(names)
        return found

    def unused(self) -> list[str]:
        """Return the names of those that were not found."""
        return [name for name in self.names if name not in self._used]


def _keep(graph: ir.Graph, known: _Known, bits: int, where: str) -> int:
    count = 0
    for node in list(graph.all_nodes()):
        weight = constant_weight(node.inputs[1]) if node.op_type == "MatMul" else None
        parts = [] if weight is None else known.parts_of(weight)
        if not parts:
            continue
        order = np.argsort(parts[0].groups, kind="stable")
        try:
            stored = blocks_of(parts, order, bits)
        except ValueError as error:
            raise BundleError(f"{where}: {error}; export with --weights float32") from error
        if not np.array_equal(order, np.arange(len(order))):
            _reorder(graph, node, order, f"weight_{count}.rows")
        replace_weight(graph, node, stored, f"weight_{count}")
        count += 1
    drop_unused(graph)
    return count


def blocks_of(parts: Sequence[PackedMatrix], order: npt.NDArray[np.int64], bits: int) -> Blocks:
    """Return packed weights side by side as blocks along rows in another order.

    Raises:
        ValueError: their rows cannot be cut so that each block is of one group.
    """
    groups = [part.groups[order] for part in parts]
    if any(not np.array_equal(one, groups[0]) for one in groups):
        raise ValueError("weights that read one input order their rows in different ways")
    size = next((size for size in _BLOCK_SIZES[bits] if _has_blocks(groups[0], size)), None)
    if size is None:
        raise ValueError(f"groups of {np.bincount(groups[0]).min()} rows have no blocks of 16")
    chosen = groups[0][::size]
    integers = np.concatenate([part.integers[order] for part in parts], axis=1)
    scales = np.concatenate([part.scales[chosen] for part in parts], axis=1)
    zero_points = np.concatenate([part.zero_points[chosen] for part in parts], axis=1)
    middle = 1 << (bits - 1)
    if (zero_points == middle).all():
        signed = (integers - np.uint8(middle)).view(np.int8)
        return Blocks(signed, scales, bits)
    return Blocks(integers, scales, bits, zero_points)


def _has_blocks(groups: npt.NDArray[np.int64], size: int) -> bool:
    if len(groups) % size:
        return False
    blocks = groups.reshape(-1, size)
    return bool((blocks == blocks[:, :1]).all())


def _reorder(graph: ir.Graph, node: ir.Node, order: npt.NDArray[np.int64], name: str) -> None:
    left = node.inputs[0]
    assert left is not None
    places = put(graph, order.astype(np.int64), name)
    gathered = ir.node("Gather", [left, places], attributes={"axis": -1})
    made = gathered.outputs[0]
    made.name, made.type, made.shape = f"{name}.ordered", left.type, left.shape
    graph.insert_before(node, gathered)
    node.replace_input_with(0, made)
