"""Weights that stay as their file has them until they are read: parameters of a model, and constants of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir
import torch
from outrider.engines.base import FloatArray
from torch import Tensor, nn


class StoredWeight(Protocol):
    """A matrix [N, K] in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return N and K."""
        ...

    def values(self) -> FloatArray:
        """Return the matrix [N, K] float32, read anew."""
        ...


def stored_parameter(weight: StoredWeight, kind: torch.dtype) -> nn.Parameter:
    """Return a parameter of a type that stands for a weight, without memory."""
    made = nn.Parameter(torch.empty(weight.shape, dtype=kind, device="meta"), False)
    made.stored = weight
    return made


def stored_weight(value: Tensor) -> StoredWeight | None:
    """Return the weight that a parameter stands for, None for any other tensor."""
    found: StoredWeight | None = getattr(value, "stored", None)
    return found


class StoredTensor(ir.LazyTensor):
    """A float32 constant, read from stored weights whenever it is wanted.

    Attributes:
        weights: stand side by side as [K, N], or, not turned, are one [N, K].
    """

    def __init__(
        self, weights: Sequence[StoredWeight], *, is_turned: bool, name: str | None
    ) -> None:
        self.weights, self.is_turned = tuple(weights), is_turned
        rows = sum(weight.shape[0] for weight in weights)
        columns = weights[0].shape[1]
        shape = [columns, rows] if is_turned else [rows, columns]
        super().__init__(self._read, ir.DataType.FLOAT, ir.Shape(shape), name=name)

    def _read(self) -> ir.TensorProtocol:
        whole = np.concatenate([weight.values() for weight in self.weights])
        return ir.tensor(np.ascontiguousarray(whole.T if self.is_turned else whole))
