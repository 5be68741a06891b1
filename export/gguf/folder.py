"""A GGUF file as a checkpoint's folder: configuration, tokenizer and small weights beside a link to the file.

Matrices in blocks stay in the file: ``config.json`` says so by a ``quantization_config`` of the method "gguf", and
``GgufWeights`` reads them under the names of Transformers. All other weights lie in ``model.safetensors``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from outrider.engines.base import BundleError, FloatArray
from outrider.export.gguf.architectures import (
    architecture_of,
    transformers_config,
    weight_name,
)
from outrider.export.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, QuantizedRows, decode, read_values
from outrider.export.gguf.file import GgufFile, GgufTensor, read_gguf
from outrider.export.gguf.tokenizer import read_tokens, write_tokens
from outrider.export.weights.packed.matrices import PACKED_KINDS
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

GGUF = "gguf"
"""Kind of weights that are stored in the blocks of a GGUF file."""
KEPT_KINDS = frozenset({*PACKED_KINDS, GGUF})
"""Kinds of weights that are stored as the checkpoint has them."""

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == ".gguf" and not path.is_dir()


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, of which ``path`` is the only one, or one of several.

    Raises:
        BundleError: one of them is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        paths = [path]
    else:
        count, stem = int(found["parts"]), found["stem"]
        paths = [
            path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
        ]
    for one in paths:
        if not one.is_file():
            raise BundleError(f"{one.name}: no such file")
    return paths


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """A matrix of a file under another order of its rows.

    Attributes:
        num_heads: of rows that lie in rotary pairs head by head; None where they are in order.
    """

    tensor: GgufTensor
    num_heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return N and K."""
        return self.tensor.shape

    def values(self) -> FloatArray:
        """Return the matrix [N, K] float32."""
        found = read_values(self.tensor)
        return found if self.num_heads is None else found[self._order()]

    def rows(self) -> QuantizedRows:
        """Return the matrix as the file's integers, of a type of ``BLOCK_TYPES``."""
        found = decode(self.tensor)
        return found if self.num_heads is None else found.in_order(self._order())

    def _order(self) -> npt.NDArray[np.int64]:
        assert self.num_heads is not None
        rows = np.arange(self.shape[0]).reshape(self.num_heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


class GgufWeights:
    """The weights of a file by their names in Transformers.

    Attributes:
        matrices: those in blocks.
        others: those in floating point.

    Raises:
        BundleError: a tensor is none of the architecture's, or of a type that is not read.
    """

    def __init__(self, file: GgufFile) -> None:
        architecture = architecture_of(file)
        self.file, self.architecture = file, architecture
        self.config = transformers_config(file, architecture)
        self.matrices: dict[str, GgufMatrix] = {}
        self.others: dict[str, GgufMatrix] = {}
        for place, tensor in file.tensors.items():
            name = weight_name(file, architecture, place)
            if name is None:
                continue
            matrix = GgufMatrix(tensor, self._num_heads(place, tensor))
            if tensor.kind in BLOCK_TYPES and len(tensor.shape) == 2:
                self.matrices[name] = matrix
            elif tensor.kind in FLOAT_TYPES:
                self.others[name] = matrix
            else:
                raise BundleError(f"{file.name}: {place[:80]!r} of type {tensor.kind} is not read")

    def _num_heads(self, place: str, tensor: GgufTensor) -> int | None:
        """Return the heads whose rows are to be put in order.

        Raises:
            BundleError: rows are no heads of pairs.
        """
        fields = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
        field = next((field for part, field in fields.items() if part in place), None)
        if field is None or not self.architecture.is_interleaved:
            return None
        count: int = self.config[field]
        if tensor.shape[0] % (2 * count):
            raise BundleError(f"{self.file.name}: {place[:80]!r} has no {count} heads of pairs")
        return count

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights in floating point; beside blocks they are float32."""
        found = {}
        for name, matrix in self.others.items():
            values = torch.from_numpy(matrix.values())
            kind = torch.float32 if self.matrices else _FLOATS.get(matrix.tensor.kind)
            if self.architecture.norms_hold_one and name.endswith("norm.weight"):
                values -= 1
            found[name] = values if kind is None else values.to(kind)
        return found

    def refuse_unkept(self) -> None:
        """Refuse blocks that are not stored as they are.

        Raises:
            BundleError: names the first.
        """
        for name, matrix in self.matrices.items():
            if not BLOCK_TYPES[matrix.tensor.kind].is_kept:
                raise BundleError(
                    f"{self.file.name}: {name} of type {matrix.tensor.kind} is not kept as it is; say what its weights "
                    "become, for example --weights int8"
                )


def write_folder(path: Path, folder: Path) -> None:
    """Write a checkpoint's folder of a GGUF file.

    Args:
        path: the file, or one of its parts.
        folder: an empty one.

    Raises:
        BundleError: the file is not readable, or its model or tokenizer is none that is read.
    """
    parts = parts_of(path)
    weights = GgufWeights(read_gguf(parts))
    tokens = read_tokens(weights.file)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[weights.architecture.model_type]
    config = weights.config | tokens.special_ids | {"architectures": [architecture]}
    if weights.matrices:
        config["quantization_config"] = {"quant_method": GGUF}
    generation = {"eos_token_id": tokens.end_ids or None}
    save_file(weights.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    for number, part in enumerate(parts):
        (folder / f"{number:05}.gguf").symlink_to(part.resolve())
    tokenizer, tokenizer_config = write_tokens(tokens)
    texts = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps(generation),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def open_weights(folder: Path) -> GgufWeights:
    """Return the weights of a folder that ``write_folder`` wrote, or of one like it.

    Raises:
        BundleError: there are none.
    """
    parts = sorted(folder.glob("*.gguf"))
    if not parts:
        raise BundleError(f"{folder.name}: its weights are in a GGUF file, which is missing")
    return GgufWeights(read_gguf(parts))
