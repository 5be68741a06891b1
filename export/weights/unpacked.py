"""Models of checkpoints that are packed (``packed``): Transformers' own classes, with weights in floating point.

Transformers would load such a checkpoint with a package of kernels for GPUs; here only its weights are read.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.weights.packed import PackedFiles, PackedLayout
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

_MOST_NAMED = 3


def load_unpacked(
    model_class: Any, config: PretrainedConfig, path: Path, layout: PackedLayout, kind: torch.dtype
) -> PreTrainedModel:
    """Return the model of a packed checkpoint in ``kind``; float32 holds its weights exactly.

    Raises:
        BundleError: weights are missing, unreadable or not the model's.
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
        None, config=plain, state_dict=state, dtype=kind, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[problem])):
            words = problem.replace("_", " ")
            raise BundleError(f"{path.name}: {words}: {', '.join(names[:_MOST_NAMED])}")
    loaded: PreTrainedModel = model
    return loaded
