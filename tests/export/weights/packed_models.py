"""Checkpoints packed as AutoGPTQ, GPTQModel and AutoAWQ do, of random integers.

The packers follow the published layouts integer by integer and share nothing with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import write_llama

Array = npt.NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a test's checkpoint is packed; ``group_size`` -1 is one group."""

    method: str
    bits: int = 4
    group_size: int = 32
    form: str = "gptq"
    is_symmetric: bool = False
    orders_rows: bool = False

    def config(self) -> dict[str, object]:
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "version": "gemm",
                "zero_point": True,
            }
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "checkpoint_format": self.form,
            "desc_act": self.orders_rows,
            "sym": self.is_symmetric,
        }


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integers [K, N], scales and zero points [groups, N], the group of each row [K], and the weight [K, N]."""

    integers: Array
    scales: npt.NDArray[np.float16]
    zeros: Array
    groups: Array

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        whole = self.integers - self.zeros[self.groups]
        return whole.astype(np.float32) * self.scales[self.groups].astype(np.float32)


def draw(packing: Packing, shape: tuple[int, int], seed: int, order: Array) -> Quantised:
    generator = np.random.default_rng(seed)
    rows, columns = shape
    size = rows if packing.group_size == -1 else packing.group_size
    count, most = rows // size, 1 << packing.bits
    groups = np.arange(rows) // size
    if packing.orders_rows:
        groups = groups[np.argsort(order)]
    zeros = np.full((count, columns), most // 2)
    if not packing.is_symmetric:
        # A zero point of 0 is stored as -1 by format "gptq": in all bits of its neighbours too.
        zeros = generator.integers(1, most, zeros.shape)
    # Logits of a size that rounding is judged at as it is.
    scales = generator.uniform(0.5, 1.5, zeros.shape) / most / 4
    integers = generator.integers(0, most, shape)
    return Quantised(integers, scales.astype(np.float16), zeros, groups)


def words(values: Iterable[Iterable[int]], bits: int) -> torch.Tensor:
    """Return words of 32 bits, the first of their integers lowest."""
    made = [
        [sum(int(one) << (bits * at) for at, one in enumerate(word)) for word in row]
        for row in values
    ]
    return torch.from_numpy(np.array(made, np.uint32).view(np.int32))


def pack(packing: Packing, given: Quantised) -> dict[str, torch.Tensor]:
    per, bits = 32 // packing.bits, packing.bits
    rows, columns = given.integers.shape
    if packing.method == "awq":

        def awq(matrix: Array) -> torch.Tensor:
            return words(
                [
                    [[row[at + place] for place in AWQ_ORDER] for at in range(0, columns, per)]
                    for row in matrix
                ],
                bits,
            )

        return {
            "qweight": awq(given.integers),
            "qzeros": awq(given.zeros),
            "scales": torch.from_numpy(given.scales),
        }
    qweight = words(
        [
            [
                [given.integers[at + place, column] for place in range(per)]
                for column in range(columns)
            ]
            for at in range(0, rows, per)
        ],
        bits,
    )
    stored = given.zeros - (packing.form == "gptq")
    qzeros = words([[row[at : at + per] for at in range(0, columns, per)] for row in stored], bits)
    return {
        "qweight": qweight,
        "qzeros": qzeros,
        "scales": torch.from_numpy(given.scales),
        "g_idx": torch.from_numpy(given.groups.astype(np.int32)),
    }


def write_packed_llama(folder: Path, packing: Packing) -> dict[str, Quantised]:
    """Save a random Llama whose products but the head are packed; return what they are by module."""
    write_llama(folder, num_layers=1, hidden_size=64, seed=3)
    return pack_folder(folder, packing, "proj")


def pack_folder(
    folder: Path, packing: Packing, part_of_names: str, *, is_turned: bool = True
) -> dict[str, Quantised]:
    """Pack random weights instead of those in a checkpoint whose names have a part; return them by module.

    Linear modules store [N, K], turned, those of GPT-2 [K, N]. Weights too narrow for a word, as gates, stay.
    """
    tensors, drawn = load_file(folder / "model.safetensors"), {}
    products = [
        name
        for name, one in tensors.items()
        if part_of_names in name and one.ndim == 2 and min(one.shape) >= 32 // packing.bits
    ]
    for seed, name in enumerate(products):
        shape = tuple(tensors.pop(name).shape)
        rows, columns = shape[::-1] if is_turned else shape
        module = name.removesuffix(".weight")
        # Rows are ordered by one input's activations, so what reads one input has one order.
        order = np.random.default_rng(rows).permutation(rows)
        drawn[module] = draw(packing, (rows, columns), seed, order)
        tensors |= {f"{module}.{part}": one for part, one in pack(packing, drawn[module]).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": packing.config()}
    file.write_text(json.dumps(config))
    return drawn


def plain_model(
    folder: Path, drawn: dict[str, Quantised], work: Path, *, is_turned: bool = True
) -> PreTrainedModel:
    """Return Transformers' model of the same weights in float32, by a checkpoint without packed ones."""
    work.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (work / "config.json").write_text(json.dumps(config))
    tensors = {
        name: one
        for name, one in load_file(folder / "model.safetensors").items()
        if name.rpartition(".")[0] not in drawn or name.endswith(".bias")
    }
    tensors |= {
        f"{module}.weight": torch.from_numpy((one.weight.T if is_turned else one.weight).copy())
        for module, one in drawn.items()
    }
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(work, dtype=torch.float32).eval()
    return model
