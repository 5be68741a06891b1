"""Kinds of checkpoints, told apart by their configurations: the task that opens one, or why none does."""

from __future__ import annotations

from outrider.engines.base import BundleError
from outrider.export.facts import has_experts
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# Tasks by optimum's names.
TEXT_GENERATION = "text-generation"
TEXT_TO_TEXT = "text2text-generation"

# Layers whose whole state is a key and a value per token.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Present (and not zero) only where a layer keeps a recurrent state.
_RECURRENT_FIELDS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_kernel", "rwkv_head_size")
# Likewise where tokens of all rows compete for places at experts.
_EXPERT_FIELDS = ("num_experts", "num_local_experts")
# Likewise where a token of a source attends to some of it only.
_SPARSE_FIELDS = ("local_radius", "attention_window", "block_size", "num_global_tokens")
_SPEECH_FIELDS = ("speech_encoder_layers", "num_mel_bins", "feature_projection_input_dim")


def task_of(name: str, config: PretrainedConfig) -> str:
    """Return the task whose model class opens a checkpoint.

    Raises:
        BundleError: ``name`` is of a kind that cannot be exported; says why.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        if reason := _why_no_sources(config):
            raise BundleError(f"{name}: {kind} {reason}")
        return TEXT_TO_TEXT
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BundleError(f"{name}: {kind} is not a causal decoder")
    _refuse_recurrent(name, config)
    if has_experts(config) and not _experts_are_known(config):
        raise BundleError(
            f"{name}: {kind} routes tokens to experts that do not go through the interface of Transformers"
        )
    return TEXT_GENERATION


def _experts_are_known(config: PretrainedConfig) -> bool:
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return bool(model_class._can_set_experts_implementation())


def _why_no_sources(config: PretrainedConfig) -> str:
    """Return why a model with an encoder cannot be exported, empty where it can."""

    def is_set(*fields: str) -> str:
        return next((field for field in fields if getattr(config, field, None)), "")

    is_text = config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if not is_text or is_set(*_SPEECH_FIELDS):
        return "does not go from text to text"
    if config.sub_configs:
        return "is made of models with configurations of their own, whose attention is not known"
    if field := is_set(*_EXPERT_FIELDS):
        return f"routes tokens to experts, so that answers depend on the batch ({field} is set)"
    if field := is_set(*_SPARSE_FIELDS):
        return f"attends to parts of a source only ({field} is set)"
    if not AutoModelForSeq2SeqLM._model_mapping[type(config)]._supports_sdpa:
        return "does not attend through the attention interface of Transformers"
    return ""


def _refuse_recurrent(name: str, config: PretrainedConfig) -> None:
    kind = config.model_type
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if others:
        raise BundleError(f"{name}: {kind} has a recurrent state, not a KV cache ({others})")
    for field in _RECURRENT_FIELDS:
        if getattr(config, field, None):
            raise BundleError(f"{name}: {kind} keeps a recurrent state ({field} is set)")
