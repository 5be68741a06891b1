"""Models of checkpoints that are packed (``matrices``): Transformers' own classes, with weights in floating point.

Transformers would load such a checkpoint with a package of kernels for GPUs; here only its weights are read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.weights.packed.matrices import PackedFiles, PackedLayout
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D


def load_unpacked(
    model_class: Any, config: PretrainedConfig, path: Path, layout: PackedLayout, kind: torch.dtype
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the model of a packed checkpoint in ``kind``, and what Transformers found missing.

    Float32 holds its weights exactly.

    Raises:
        BundleError: weights are unreadable, or none of the model's.
    """
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with no_init_weights(), torch.device("meta"):
        empty = model_class.from_config(plain)
    modules = dict(empty.named_modules())
    state: dict[str, Tensor] = {}
    with PackedFiles(path, layout) as files:
        for name in files.names():
            weight = torch.from_numpy(files.matrix(name).weight())
            # Conv1D holds [K, N], Linear [N, K].
            is_turned = not isinstance(modules.get(name), Conv1D)
            state[f"{name}.weight"] = weight.T.contiguous() if is_turned else weight
        state |= files.others()
    model, found = type(empty).from_pretrained(
        None,
        config=plain,
        state_dict=state,
        dtype=kind,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # Scales of an activation, for example, which the plain model does not have.
    if names := sorted(found["unexpected_keys"]):
        raise BundleError(f"{path.name}: {names[0]} is no weight of the model")
    return model, found
