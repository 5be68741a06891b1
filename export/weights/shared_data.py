"""One data file for the two canonical graphs of a model with an encoder.

Requires ``model.onnx`` and ``encode.onnx`` with a data file each. Ensures that ``model.onnx.data`` holds the weights of
both, equal ones once, and that its former content stays where it was: graphs derived of ``model.onnx`` read it too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

# Of offsets, so that a weight can be mapped by itself; of small ones, so that few bytes are lost.
_PAGE_BYTES, _SMALL_ALIGNMENT = 4096, 64


def share_data(path: Path, encode_path: Path) -> None:
    """Move the weights of the graph at ``encode_path`` to the data file of the graph at ``path``, and drop its own."""
    known = {_content(tensor): tensor for _, tensor in _stored(ir.load(path))}
    data = path.with_name(f"{path.name}.data")
    encode = ir.load(encode_path)
    with data.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        for value, tensor in _stored(encode):
            key = _content(tensor)
            if key not in known:
                offset = _aligned(file.tell(), tensor.nbytes)
                file.write(bytes(offset - file.tell()))
                tensor.tofile(file)
                known[key] = _external(tensor, data, offset, value.name)
            found = known[key]
            value.const_value = _external(tensor, data, found.offset, value.name)
    ir.save(encode, encode_path)
    encode_path.with_name(f"{encode_path.name}.data").unlink()


def _stored(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Yield the constants of a graph that lie in a data file."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value, value.const_value


def _content(tensor: ir.ExternalTensor) -> tuple[object, ...]:
    digest = hashlib.sha256(memoryview(tensor.tobytes())).digest()
    return tensor.dtype, tuple(tensor.shape.numpy()), digest


def _aligned(end: int, num_bytes: int) -> int:
    """Return the first place from ``end`` on for a weight."""
    step = _SMALL_ALIGNMENT if num_bytes < _PAGE_BYTES else _PAGE_BYTES
    return -(-end // step) * step


def _external(
    tensor: ir.ExternalTensor, data: Path, offset: int | None, name: str | None
) -> ir.ExternalTensor:
    """Return a tensor as it lies in a data file."""
    return ir.ExternalTensor(
        data.name,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=tensor.shape,
        name=str(name),
        base_dir=data.parent,
    )
