"""Blocks of GGUF: the integers, scales and minimums that a row of bytes is, and the values that these stand for.

A weight is ``scale * (integer - middle)`` or ``scale * integer + minimum``, integers being unsigned. Scales and
minimums are of 16 bits, in K types times an integer of 6 or 8 bits; float32 holds these products exactly.

Source: ggml, ggml-common.h (block_q4_0 and others) and ggml-quants.c (dequantize_row_q4_0 and others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray
from outrider.export.gguf.file import Bytes, GgufTensor

# Weights that are read at once: those that fit in a core's cache with what they are made of.
_CHUNK = 1 << 17
Factors = tuple[npt.NDArray[Any], ...]
"""Numbers [rows, blocks] float16; or int8, and what multiplies them, [rows, blocks / n] float16."""
# Integers, and factors of scales and of minimums, of blocks [...].
_Parts = tuple[Bytes, Factors, Factors | None]


def _halves(data: Bytes) -> npt.NDArray[np.float16]:
    """Return numbers [..., n] float16 of bytes [..., 2 n]."""
    return np.ascontiguousarray(data).view("<f2")


def multiplied(factors: Factors) -> FloatArray:
    """Return numbers [rows, blocks] float32."""
    found: FloatArray = factors[0].astype(np.float32)
    for one in factors[1:]:
        found = (found.reshape(*one.shape, -1) * one[..., None].astype(np.float32)).reshape(
            found.shape
        )
    return found


def _nibbles(data: Bytes) -> Bytes:
    """Return integers [..., 2 n] of bytes [..., n]: all low halves, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Bytes, width: int) -> Bytes:
    """Return integers [..., 8 / width, n] of bytes [..., n], the lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _q4(data: Bytes, num_floats: int) -> _Parts:
    """Q4_0 and Q4_1: one or two float16, 32 nibbles."""
    floats = _halves(data[..., : 2 * num_floats])
    integers = _nibbles(data[..., 2 * num_floats :])
    return integers, *_of_floats(floats)


def _q5(data: Bytes, num_floats: int) -> _Parts:
    """Q5_0 and Q5_1: one or two float16, the fifth bits of 32 weights, 32 nibbles."""
    begin = 2 * num_floats
    fifths = np.unpackbits(data[..., begin : begin + 4], axis=-1, bitorder="little")
    integers = _nibbles(data[..., begin + 4 :]) | (fifths << np.uint8(4))
    return integers, *_of_floats(_halves(data[..., :begin]))


def _of_floats(floats: npt.NDArray[np.float16]) -> tuple[Factors, Factors | None]:
    return (floats[..., 0],), (floats[..., 1],) if floats.shape[-1] > 1 else None


def _q8_0(data: Bytes) -> _Parts:
    # Signed bytes: flipping the highest bit adds 128.
    return data[..., 2:] ^ np.uint8(128), (_halves(data[..., :2])[..., 0],), None


def _q4_k(data: Bytes) -> _Parts:
    scales, minimums = _k_scales(data[..., :16])
    integers = _bits(data[..., 16:].reshape(*data.shape[:-1], 4, 32), 4)
    return integers, scales, minimums


def _q5_k(data: Bytes) -> _Parts:
    scales, minimums = _k_scales(data[..., :16])
    low = _bits(data[..., 48:].reshape(*data.shape[:-1], 4, 32), 4).reshape(*data.shape[:-1], 8, 32)
    return low | (_bits(data[..., 16:48], 1) << np.uint8(4)), scales, minimums


def _k_scales(data: Bytes) -> tuple[Factors, Factors]:
    """Return scales and minimums [..., 8] of two float16 and 12 bytes, which hold 8 scales and 8 minimums of 6 bits."""
    floats, packed = _halves(data[..., :4]), data[..., 4:].reshape(*data.shape[:-1], 3, 4)
    first, second, third = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return (_signed(scales), floats[..., :1]), (_signed(minimums), -floats[..., 1:])


def _signed(integers: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    return integers.view(np.int8)


def _q6_k(data: Bytes) -> _Parts:
    shape = data.shape[:-1]
    low = _bits(data[..., :128].reshape(*shape, 2, 64), 4).reshape(*shape, 2, 4, 32)
    high = _bits(data[..., 128:192].reshape(*shape, 2, 32), 2)
    scales = _signed(data[..., 192:208]), _halves(data[..., 208:])
    return low | (high << np.uint8(4)), scales, None


def _q3_k(data: Bytes) -> _Parts:
    shape = data.shape[:-1]
    low = _bits(data[..., 32:96].reshape(*shape, 2, 32), 2).reshape(*shape, 8, 32)
    packed = data[..., 96:108].reshape(*shape, 3, 4)
    four = _bits(packed[..., :2, :].reshape(*shape, 8), 4).reshape(*shape, 16)
    two = _bits(packed[..., 2, :], 2).reshape(*shape, 16)
    sixes = (four | (two << np.uint8(4))).astype(np.int8) - np.int8(32)
    integers = low | (_bits(data[..., :32], 1) << np.uint8(2))
    return integers, (sixes, _halves(data[..., 108:])), None


def _q2_k(data: Bytes) -> _Parts:
    floats = _halves(data[..., 80:])
    packed = data[..., :16]
    integers = _bits(data[..., 16:80].reshape(*data.shape[:-1], 2, 32), 2)
    scales, minimums = _signed(packed & 15), _signed(packed >> 4)
    return integers, (scales, floats[..., :1]), (minimums, -floats[..., 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """How a type's bytes are read, and stored.

    Attributes:
        num_bytes: that are read at once.
        decode: makes integers, scales and minimums of such bytes [..., bytes].
        width: bits of an integer.
        size: weights that share a scale.
        has_minimums: whether a block's lowest integer stands for a number of its own.
        num_together: blocks whose scales, of 8 bits, have a factor of 16 bits together; 1 of scales of 16 bits.
        is_kept: whether it may be stored as it is.
    """

    num_bytes: int
    decode: Callable[[Bytes], _Parts]
    width: int
    size: int = 32
    has_minimums: bool = False
    num_together: int = 1
    is_kept: bool = True

    @property
    def bits(self) -> int:
        """Return the bits that hold an integer in a graph, 4 or 8."""
        return 4 if self.width <= 4 else 8

    @property
    def middle(self) -> int:
        """Return the middle of the integers: what stands for zero where a type has no minimums."""
        return 1 << (self.width - 1)


BLOCK_TYPES = {
    "Q4_0": BlockType(num_bytes=18, decode=lambda data: _q4(data, 1), width=4),
    "Q4_1": BlockType(num_bytes=20, decode=lambda data: _q4(data, 2), width=4, has_minimums=True),
    "Q5_0": BlockType(num_bytes=22, decode=lambda data: _q5(data, 1), width=5),
    "Q5_1": BlockType(num_bytes=24, decode=lambda data: _q5(data, 2), width=5, has_minimums=True),
    "Q8_0": BlockType(num_bytes=34, decode=_q8_0, width=8),
    "Q2_K": BlockType(
        num_bytes=84,
        decode=_q2_k,
        width=2,
        num_together=16,
        size=16,
        has_minimums=True,
        is_kept=False,
    ),
    "Q3_K": BlockType(num_bytes=110, decode=_q3_k, width=3, num_together=16, size=16),
    "Q4_K": BlockType(num_bytes=144, decode=_q4_k, width=4, num_together=8, has_minimums=True),
    "Q5_K": BlockType(num_bytes=176, decode=_q5_k, width=5, num_together=8, has_minimums=True),
    "Q6_K": BlockType(num_bytes=210, decode=_q6_k, width=6, num_together=16, size=16),
}
FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of weights as integers.

    Attributes:
        kind: their type.
        integers: [rows, K] uint8.
        scale_factors: of scales, of K / block in a row.
        minimum_factors: likewise of minimums; None where the type has none.
    """

    kind: BlockType
    integers: Bytes
    scale_factors: Factors
    minimum_factors: Factors | None

    def in_order(self, order: npt.NDArray[np.int64]) -> QuantizedRows:
        """Return the rows in another order."""
        minimums = self.minimum_factors
        return replace(
            self,
            integers=self.integers[order],
            scale_factors=tuple(one[order] for one in self.scale_factors),
            minimum_factors=minimums and tuple(one[order] for one in minimums),
        )

    def values(self) -> FloatArray:
        """Return the weights [rows, K] float32, rounded as ggml rounds them."""
        made = np.empty(self.integers.shape, np.float32)
        self.read_into(made)
        return made

    def read_into(self, out: FloatArray) -> None:
        """Write the weights to an array [rows, K] float32."""
        if self.minimum_factors is None:
            np.subtract(self.integers, np.float32(self.kind.middle), out=out)
        else:
            out[:] = self.integers
        scales = multiplied(self.scale_factors)
        blocks = out.reshape(*scales.shape, -1)
        blocks *= scales[..., None]
        if self.minimum_factors is not None:
            blocks += multiplied(self.minimum_factors)[..., None]

    def signed(self) -> npt.NDArray[np.int8]:
        """Return integers [rows, K] less the middle of their range."""
        return (self.integers - np.uint8(self.kind.middle)).view(np.int8)


def decode(tensor: GgufTensor) -> QuantizedRows:
    """Return a matrix of a type of ``BLOCK_TYPES`` as integers."""
    form = BLOCK_TYPES[tensor.kind]
    parts = [_decode_some(form, data) for _, data in _chunks(tensor)]
    integers, scales, minimums = zip(*parts, strict=True)
    whole = None if minimums[0] is None else _joined(minimums)
    return QuantizedRows(form, np.concatenate(integers), _joined(scales), whole)


def _joined(parts: Sequence[Factors]) -> Factors:
    return tuple(np.concatenate(one) for one in zip(*parts, strict=True))


def _chunks(tensor: GgufTensor) -> Iterator[tuple[slice, Bytes]]:
    """Yield rows of a tensor as they lie in the file, and which they are."""
    step = max(1, _CHUNK // tensor.shape[-1])
    for begin in range(0, tensor.num_rows, step):
        end = min(begin + step, tensor.num_rows)
        yield slice(begin, end), tensor.rows(begin, end)


def _decode_some(form: BlockType, data: Bytes) -> _Parts:
    num_rows = len(data)
    blocks = data.reshape(num_rows, -1, form.num_bytes)
    integers, scales, minimums = form.decode(blocks)

    def rows(factors: Factors) -> Factors:
        return tuple(one.reshape(num_rows, -1) for one in factors)

    return integers.reshape(num_rows, -1), rows(scales), minimums and rows(minimums)


def read_values(tensor: GgufTensor) -> FloatArray:
    """Return a tensor's values [...] float32, of a type of ``BLOCK_TYPES`` or ``FLOAT_TYPES``."""
    values = np.empty(tensor.shape, np.float32)
    out = values.reshape(tensor.num_rows, -1)
    for where, data in _chunks(tensor):
        _read_into(out[where], tensor.kind, data)
    return values


def _read_into(out: FloatArray, kind: str, data: Bytes) -> None:
    """Write the values of rows [rows, bytes] to an array [rows, K] float32."""
    if kind == "F32":
        out[:] = data.view("<f4")
    elif kind == "F16":
        out[:] = data.view("<f2")
    elif kind == "BF16":
        out[:] = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        QuantizedRows(BLOCK_TYPES[kind], *_decode_some(BLOCK_TYPES[kind], data)).read_into(out)
