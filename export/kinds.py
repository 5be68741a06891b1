"""Kinds of checkpoints, told apart by their configurations: the task that opens one, or why none does.

The task of the class that wrote a checkpoint is optimum's to say. Where a class serves several tasks, as BART's, or is
the bare model, Transformers' mappings decide by the architecture.
"""

from __future__ import annotations

import transformers
from optimum.exporters.tasks import TasksManager
from outrider.engines.base import BundleError
from outrider.export.model_config import MIXER_LAYERS, has_experts
from outrider.export.text_part import text_part, whole_class
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# Tasks by optimum's names.
TEXT_GENERATION = "text-generation"
TEXT_TO_TEXT = "text2text-generation"
# Of a model without a head, which may be tied to its embeddings.
_ANY_TASK = "feature-extraction"

# Layers whose whole state is a key and a value per token.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Architectures whose mixers are traced (``graph.tracing.mixers``), and layers that keep nothing beside those.
_WITH_MIXERS = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    }
)
_PLAIN_LAYERS = frozenset({"mlp", "moe"})
_WITHOUT_ATTENTION = frozenset({"mamba2"})
# Layers that attend to chosen tokens of a text only.
_SPARSE_LAYERS = frozenset(
    {
        "chunked_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "indexed_attention",
    }
)
# Present (and not zero) only where a layer keeps a recurrent state.
_RECURRENT_FIELDS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_kernel", "rwkv_head_size")
# Likewise where tokens of all rows compete for places at experts.
_EXPERT_FIELDS = ("num_experts", "num_local_experts")
# Likewise where a token of a source attends to some of it only.
_SPARSE_FIELDS = ("local_radius", "attention_window", "block_size", "num_global_tokens")
_SPEECH_FIELDS = ("speech_encoder_layers", "num_mel_bins", "feature_projection_input_dim")
# What only a traced graph would tell, or none.
_BY_NAME = {
    "cohere_compass_text": "turns positions of three axes, by angles that no table of positions holds",
    "paligemma": "lets the tokens of a prompt see later ones",
    "shieldgemma2": "classifies images",
}
_NO_INTERFACE = "does not attend through the attention interface of Transformers"


def task_of(name: str, config: PretrainedConfig) -> str:
    """Return the task whose model class opens a checkpoint.

    Raises:
        BundleError: ``name`` is of a kind that cannot be exported; says why.
    """
    if reason := _why_not(config):
        raise BundleError(f"{name}: {config.model_type} {reason}")
    return TEXT_TO_TEXT if config.is_encoder_decoder else TEXT_GENERATION


def _why_not(config: PretrainedConfig) -> str:
    """Return why a checkpoint cannot be exported, as far as its configuration tells; empty where it can."""
    if config.is_encoder_decoder:
        return _why_no_sources(config)
    part = text_part(config)
    decoder = part or config
    if decoder.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "is not a causal decoder of Transformers"
    return (
        _BY_NAME.get(config.model_type)
        or _BY_NAME.get(decoder.model_type)
        or (_why_other_task(config) if part is None else _why_other_whole(config))
        or (_why_composite(config) if part is None else "")
        or _why_no_cache(decoder)
        or _why_no_interface(decoder)
        or _why_other_experts(decoder)
    )


def _why_other_whole(config: PretrainedConfig) -> str:
    """Return which class wrote a model of several, where it is not the one whose text part is opened."""
    expected = whole_class(config)
    others = [one for one in config.architectures or () if one != expected]
    return f"is written by {others[0]}, not by {expected}" if others else ""


def _why_other_task(config: PretrainedConfig) -> str:
    """Return what a checkpoint is for, where the class that wrote it is for no text that goes on."""
    for declared in config.architectures or ():
        if declared in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            continue
        model_class = getattr(transformers, declared, None)
        if model_class is None:
            return f"is written by {declared}, which Transformers does not know"
        try:
            task = TasksManager.infer_task_from_model(model_class)
        except ValueError:
            return f"is not a causal decoder, but a {declared}"
        if task not in (TEXT_GENERATION, _ANY_TASK):
            return f"is not a causal decoder: {declared} is for {task}"
    return ""


def _why_composite(config: PretrainedConfig) -> str:
    parts = [
        name
        for name in config.sub_configs
        if getattr(getattr(config, name, None), "model_type", "")
    ]
    if not parts:
        return ""
    return f"is made of several models ({', '.join(sorted(parts))}), without a language model that is known"


def _why_no_cache(config: PretrainedConfig) -> str:
    """Return what layers have instead of a key and a value per token that all later tokens see."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type in _WITH_MIXERS:
        known = MIXER_LAYERS | _PLAIN_LAYERS | {"full_attention"}
        others = sorted(kinds - known)
        return f"has other layers beside recurrent ones ({', '.join(others)})" if others else ""
    others = sorted(kinds - _ATTENTION_LAYERS)
    recurrent = [kind for kind in others if kind not in _SPARSE_LAYERS]
    if recurrent:
        return f"has a recurrent state, not a KV cache alone ({', '.join(recurrent)})"
    if others:
        return f"attends to parts of a text only ({', '.join(others)})"
    for field in _RECURRENT_FIELDS:
        if getattr(config, field, None):
            return f"keeps a recurrent state ({field} is set)"
    if AutoModelForCausalLM._model_mapping[type(config)]._is_stateful:
        return "keeps a recurrent state"
    return ""


def _why_no_interface(config: PretrainedConfig) -> str:
    if config.model_type in _WITHOUT_ATTENTION:
        return ""
    # Transformers looks into the class's module for a call of the interface.
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return "" if model_class._can_set_attn_implementation() else _NO_INTERFACE


def _why_other_experts(config: PretrainedConfig) -> str:
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if has_experts(config) and not model_class._can_set_experts_implementation():
        return "routes tokens to experts that do not go through the interface of Transformers"
    return ""


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
        return _NO_INTERFACE
    return ""
