"""Checkpoints whose weights were packed as integers by GPTQ or AWQ: their layouts, and what they stand for.

Both store a product's weight [K, N] as integers, with a scale and a zero point for each group of rows and each column:
(integer - zero point) * scale, which float32 holds exactly. They differ in how integers lie in words of 32 bits:

    qweight   GPTQ [K * bits / 32, N], rows packed, low bits first    AWQ [K, N / 8], columns packed in ``_AWQ_COLUMNS``
    qzeros    GPTQ [groups, N * bits / 32], columns packed            AWQ [groups, N / 8], likewise
    scales    [groups, N]
    g_idx     GPTQ [K], the group of each row: groups are not runs of rows where columns were ordered by activation

Format "gptq" stores zero points less one; "gptq_v2" as they are.

Source: AutoGPTQ 0.7 (QuantLinear.pack), GPTQModel (convert_gptq_v1_to_v2_format), AutoAWQ 0.2 (WQLinear_GEMM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from outrider.engines.base import BundleError, FloatArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

GPTQ, AWQ = "gptq", "awq"
PACKED_KINDS = {"gptq-int4": 4, "gptq-int8": 8, "awq-int4": 4}
"""Kinds of weights that are stored as the checkpoint has them, and their bits."""

_WORD_BITS = 32
# The column of each 4 bits of a word, lowest first.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# By method, formats that are read.
_FORMATS = {GPTQ: ("gptq", "gptq_v2"), AWQ: ("gemm",)}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")

Integers = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """How a checkpoint's weights are packed.

    Attributes:
        method: "gptq" or "awq".
        bits: of an integer, 4 or 8.
        group_size: rows that share a scale, where the checkpoint does not say it row by row; None for all rows.
        adds_one: stored zero points are less by one.
    """

    method: str
    bits: int
    group_size: int | None
    adds_one: bool

    @property
    def kind(self) -> str:
        """Return the kind of weights, one of ``PACKED_KINDS``."""
        return f"{self.method}-int{self.bits}"


def packed_layout(name: str, quantization: Mapping[str, Any] | None) -> PackedLayout | None:
    """Return how a checkpoint is packed, by the ``quantization_config`` of its configuration; None for one that is not.

    Raises:
        BundleError: ``name`` is quantised in another way than those that are read; says which.
    """
    if quantization is None:
        return None
    method = str(quantization.get("quant_method", "")).lower()
    if method not in _FORMATS:
        raise BundleError(
            f"{name}: weights quantised by {method or 'an unnamed method'} are not read; gptq and awq are"
        )
    kept_in = ("checkpoint_format", "format", "version")
    form = next(
        (quantization[key] for key in kept_in if quantization.get(key)), _FORMATS[method][0]
    )
    form = str(form).lower()
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    if form not in _FORMATS[method]:
        raise BundleError(
            f"{name}: {method} weights in format {form!r} are not read; {' and '.join(_FORMATS[method])} are"
        )
    if f"{method}-int{bits}" not in PACKED_KINDS:
        raise BundleError(f"{name}: {method} weights of {bits} bits are not read")
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise BundleError(f"{name}: quantization_config.group_size must be a number of rows, or -1")
    if quantization.get("pack_dtype", "int32") != "int32":
        raise BundleError(f"{name}: weights packed in other words than int32 are not read")
    return PackedLayout(
        method=method,
        bits=int(bits),
        group_size=None if size == -1 else size,
        adds_one=form == "gptq",
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A product's weight as it was packed.

    Attributes:
        integers: [K, N] uint8.
        scales: [groups, N] float32.
        zero_points: [groups, N] uint8.
        groups: [K] int64, the group of each row.
    """

    integers: Integers
    scales: FloatArray
    zero_points: Integers
    groups: npt.NDArray[np.int64]

    def weight(self) -> FloatArray:
        """Return the weight [K, N] float32 that it stands for, exactly."""
        whole = self.integers.astype(np.float32)
        whole -= self.zero_points[self.groups]
        whole *= self.scales[self.groups]
        return whole


class PackedFiles:
    """The tensors of a packed checkpoint; a context manager, which holds its files open.

    Args:
        path: folder of the checkpoint.
        layout: of it.
    """

    def __init__(self, path: Path, layout: PackedLayout) -> None:
        self._name, self._path, self._layout = path.name, path, layout
        self._files = ExitStack()
        self._holders: dict[str, Any] = {}

    def __enter__(self) -> PackedFiles:
        try:
            for path in sorted(self._path.glob("*.safetensors")):
                file = self._files.enter_context(safe_open(path, framework="pt"))
                self._holders |= dict.fromkeys(file.keys(), file)
        except SafetensorError as error:
            self._files.close()
            raise BundleError(f"{self._name}: cannot load the weights: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def names(self) -> list[str]:
        """Return the names of packed modules, such as "model.layers.0.mlp.up_proj".

        Raises:
            BundleError: none is packed.
        """
        found = [
            name.removesuffix(".qweight") for name in self._holders if name.endswith(".qweight")
        ]
        if not found:
            raise BundleError(
                f"{self._name}: its configuration says {self._layout.method}, but no weight is packed"
            )
        return found

    def matrix(self, name: str) -> PackedMatrix:
        """Return a packed module's weight.

        Raises:
            BundleError: parts are missing, or do not fit each other.
        """
        parts = {part: self._holders.get(f"{name}.{part}") for part in _PARTS}
        tensors = {
            part: holder.get_tensor(f"{name}.{part}")
            for part, holder in parts.items()
            if holder is not None
        }
        if missing := [part for part in _PARTS[:3] if part not in tensors]:
            raise BundleError(f"{self._name}: {name}.{missing[0]} is missing")
        try:
            return unpack(self._layout, tensors)
        except ValueError as error:
            raise BundleError(f"{self._name}: {name}: {error}") from error

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are no part of a packed module, by name."""
        packed = set(self.names())
        for name, file in self._holders.items():
            module, _, part = name.rpartition(".")
            if module not in packed or part not in _PARTS:
                yield name, file.get_tensor(name)


def unpack(layout: PackedLayout, tensors: Mapping[str, Tensor]) -> PackedMatrix:
    """Return the weight of a packed module's tensors by the names of ``PackedFiles``.

    Raises:
        ValueError: their shapes do not fit each other, or a row's group does not exist.
    """
    words, zero_words = (_words(tensors[part]) for part in ("qweight", "qzeros"))
    scales = tensors["scales"].to(torch.float32).numpy()
    bits = layout.bits
    if layout.method == AWQ:
        integers = _columns(words, bits)[:, _awq_order(words.shape[1])]
        zeros = _columns(zero_words, bits)[:, _awq_order(zero_words.shape[1])]
    else:
        integers = _columns(words.T, bits).T
        # Words as a whole, as GPTQModel does: a zero point of 0 was stored by borrowing from its neighbour.
        one = sum(1 << at for at in range(0, _WORD_BITS, bits)) if layout.adds_one else 0
        zeros = _columns(zero_words + np.uint32(one), bits)
    groups = _groups(layout, tensors.get("g_idx"), len(integers))
    if integers.shape[1] != scales.shape[1] or zeros.shape != scales.shape:
        raise ValueError(
            f"integers {integers.shape}, zero points {zeros.shape} and scales {scales.shape} do not fit each other"
        )
    if len(groups) != len(integers) or groups.min() < 0 or groups.max() >= len(scales):
        raise ValueError(f"{len(integers)} rows do not fit {len(scales)} groups")
    return PackedMatrix(np.ascontiguousarray(integers), scales, zeros, groups)


def _words(tensor: Tensor) -> npt.NDArray[np.uint32]:
    if tensor.dtype is not torch.int32 or tensor.ndim != 2:
        raise ValueError("packed integers must be a matrix of int32")
    return np.asarray(tensor.numpy().view(np.uint32))


def _columns(words: npt.NDArray[np.uint32], bits: int) -> Integers:
    """Return the integers [rows, columns * 32 / bits] of words [rows, columns], low bits first."""
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    found = (words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return found.astype(np.uint8).reshape(len(words), -1)


def _awq_order(num_words: int) -> npt.NDArray[np.int64]:
    """Return where each column lies among unpacked ones."""
    places = np.argsort(_AWQ_COLUMNS)
    return (np.arange(num_words)[:, None] * len(places) + places).reshape(-1)


def _groups(layout: PackedLayout, given: Tensor | None, num_rows: int) -> npt.NDArray[np.int64]:
    if given is not None and given.numel():
        return np.asarray(given.to(torch.int64).numpy())
    return np.arange(num_rows) // (layout.group_size or num_rows)
