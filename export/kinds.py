"""Kinds of checkpoints, told apart by their configurations: the task that opens one, or why none does."""

from __future__ import annotations

from outrider.engines.base import BundleError
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Tasks by optimum's names.
TEXT_GENERATION = "text-generation"

# Layers whose whole state is a key and a value per token.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Present (and not zero) only where a layer keeps a recurrent state.
_RECURRENT_FIELDS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_kernel", "rwkv_head_size")


def task_of(name: str, config: PretrainedConfig) -> str:
    """Return the task whose model class opens a checkpoint.

    Raises:
        BundleError: ``name`` is of a kind that cannot be exported; says why.
    """
    kind = config.model_type
    if config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BundleError(f"{name}: {kind} is not a causal decoder")
    _refuse_recurrent(name, config)
    return TEXT_GENERATION


def _refuse_recurrent(name: str, config: PretrainedConfig) -> None:
    kind = config.model_type
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if others:
        raise BundleError(f"{name}: {kind} has a recurrent state, not a KV cache ({others})")
    for field in _RECURRENT_FIELDS:
        if getattr(config, field, None):
            raise BundleError(f"{name}: {kind} keeps a recurrent state ({field} is set)")
