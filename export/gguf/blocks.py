"""Blocks of GGUF: the integers, scales and minimums that a row of bytes is, and the values that these stand for.

A weight is ``scale * (integer - middle) + minimum``, integers being unsigned. Scales and minimums are of 16 bits, in K
types times an integer of 6 or 8; float32 holds these products exactly.

Source: ggml, ggml-common.h (block_q4_0 and others) and ggml-quants.c (dequantize_row_q4_0 and others).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from outrider.engines.base import FloatArray
from outrider.export.gguf.file import Bytes, GgufTensor

# Weights that are read at once: those that fit in a core's cache with what they are made of.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of weights as integers.

    Attributes:
        integers: [rows, K] uint8.
        middle: the integer that stands for the minimum, or for zero.
        scales: [rows, K / block] float32.
        minimums: [rows, K / block] float32; None where all are zero.
    """

    integers: Bytes
    middle: int
    scales: FloatArray
    minimums: FloatArray | None = None

    def values(self) -> FloatArray:
        """Return the weights [rows, K] float32, rounded as ggml rounds them."""
        blocks = self.integers.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.middle:
            blocks -= np.float32(self.middle)
        blocks *= self.scales[..., None]
        if self.minimums is not None:
            blocks += self.minimums[..., None]
        return blocks.reshape(self.integers.shape)


def _halves(data: Bytes) -> FloatArray:
    """Return numbers [..., n] float32 of bytes [..., 2 n]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Return integers [..., 2 n] of bytes [..., n]: all low halves, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Bytes, width: int) -> Bytes:
    """Return integers [..., 8 / width, n] of bytes [..., n], the lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _q4(data: Bytes, num_floats: int) -> QuantizedRows:
    """Q4_0 and Q4_1: one or two float16, 32 nibbles."""
    floats = _halves(data[..., : 2 * num_floats])
    integers = _nibbles(data[..., 2 * num_floats :])
    return _of_floats(integers, floats, middle=8)


def _q5(data: Bytes, num_floats: int) -> QuantizedRows:
    """Q5_0 and Q5_1: one or two float16, the fifth bits of 32 weights, 32 nibbles."""
    begin = 2 * num_floats
    fifths = np.unpackbits(data[..., begin : begin + 4], axis=-1, bitorder="little")
    integers = _nibbles(data[..., begin + 4 :]) | (fifths << np.uint8(4))
    return _of_floats(integers, _halves(data[..., :begin]), middle=16)


def _of_floats(integers: Bytes, floats: FloatArray, middle: int) -> QuantizedRows:
    if floats.shape[-1] == 1:
        return QuantizedRows(integers, middle, floats[..., 0])
    return QuantizedRows(integers, 0, floats[..., 0], floats[..., 1])


def _q8_0(data: Bytes) -> QuantizedRows:
    # Signed bytes: flipping the highest bit adds 128.
    return QuantizedRows(data[..., 2:] ^ np.uint8(128), 128, _halves(data[..., :2])[..., 0])


def _q4_k(data: Bytes) -> QuantizedRows:
    scales, minimums = _k_scales(data[..., :16])
    integers = _bits(data[..., 16:].reshape(*data.shape[:-1], 4, 32), 4)
    return QuantizedRows(integers, 0, scales, minimums)


def _q5_k(data: Bytes) -> QuantizedRows:
    scales, minimums = _k_scales(data[..., :16])
    low = _bits(data[..., 48:].reshape(*data.shape[:-1], 4, 32), 4).reshape(*data.shape[:-1], 8, 32)
    return QuantizedRows(low | (_bits(data[..., 16:48], 1) << np.uint8(4)), 0, scales, minimums)


def _k_scales(data: Bytes) -> tuple[FloatArray, FloatArray]:
    """Return scales and minimums [..., 8] of two float16 and 12 bytes, which hold 8 scales and 8 minimums of 6 bits."""
    floats, packed = _halves(data[..., :4]), data[..., 4:].reshape(*data.shape[:-1], 3, 4)
    first, second, third = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return floats[..., :1] * scales, -floats[..., 1:] * minimums


def _q6_k(data: Bytes) -> QuantizedRows:
    shape = data.shape[:-1]
    low = _bits(data[..., :128].reshape(*shape, 2, 64), 4).reshape(*shape, 2, 4, 32)
    high = _bits(data[..., 128:192].reshape(*shape, 2, 32), 2)
    scales = data[..., 192:208].view(np.int8) * _halves(data[..., 208:])
    return QuantizedRows(low | (high << np.uint8(4)), 32, scales)


def _q3_k(data: Bytes) -> QuantizedRows:
    shape = data.shape[:-1]
    low = _bits(data[..., 32:96].reshape(*shape, 2, 32), 2).reshape(*shape, 8, 32)
    packed = data[..., 96:108].reshape(*shape, 3, 4)
    four = _bits(packed[..., :2, :].reshape(*shape, 8), 4).reshape(*shape, 16)
    two = _bits(packed[..., 2, :], 2).reshape(*shape, 16)
    sixes = (four | (two << np.uint8(4))).astype(np.float32) - np.float32(32)
    integers = low | (_bits(data[..., :32], 1) << np.uint8(2))
    return QuantizedRows(integers, 4, sixes * _halves(data[..., 108:]))


def _q2_k(data: Bytes) -> QuantizedRows:
    floats = _halves(data[..., 80:])
    packed = data[..., :16]
    integers = _bits(data[..., 16:80].reshape(*data.shape[:-1], 2, 32), 2)
    return QuantizedRows(
        integers, 0, floats[..., :1] * (packed & 15), -floats[..., 1:] * (packed >> 4)
    )


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a type's bytes are read, and stored.

    Attributes:
        num_bytes: of a block.
        decode: makes blocks [..., bytes] integers, whose axes are not those of rows yet.
        bits: integers that hold its own, 4 or 8; None where they are not kept.
    """

    num_bytes: int
    decode: Callable[[Bytes], QuantizedRows]
    bits: int | None


BLOCK_TYPES = {
    "Q4_0": BlockType(18, lambda data: _q4(data, 1), 4),
    "Q4_1": BlockType(20, lambda data: _q4(data, 2), 4),
    "Q5_0": BlockType(22, lambda data: _q5(data, 1), 8),
    "Q5_1": BlockType(24, lambda data: _q5(data, 2), 8),
    "Q8_0": BlockType(34, _q8_0, 8),
    "Q2_K": BlockType(84, _q2_k, None),
    "Q3_K": BlockType(110, _q3_k, 4),
    "Q4_K": BlockType(144, _q4_k, 4),
    "Q5_K": BlockType(176, _q5_k, 8),
    "Q6_K": BlockType(210, _q6_k, 8),
}
FLOAT_TYPES = ("F32", "F16", "BF16")


def decode(kind: str, rows: Bytes) -> QuantizedRows:
    """Return rows [rows, bytes] of a type of ``BLOCK_TYPES`` as integers."""
    num_rows, form = len(rows), BLOCK_TYPES[kind]
    found = form.decode(np.ascontiguousarray(rows).reshape(num_rows, -1, form.num_bytes))
    minimums = found.minimums
    return QuantizedRows(
        found.integers.reshape(num_rows, -1),
        found.middle,
        found.scales.reshape(num_rows, -1),
        None if minimums is None else minimums.reshape(num_rows, -1),
    )


def read_values(tensor: GgufTensor) -> FloatArray:
    """Return a tensor's values [...] float32, of a type of ``BLOCK_TYPES`` or ``FLOAT_TYPES``."""
    data, values = tensor.data, np.empty(tensor.shape, np.float32)
    out = values.reshape(len(data), -1)
    step = max(1, _CHUNK // out.shape[1])
    for begin in range(0, len(data), step):
        chunk = np.ascontiguousarray(data[begin : begin + step])
        if tensor.kind == "F32":
            found: FloatArray = chunk.view("<f4")
        elif tensor.kind == "F16":
            found = chunk.view("<f2")
        elif tensor.kind == "BF16":
            found = (chunk.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            found = decode(tensor.kind, chunk).values()
        out[begin : begin + step] = found
    return values
