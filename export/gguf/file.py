"""The container of GGUF files, metadata and tensors: every count, length and offset is checked before its use.

Little-endian throughout:

    "GGUF"  version u32  number of tensors u64  number of pairs u64
    pairs    key (u64 length, bytes)  type u32  value; an array is a type u32, a count u64 and its items
    tensors  name (u64 length, bytes)  axes u32  sizes u64 each, the fastest first  type u32  offset u64
    data     from the next multiple of "general.alignment" on, which offsets are relative to

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.base import BundleError

Bytes = npt.NDArray[np.uint8]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_TENSORS, _MOST_PAIRS, _MOST_AXES = 1 << 20, 1 << 16, 4
_MOST_NAME_BYTES = 1 << 16
_DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20
# Types of values; strings and arrays have forms of their own.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")

# By the number of a type: its name, the weights of a block, and a block's bytes.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, unread. It is not mapped: pages that were read once would count as memory.

    Attributes:
        kind: its type, such as "Q4_K".
        shape: [rows..., columns], the fastest axis last.
        path: of the file.
        offset: of the first row in it.
        row_bytes: of each row.
    """

    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Return the rows of all axes but the last."""
        return math.prod(self.shape[:-1])

    def rows(self, begin: int, end: int) -> Bytes:
        """Return some rows [end - begin, bytes of a row] uint8.

        Raises:
            BundleError: the file is no longer there, or shorter.
        """
        count = (end - begin) * self.row_bytes
        try:
            found = np.fromfile(
                self.path, np.uint8, count, offset=self.offset + begin * self.row_bytes
            )
        except OSError as error:
            raise BundleError(f"{self.path.name}: cannot be read: {error}") from error
        if len(found) != count:
            raise BundleError(f"{self.path.name}: changed while it was read")
        return found.reshape(-1, self.row_bytes)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file holds, or several parts of one.

    Attributes:
        pairs: metadata by key: int, float, bool, str, lists of str, or arrays of numbers.
        tensors: by name.
    """

    name: str
    pairs: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(paths: Sequence[Path]) -> GgufFile:
    """Return the contents of a file or, of a split model, of all its parts in order; tensors stay unread.

    Raises:
        BundleError: a file is unreadable, or breaks a rule of the format; says which.
    """
    found = [_Reader(path).read() for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for path, one in zip(paths, found, strict=True):
        for name, tensor in one.tensors.items():
            if name in tensors:
                raise BundleError(f"{path.name}: tensor {name!r} is in an earlier part too")
            tensors[name] = tensor
    return GgufFile(paths[0].name, found[0].pairs, tensors)


class _Reader:
    """Reads one file from its begin, never beyond its end."""

    def __init__(self, path: Path) -> None:
        self._name, self._path = path.name, path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path.name}: cannot be read: {error}") from error
        self._size, self._at = len(self._map), 0

    def read(self) -> GgufFile:
        if self._take(4, "magic") != _MAGIC:
            raise self._broken("magic", "must be GGUF")
        version = self._number("<u4", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            rule = "must be 2 or 3"
            raise self._broken(
                "version", "is big-endian" if swapped in _VERSIONS else f"{version} {rule}"
            )
        num_tensors = self._count("number of tensors", _MOST_TENSORS, least_bytes=24)
        num_pairs = self._count("number of pairs", _MOST_PAIRS, least_bytes=13)
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("key", _MOST_NAME_BYTES)
            if key in pairs:
                raise self._broken(key, "is given twice")
            pairs[key] = self._value(self._number("<u4", key), key)
        declared = dict(self._declared(num_tensors))
        return GgufFile(self._name, pairs, self._placed(declared, pairs))

    def _declared(self, num_tensors: int) -> list[tuple[str, tuple[tuple[int, ...], int, int]]]:
        """Return the names of tensors, with their sizes, types and offsets."""
        found, names = [], set()
        for _ in range(num_tensors):
            name = self._string("name of a tensor", _MOST_NAME_BYTES)
            if name in names:
                raise self._broken(name, "is given twice")
            names.add(name)
            num_axes = self._number("<u4", name)
            if not 1 <= num_axes <= _MOST_AXES:
                raise self._broken(name, f"has {num_axes} axes, 1 to {_MOST_AXES} are read")
            sizes = tuple(self._number("<u8", name) for _ in range(num_axes))
            kind, offset = self._number("<u4", name), self._number("<u8", name)
            found.append((name, (sizes, kind, offset)))
        return found

    def _placed(
        self, declared: Mapping[str, tuple[tuple[int, ...], int, int]], pairs: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """Return the tensors at their places, none of which overlap or pass the end."""
        alignment = pairs.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_number = type(alignment) is int and 0 < alignment <= _MOST_ALIGNMENT
        if not is_number or alignment % 8:
            raise self._broken("general.alignment", "must be a multiple of 8, 1 MiB at most")
        begin = -(-self._at // alignment) * alignment
        tensors, spans = {}, []
        for name, (sizes, number, offset) in declared.items():
            if number not in _TYPES:
                raise self._broken(name, f"has type {number}, which is unknown")
            kind, block, block_bytes = _TYPES[number]
            if 0 in sizes or sizes[0] % block:
                raise self._broken(name, f"rows of {sizes[0]} are no multiple of {block} ({kind})")
            row_bytes = sizes[0] // block * block_bytes
            end = begin + offset + row_bytes * math.prod(sizes[1:])
            if offset % alignment or end > self._size:
                raise self._broken(
                    name, "passes the end of the file" if end > self._size else "is unaligned"
                )
            spans.append((begin + offset, end, name))
            tensors[name] = GgufTensor(kind, sizes[::-1], self._path, begin + offset, row_bytes)
        spans.sort()
        for (_, end, _), (following, _, name) in pairwise(spans):
            if following < end:
                raise self._broken(name, "overlaps another tensor")
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._broken(key, f"has type {kind}, which is unknown")
        if kind == _BOOL:
            return self._take(1, key) != b"\0"
        return self._number(_SCALARS[kind], key)

    def _array(self, key: str) -> Any:
        kind = self._number("<u4", key)
        if kind == _STRING:
            count = self._count(key, self._size, least_bytes=_LENGTH.size)
            return [self._string(key, self._size) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._broken(key, f"is an array of type {kind}, which is not read")
        form = np.dtype(_SCALARS[kind] if kind != _BOOL else "u1")
        count = self._count(key, self._size, least_bytes=form.itemsize)
        taken = np.frombuffer(self._take(count * form.itemsize, key), form)
        return taken != 0 if kind == _BOOL else taken

    def _count(self, field: str, most: int, *, least_bytes: int) -> int:
        """Return a number of things, as many as the file can hold at most."""
        count: int = self._number("<u8", field)
        if count > most:
            raise self._broken(field, f"{count} is above {most}")
        if count * least_bytes > self._size - self._at:
            raise self._broken(field, f"{count} are more than the file holds")
        return count

    def _string(self, field: str, most: int) -> str:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, field))
        if length > most:
            raise self._broken(field, f"a string of {length} bytes is too long")
        try:
            return self._take(length, field).decode()
        except UnicodeDecodeError as error:
            raise self._broken(field, "is no UTF-8") from error

    def _number(self, form: str, field: str) -> Any:
        kind = np.dtype(form)
        return np.frombuffer(self._take(kind.itemsize, field), kind)[0].item()

    def _take(self, count: int, field: str) -> bytes:
        if count > self._size - self._at:
            raise self._broken(field, "the file ends within it")
        taken = self._map[self._at : self._at + count]
        self._at += count
        return taken

    def _broken(self, field: str, rule: str) -> BundleError:
        return BundleError(f"{self._name}: {field[:80]!r}: {rule}")
