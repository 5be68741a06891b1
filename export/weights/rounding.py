"""Weights as integers, rounded for the least error of their products with given activations.

A weight is rounded row by row of K. A row's rounding error is spread over the rows that follow, by their correlation
in the activations. Without activations that is rounding to nearest.

Source: Frantar et al. 2022 (GPTQ, arXiv 2210.17323), algorithm 1; symmetric, scale = max|w| / (2^(bits-1) - 1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from outrider.engines.base import FloatArray
from torch import Tensor

Int8Array = npt.NDArray[np.int8]

# Share of the mean square of the activations that is added to each (GPTQ, section 3.3, step 3).
_DAMPING = 0.01
# Rows of K that are rounded before their error reaches all rows that follow (same section, step 2).
_NUM_LAZY = 128
# Rows of a triangular matrix that are inverted at once.
_LEAST_HALVED = 512


def round_to_nearest(
    weight: FloatArray, *, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers [K, N] int8 and scales [K / block_size, N] float32 of a weight [K, N] float32.

    ``integers * scale`` of its block is within half a scale of the weight. K is a multiple of the block size.
    """
    num_rows, num_columns = weight.shape
    blocks = weight.reshape(num_rows // block_size, block_size, num_columns)
    scales = np.stack([_scales(block, bits) for block in blocks])
    integers = np.rint(blocks / scales[:, None])
    return integers.astype(np.int8).reshape(weight.shape), scales


def round_by_activations(
    weight: FloatArray, activations: FloatArray, *, bits: int, block_size: int
) -> tuple[Int8Array, FloatArray]:
    """Return integers and scales of least square error of the product with activations [rows, K] float32.

    Shapes are those of ``round_to_nearest``. The block size divides 128 or is K.
    """
    num_rows, num_columns = weight.shape
    greatest = 2 ** (bits - 1) - 1
    spread = _spread(activations)
    left = weight.copy()
    integers = np.empty(weight.shape, np.int8)
    scales = np.empty((num_rows // block_size, num_columns), np.float32)
    for begin in range(0, num_rows, _NUM_LAZY):
        end = min(begin + _NUM_LAZY, num_rows)
        lost = np.empty((end - begin, num_columns), np.float32)
        for row in range(begin, end):
            if row % block_size == 0:
                scales[row // block_size] = _scales(left[row : row + block_size], bits)
            scale = scales[row // block_size]
            whole = np.clip(np.rint(left[row] / scale), -greatest, greatest)
            integers[row] = whole
            lost[row - begin] = (left[row] - whole * scale) / spread[row, row]
            left[row + 1 : end] -= np.outer(spread[row, row + 1 : end], lost[row - begin])
        left[end:] -= spread[begin:end, end:].T @ lost
    return integers, scales


def restore(integers: Int8Array, scales: FloatArray) -> FloatArray:
    """Return the weight [K, N] float32 that the graph computes with, from integers [K, N] and scales [K / block, N]."""
    return integers.astype(np.float32) * np.repeat(scales, len(integers) // len(scales), axis=0)


def _scales(block: FloatArray, bits: int) -> FloatArray:
    """Return scales [N] float32 of a block [rows, N]."""
    scales = np.abs(block).max(axis=0) / (2 ** (bits - 1) - 1)
    return np.where(scales == 0, 1, scales).astype(np.float32)


def _spread(activations: FloatArray) -> FloatArray:
    """Return the upper factor [K, K] float32 of the inverse of the activations' second moments.

    With rows and columns in reverse order, Cholesky's factor C of the moments gives it without the inverse itself:
    of C C' = moments, the factor is the inverse of C. That takes a third of the time.
    """
    moments = (activations.T @ activations).astype(np.float64)
    diagonal = np.einsum("ii->i", moments)
    diagonal += max(_DAMPING * diagonal.mean(), 1e-30)
    factor = torch.linalg.cholesky(torch.from_numpy(moments[::-1, ::-1].copy()))
    del moments, diagonal
    return np.ascontiguousarray(_inverse(factor).numpy()[::-1, ::-1]).astype(np.float32)


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of a lower triangular matrix, by halves: a third of the work of solving for all columns."""
    size = len(lower)
    if size <= _LEAST_HALVED:
        unit = torch.eye(size, dtype=lower.dtype)
        return torch.linalg.solve_triangular(lower, unit, upper=False)
    half = size // 2
    inverse = torch.zeros_like(lower)
    inverse[:half, :half] = _inverse(lower[:half, :half])
    inverse[half:, half:] = _inverse(lower[half:, half:])
    inverse[half:, :half] = inverse[half:, half:] @ lower[half:, :half] @ inverse[:half, :half]
    inverse[half:, :half].neg_()
    return inverse
