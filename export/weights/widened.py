"""Float32 constants whose numbers lie in 16 bits elsewhere, and graphs that keep them so.

``keep_halves`` stores such constants as they are, each behind a Cast to float32; ``load_widened`` reads the graph that
had them as float32. In between no weight is in memory: passes that rewrite a graph read, change and write one weight
at a time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE
from outrider.export.graph.edits import put_tensor
from outrider.export.progress import Steps, untold
from outrider.export.weights.stored import StoredTensor

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_KEPT = ".kept"


class WidenedTensor(ir.LazyTensor):
    """A float32 tensor made from one of 16 bits whenever it is read."""

    def __init__(self, stored: ir.TensorProtocol, name: str | None) -> None:
        super().__init__(
            lambda: ir.tensor(stored.numpy().astype(np.float32)),
            ir.DataType.FLOAT,
            ir.Shape(stored.shape.numpy()),
            name=name,
        )
        self.stored = stored


def joined(parts: Sequence[ir.TensorProtocol], name: str) -> ir.TensorProtocol:
    """Return matrices [K, N] side by side, put together whenever they are read."""
    stored = [part for part in parts if isinstance(part, StoredTensor) and part.is_turned]
    if len(stored) == len(parts):
        weights = [weight for part in stored for weight in part.weights]
        return StoredTensor(weights, is_turned=True, name=name)
    columns = sum(part.shape.numpy()[1] for part in parts)
    halves = [part.stored for part in parts if isinstance(part, WidenedTensor)]
    kinds = {half.dtype for half in halves}
    if len(halves) == len(parts) and len(kinds) == 1:
        return WidenedTensor(_side_by_side(halves, kinds.pop(), columns, None), name)
    return _side_by_side(parts, ir.DataType.FLOAT, columns, name)


def _side_by_side(
    parts: Sequence[ir.TensorProtocol], kind: ir.DataType, columns: int, name: str | None
) -> ir.LazyTensor:
    return ir.LazyTensor(
        lambda: ir.tensor(np.concatenate([part.numpy() for part in parts], axis=1), dtype=kind),
        kind,
        ir.Shape([parts[0].shape.numpy()[0], columns]),
        name=name,
    )


def keep_halves(graph: ir.Graph) -> None:
    """Store constants that lie in 16 bits so, behind a Cast to float32, at their place among the constants."""
    constants = list(graph.initializers.values())
    graph.initializers.clear()
    for value in constants:
        tensor = value.const_value
        if not isinstance(tensor, WidenedTensor):
            graph.initializers[str(value.name)] = value
            continue
        tensor.stored.name = f"{value.name}{_KEPT}"
        kept = put_tensor(graph, tensor.stored)
        node = ir.node("Cast", [kept], attributes={"to": ir.DataType.FLOAT.value})
        restored = node.outputs[0]
        restored.type, restored.shape = value.type, value.shape
        restored.name, value.name = value.name, f"{value.name}.wide"
        value.replace_all_uses_with(restored)
        graph.insert_before(graph[0], node)


def load_widened(path: Path) -> ir.Model:
    """Return the graph at ``path`` with all constants as float32; those kept in 16 bits are read when wanted."""
    model = ir.load(path)
    graph = model.graph
    constants = list(graph.initializers.values())
    graph.initializers.clear()
    for value in constants:
        name = str(value.name)
        if value.dtype not in _HALVES or not name.endswith(_KEPT):
            graph.initializers[name] = value
            continue
        assert value.const_value is not None
        (use,) = value.uses()
        restored = use.node.outputs[0]
        wide = WidenedTensor(value.const_value, restored.name)
        constant = put_tensor(graph, wide)
        constant.shape = restored.shape
        restored.replace_all_uses_with(constant)
        graph.remove(use.node, safe=True)
    return model


def canonical_graphs(path: Path) -> list[Path]:
    """Return the canonical graph at ``path`` and, of a model with an encoder, that which reads sources, beside it."""
    encode = path.with_name(ENCODE_FILE)
    return [path, encode] if encode.exists() else [path]


def save_over(model: ir.Model, path: Path, report: Steps = untold) -> None:
    """Write a graph to ``path`` and its constants to ``path``.data, which it may still be reading from.

    ``report`` is told of the constants that are written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        ir.save(
            model,
            written,
            external_data=f"{path.name}.data",
            callback=lambda _, info: report(info.index + 1, info.total),
        )
        for name in os.listdir(folder):
            os.replace(Path(folder) / name, path.with_name(name))
