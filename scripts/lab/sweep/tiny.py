"""Tiny random checkpoints of any architecture, made from its configuration's class."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from outrider.export.text_part import text_part
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scripts.check_parity import GEMMA4_CACHES

MAX_CONTEXT = 64
NUM_POSITIONS = 96
WINDOW = 24
VOCAB_SIZE = 120
# Sizes by the names that configurations have for them; a name that a class lacks is passed over.
_SIZES: dict[str, int | float] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim_model"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "embedding_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "dim_ff", "d_inner"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "mlp_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp", "expert_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    "rotary_dim": 8,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "swa_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), WINDOW),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_sequence_length"), NUM_POSITIONS
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_topk"), 16),
    **dict.fromkeys(("index_n_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    "query_pre_attn_scalar": 16,
    "initializer_range": 0.1,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
# Classes whose sizes hang together in ways of their own.
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": GEMMA4_CACHES,
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "nemotron_h": {"n_groups": 2},
    "mimo_v2_flash": {"v_head_dim": 12},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
    # As in every published checkpoint; the class's own are all attention.
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    # Queries grow with their position from this one on.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        }
    },
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# A fourth of a head's 8 angles by one axis, the rest by two.
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_SPECIAL |= {
    kind: {"text_config": {"rope_parameters": _AXES}}
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
}
_SPECIAL["gemma3n"] = {"text_config": _SPECIAL["gemma3n_text"]}
_SPECIAL |= {
    kind: {"text_config": _SPECIAL["gemma4_text"]} for kind in ("gemma4", "gemma4_unified")
}
_SPECIAL["gemma4_unified_text"] = _SPECIAL["gemma4_text"]
_SPECIAL["qwen2_vl"] |= {"vision_config": {"depth": 2, "embed_dim": 64}}
# Classes whose own sizes will do, since none of their models is ever made.
_AS_THEY_ARE = frozenset({"dots3_note", "fast_vlm", "inkling2", "nemotron_h_omni", "perception_lm"})
# Sizes that a class has and lets nobody set, or that must fit others.
_UNSET: dict[str, tuple[str, ...]] = {
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
}


def tiny_config(kind: str) -> PretrainedConfig:
    """Return a configuration of an architecture, by its ``model_type``, with sizes of a few dozen."""
    if kind in _AS_THEY_ARE:
        return CONFIG_MAPPING[kind]()
    return _tiny(CONFIG_MAPPING[kind], _SPECIAL.get(kind, {}), _UNSET.get(kind, ()))


def _tiny(
    config_class: type[PretrainedConfig], special: dict[str, Any], unset: tuple[str, ...] = ()
) -> PretrainedConfig:
    usual = config_class(**special)
    fields = {name: value for name, value in _SIZES.items() if _is_size(usual, name)}
    fields = {name: value for name, value in fields.items() if name not in unset}
    if "kv_lora_rank" in fields:  # every head has a key of its own, and only a part of it is turned
        fields |= {"num_key_value_heads": 4, "head_dim": 8}
    for index, name in enumerate(_TOKENS):
        if getattr(usual, name, None) is not None:
            fields[name] = index + 1
    fields |= _layers(usual, fields)
    for name in config_class.sub_configs:
        sub = getattr(usual, name, None)
        if isinstance(sub, PretrainedConfig):
            fields[name] = _tiny(type(sub), special.get(name, {}))
    made = fields.keys() & config_class.sub_configs.keys()
    own = {name: value for name, value in special.items() if name not in made}
    return config_class(**(fields | own))


def _is_size(usual: PretrainedConfig, name: str) -> bool:
    """Return whether a configuration has a size of this name that may be set."""
    own = getattr(type(usual), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        value = getattr(usual, name)
    except (AttributeError, AmbiguousGlobalPerLayerAttributeError):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number or name in ("num_key_value_heads", "head_dim")


def _layers(usual: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return as many layers as there are kinds, two at least."""
    own = getattr(type(usual), usual.attribute_map.get("layer_types", "layer_types"), None)
    kinds = getattr(usual, "layer_types", None)
    if not kinds or isinstance(own, property):
        return {}
    distinct = list(dict.fromkeys(kinds))
    chosen = distinct * (2 if len(distinct) == 1 else 1)
    names = ("num_hidden_layers", "num_layers", "n_layer")
    return {"layer_types": chosen} | dict.fromkeys(fields.keys() & names, len(chosen))


def declared_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration as the model's class writes it; as it is where the class cannot be made."""
    try:
        with torch.device("meta"):
            model = _model_class(config).from_config(copy.deepcopy(config))
    except (
        Exception
    ):  # a stranger's code; whether it can be refused by its configuration is asked next
        return config
    model.config.architectures = [type(model).__name__]
    return model.config


def _model_class(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM if text_part(config) is None else AutoModelForImageTextToText


def random_model(config: PretrainedConfig, seed: int = 5) -> PreTrainedModel:
    """Return a model of a configuration, every parameter random."""
    torch.manual_seed(seed)
    model = _model_class(config).from_config(config).eval()
    for parameter in model.parameters():  # biases and norms too: an ignored one must show
        if parameter.is_floating_point():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save_checkpoint(kind: str, folder: Path) -> None:
    """Write a tiny checkpoint of an architecture to a folder."""
    random_model(tiny_config(kind)).save_pretrained(folder)
