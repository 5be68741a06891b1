"""Models of GGUF files: Transformers' own classes, whose matrices stay in the file (``weights.stored``)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.gguf.folder import open_weights
from outrider.export.weights.stored import stored_parameter
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights


def load_stored(
    model_class: Any, config: PretrainedConfig, path: Path, kind: torch.dtype
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the model of a GGUF file's folder in ``kind``, and which weights are missing or of another shape.

    Raises:
        BundleError: weights are unreadable, or none of the model's.
    """
    plain = copy.deepcopy(config)
    del plain.quantization_config
    matrices = open_weights(path).matrices
    others = load_file(path / "model.safetensors")
    with no_init_weights():
        model = model_class.from_config(plain, dtype=kind)
    model.tie_weights()
    left = {*matrices, *others}
    made: dict[int, nn.Parameter] = {}
    missing, mismatched = [], []
    for name, empty in [*model.named_parameters(remove_duplicate=False)]:
        if id(empty) not in made:  # else it is tied to an earlier one
            found = matrices.get(name, others.get(name))
            if found is None:
                missing.append(name)
                continue
            left.remove(name)
            if tuple(found.shape) != tuple(empty.shape):
                mismatched.append((name, found.shape, empty.shape))
            made[id(empty)] = (
                nn.Parameter(found.to(kind), False)
                if isinstance(found, Tensor)
                else stored_parameter(found, kind)
            )
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = made[id(empty)]
    if left:
        raise BundleError(f"{path.name}: {min(left)} is no weight of the model")
    return model, {"missing_keys": missing, "mismatched_keys": mismatched}
