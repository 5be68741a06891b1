"""Lists the external data files of an ONNX model, without the onnx package.

A server must know this before an inference library opens whatever path a graph names. Only the
protobuf wire format and four field numbers of ``onnx.proto`` are needed: ModelProto.graph = 7,
GraphProto.initializer = 5, TensorProto.external_data = 13 (entries key = 1, value = 2); tensors
also hide in nodes (GraphProto.node = 1, NodeProto.attribute = 5, AttributeProto.t = 5, g = 6,
tensors = 10, graphs = 11), in sparse initializers (15) and in functions (ModelProto.functions = 25,
FunctionProto.node = 7).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from outrider.engines.base import BundleError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# kind of message -> {field number: kind of the message in that field}
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_DIMS, _TENSOR_NAME = 7, 5, 1, 8

_Buffer = mmap.mmap | bytes


def external_data_paths(path: Path) -> set[str]:
    """Locations, relative to the model's folder, of all external data a model names.

    Raises:
        BundleError: the file is not a readable ONNX model.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise BundleError(f"{path.name}: empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return set(_locations(data, "model", 0, len(data)))
            except (ValueError, IndexError, KeyError, RecursionError) as error:
                raise BundleError(f"{path.name}: not an ONNX model: {error}") from error


def table_lengths(path: Path, suffix: str) -> dict[str, int]:
    """First dimensions of a model's initializers whose names end with a suffix, by name.

    Raises:
        BundleError: the file is not a readable ONNX model.
    """
    data = path.read_bytes()
    try:
        tensors = [
            (begin, end)
            for number, first, last in _fields(data, 0, len(data))
            if number == _MODEL_GRAPH
            for field, begin, end in _fields(data, first, last)
            if field == _GRAPH_INITIALIZER
        ]
        found = {_tensor_name(data, begin, end): (begin, end) for begin, end in tensors}
        return {
            name: _first_dimension(data, *place)
            for name, place in found.items()
            if name.endswith(suffix)
        }
    except (ValueError, IndexError) as error:
        raise BundleError(f"{path.name}: not an ONNX model: {error}") from error


def _tensor_name(data: _Buffer, begin: int, end: int) -> str:
    names = [data[a:b] for number, a, b in _fields(data, begin, end) if number == _TENSOR_NAME]
    return bytes(names[-1]).decode("utf-8") if names else ""


def _first_dimension(data: _Buffer, begin: int, end: int) -> int:
    """TensorProto.dims is its field 1, and writers put fields in order: packed, or one number each."""
    tag, begin = _varint(data, begin, end)
    if tag >> 3 != _TENSOR_DIMS:
        return 0
    if tag & 7 == _BYTES:
        _, begin = _varint(data, begin, end)
    return _varint(data, begin, end)[0]


def _locations(data: _Buffer, kind: str, begin: int, end: int) -> Iterator[str]:
    if kind == "entry":
        fields = {
            number: bytes(data[start:stop]) for number, start, stop in _fields(data, begin, end)
        }
        if fields.get(_ENTRY_KEY) == b"location":
            yield fields[_ENTRY_VALUE].decode("utf-8")
        return
    children = _CHILDREN[kind]
    for number, start, stop in _fields(data, begin, end):
        if number in children:
            yield from _locations(data, children[number], start, stop)


def _fields(data: _Buffer, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of every length-delimited field in data[begin:end]."""
    while begin < end:
        tag, begin = _varint(data, begin, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, begin = _varint(data, begin, end)
        elif wire_type in (_FIXED64, _FIXED32):
            begin += 8 if wire_type == _FIXED64 else 4
        elif wire_type == _BYTES:
            length, begin = _varint(data, begin, end)
            if begin + length > end:
                raise ValueError("a field is longer than its message")
            yield number, begin, begin + length
            begin += length
        else:
            raise ValueError(f"wire type {wire_type}")
    if begin != end:
        raise ValueError("truncated message")


def _varint(data: _Buffer, begin: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while begin < end and shift < 64:
        byte = data[begin]
        begin += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, begin
        shift += 7
    raise ValueError("truncated integer")
