"""Weights as integers, rounded for the least error of their products with given activations.

A weight is rounded row by row of K. A row's rounding error is spread over the rows that follow, by their correlation
in the activations. Without activations that is rounding to nearest.

Source: Frantar et al. 2022 (GPTQ, arXiv 2210.17323), algorithm 1; symmetric, scale = max|w| / (2^(bits-1) - 1).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray

Int8Array = npt.NDArray[np.int8]

# Share of the mean square of the activations that is added to each (GPTQ, section 3.3, step 3).
_DAMPING = 0.01
# Rows of K that are rounded before their error reaches all rows that follow (same section, step 2).
_NUM_LAZY = 64
# Weights that a thread rounds at once: those that a core's cache holds with their errors.
_NUM_CACHED = 1 << 18
# Rows of a panel at most. All of K has more moments than 2,048 tokens of text can tell: SmolLM2-135M in 4 bits then has
# 1.28 times the perplexity, with panels of 128 and searched scales 1.12 (docs/measurements.md).
_MOST_PANEL = 128
# Shares of a block's greatest weight that its scale may reach, where few integers make that matter.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_MOST_SEARCHED_BITS = 4
# Rows of an embedding that are rounded at once.
_MOST_ROWS = 1 << 13
# The least scale: float16's least number above zero.
_LEAST_SCALE = 2.0**-24


def round_to_nearest(
    weight: FloatArray, *, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers [K, N] int8 and scales [K / block_size, N] float32 of a weight [K, N] float32.

    ``integers * scale`` of its block is within half a scale of the weight. K is a multiple of the block size.
    """
    num_rows, num_columns = weight.shape
    blocks = weight.reshape(num_rows // block_size, block_size, num_columns)
    scales = np.stack([_scales(block, bits) for block in blocks])
    greatest = 2 ** (bits - 1) - 1
    integers = np.clip(np.rint(blocks / scales[:, None]), -greatest, greatest)
    return integers.astype(np.int8).reshape(weight.shape), scales


def round_rows(
    table: FloatArray, *, bits: int, block_size: int
) -> tuple[npt.NDArray[np.uint8], FloatArray]:
    """Return integers [V, K] uint8 and scales [V, K / block_size] float32 of an embedding [V, K] float32.

    They are rounded to nearest; the middle of the integers' range stands for zero.
    """
    num_rows, width = table.shape
    integers = np.empty(table.shape, np.uint8)
    scales = np.empty((num_rows, width // block_size), np.float32)
    for begin in range(0, num_rows, _MOST_ROWS):
        some = slice(begin, begin + _MOST_ROWS)
        columns, found = round_to_nearest(
            np.ascontiguousarray(table[some].T), bits=bits, block_size=block_size
        )
        integers[some] = (columns + np.int16(1 << (bits - 1))).T
        scales[some] = found.T
    return integers, scales


def round_by_activations(
    weight: FloatArray, activations: FloatArray, *, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers and scales of least square error of the product with activations [rows, K] float32.

    Shapes are those of ``round_to_nearest``. The block size divides 64 or is K.
    """
    moments = (activations.T @ activations)[None]
    return round_by_moments(weight, moments, bits=bits, block_size=block_size)


def panel_size(length: int, block_size: int) -> int:
    """Return the rows of a panel, within which errors are spread: the most that divide K and hold whole blocks."""
    sizes = range(block_size, min(length, _MOST_PANEL) + 1, block_size)
    return max(size for size in sizes if length % size == 0)


def round_by_moments(
    weight: FloatArray, moments: FloatArray, *, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers and scales of least square error of the product with activations of these second moments.

    ``moments`` [K / P, P, P] float32 are those of panels of P rows of K. A row's error is spread within its panel.
    Shapes are those of ``round_to_nearest``; the block size divides 64 or is P.
    """
    num_panels, size, _ = moments.shape
    spread, importance = _spread(moments)
    step = max(1, _NUM_CACHED // len(weight))

    def rounded(begin: int) -> tuple[Int8Array, FloatArray]:
        left = weight[:, begin : begin + step].reshape(num_panels, size, -1).copy()
        integers, scales = _round_panels(left, spread, importance, bits, block_size)
        num_columns = left.shape[2]
        return integers.reshape(-1, num_columns), scales.reshape(-1, num_columns)

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(rounded, range(0, weight.shape[1], step))]
    integers, scales = zip(*found, strict=True)
    return np.concatenate(integers, axis=1), np.concatenate(scales, axis=1)


def _round_panels(
    left: FloatArray, spread: FloatArray, importance: FloatArray, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers [panels, P, n] int8 and scales [panels, P / block, n] of weights [panels, P, n], all overwritten.

    ``spread`` is [panels, P, P] float32, ``importance`` [panels, P, 1].
    """
    num_panels, size, num_columns = left.shape
    greatest = 2 ** (bits - 1) - 1
    integers = np.empty(left.shape, np.int8)
    scales = np.empty((num_panels, size // block_size, num_columns), np.float32)
    for begin in range(0, size, _NUM_LAZY):
        end = min(begin + _NUM_LAZY, size)
        lost = np.empty((num_panels, end - begin, num_columns), np.float32)
        for row in range(begin, end):
            if row % block_size == 0:
                rows = slice(row, row + block_size)
                found = _best_scales(left[:, rows], importance[:, rows], bits)
                scales[:, row // block_size] = found
            scale = scales[:, row // block_size]
            whole = np.clip(np.rint(left[:, row] / scale), -greatest, greatest)
            integers[:, row] = whole
            error = (left[:, row] - whole * scale) / spread[:, row, row, None]
            lost[:, row - begin] = error
            left[:, row + 1 : end] -= spread[:, row, row + 1 : end, None] * error[:, None]
        left[:, end:] -= spread[:, begin:end, end:].swapaxes(1, 2) @ lost
    return integers, scales


def restore(integers: Int8Array, scales: FloatArray) -> FloatArray:
    """Return the weight [K, N] float32 that the graph computes with, from integers [K, N] and scales [K / block, N]."""
    return integers.astype(np.float32) * np.repeat(scales, len(integers) // len(scales), axis=0)


def _scales(block: FloatArray, bits: int, axis: int = 0) -> FloatArray:
    """Return scales of a block, whose weights lie along an axis, which float16 holds exactly."""
    return _narrow(np.abs(block).max(axis=axis) / np.float32(2 ** (bits - 1) - 1))


def _narrow(scales: FloatArray) -> FloatArray:
    narrow = np.maximum(scales, _LEAST_SCALE).astype(np.float16)
    return np.where(scales == 0, np.float32(1), narrow.astype(np.float32))


def _best_scales(block: FloatArray, importance: FloatArray, bits: int) -> FloatArray:
    """Return scales [panels, n] of blocks [panels, rows, n]; of few bits those of least square error.

    Some of these cut the greatest weight. ``importance`` [panels, rows, 1] weighs errors.
    """
    most = _scales(block, bits, axis=1)
    if bits > _MOST_SEARCHED_BITS:
        return most
    greatest = 2 ** (bits - 1) - 1
    best, least = most, np.full_like(most, np.inf)
    for share in _SHARES:
        scale = _narrow(most * np.float32(share))
        error = block / scale[:, None]
        np.clip(np.rint(error, out=error), -greatest, greatest, out=error)
        error *= scale[:, None]
        error -= block
        np.square(error, out=error)
        found = (importance.swapaxes(1, 2) @ error)[:, 0]
        best = np.where(found < least, scale, best)
        least = np.minimum(found, least)
    return best


def _spread(moments: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the upper factors [panels, P, P] of the inverse of the moments, and the moments' diagonals [panels, P, 1].

    With rows and columns in reverse order, Cholesky's factor C of the moments gives it without the inverse itself:
    of C C' = moments, the factor is the inverse of C.
    """
    wide = moments.astype(np.float64)
    diagonal = np.einsum("pii->pi", wide)
    diagonal += np.maximum(_DAMPING * diagonal.mean(axis=1, keepdims=True), 1e-30)
    factor = np.linalg.cholesky(wide[:, ::-1, ::-1])
    spread = np.linalg.inv(factor)[:, ::-1, ::-1].astype(np.float32)
    return np.ascontiguousarray(spread), diagonal[..., None].astype(np.float32)
