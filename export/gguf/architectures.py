"""Architectures of GGUF files as Transformers knows them: configurations and names of weights.

An architecture whose place is not written here is refused by name, and so is a tensor: nothing is guessed.

Source: llama.cpp, convert_hf_to_gguf.py (what each model class writes) and llama-arch.cpp (names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from outrider.engines.base import BundleError
from outrider.export.gguf.blocks import read_values
from outrider.export.gguf.file import GgufFile
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Config = dict[str, Any]

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PROJECTIONS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = _PROJECTIONS | {"ffn_norm": "post_attention_layernorm"}
_POST_NORMS = _PROJECTIONS | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<part>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Models of Gemma that scale queries by hidden size and heads, by their layers: 27B of both generations.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PATTERN, _GEMMA3_LOCAL_THETA = 6, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a file's model is called in Transformers.

    Attributes:
        model_type: of its configuration.
        names: of a layer's modules by those of the file.
        is_interleaved: rows of queries and keys are in the order of rotary pairs (0, 1), not (0, D / 2).
        norms_hold_one: norms are stored with 1 added.
        fields: of its configuration, by keys behind that of the architecture, where the file has them.
    """

    model_type: str
    names: Mapping[str, str]
    is_interleaved: bool = False
    norms_hold_one: bool = False
    fields: Mapping[str, str] | None = None


_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_GRANITE_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
ARCHITECTURES = {
    "llama": Architecture(model_type="llama", names=_LLAMA, is_interleaved=True),
    "qwen2": Architecture(model_type="qwen2", names=_LLAMA),
    "qwen3": Architecture(model_type="qwen3", names=_LLAMA | _HEAD_NORMS),
    "gemma": Architecture(
        model_type="gemma",
        names=_LLAMA | {"ffn_norm": "post_attention_layernorm"},
        norms_hold_one=True,
    ),
    "gemma2": Architecture(
        model_type="gemma2", names=_GEMMA2, norms_hold_one=True, fields=_SOFTCAPS
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        names=_GEMMA2 | _HEAD_NORMS,
        norms_hold_one=True,
        fields=_SOFTCAPS,
    ),
    "phi3": Architecture(
        model_type="phi3", names=_PHI3, fields={"attention.sliding_window": "sliding_window"}
    ),
    "granite": Architecture(
        model_type="granite", names=_LLAMA, is_interleaved=True, fields=_GRANITE_SCALES
    ),
    "olmo2": Architecture(model_type="olmo2", names=_POST_NORMS | _HEAD_NORMS),
    "smollm3": Architecture(model_type="smollm3", names=_LLAMA, is_interleaved=True),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file.

    Raises:
        BundleError: it is none that is read.
    """
    name = file.pairs.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BundleError(
            f"{file.name}: architecture {str(name)[:40]!r} is not read; {', '.join(ARCHITECTURES)} are"
        )
    if _Keys(file).optional("expert_count", 0):
        raise BundleError(f"{file.name}: layers of experts are not read from GGUF files")
    return ARCHITECTURES[name]


def weight_name(file: GgufFile, architecture: Architecture, name: str) -> str | None:
    """Return the name in Transformers of a tensor of a file; None for one that is no weight.

    Raises:
        BundleError: the architecture has no such tensor.
    """
    if name == _ROPE_FACTORS:
        return None
    found = _TENSOR.fullmatch(name)
    module = None
    if found is not None:
        names = _OUTER_NAMES if found["layer"] is None else architecture.names
        module = names.get(found["name"])
    if found is None or module is None:
        raise BundleError(
            f"{file.name}: {name[:80]!r} is no tensor of {architecture.model_type} that is read"
        )
    prefix = "" if found["layer"] is None else f"model.layers.{int(found['layer'])}."
    return f"{prefix}{module}.{found['part']}"


def transformers_config(file: GgufFile, architecture: Architecture) -> Config:
    """Return the fields of ``config.json`` for a file's model.

    Raises:
        BundleError: a key is missing or no number, or the angles of positions are scaled in a way that is not read.
    """
    keys = _Keys(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BundleError(f"{file.name}: token_embd.weight must be a matrix")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    config: Config = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.size("block_count"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": keys.size("attention.key_length", hidden // heads),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    for key, field in (architecture.fields or {}).items():
        if keys.optional(key, None) is not None:
            config[field] = keys.size(key) if field == "sliding_window" else keys.number(key)
    rope = _rope(file, keys, config)
    config["rope_parameters"] = rope
    if architecture.model_type in ("gemma2", "gemma3_text"):
        config |= _gemma(file, config, rope)
    return config


def _gemma(file: GgufFile, config: Config, rope: Config) -> Config:
    """Return what files of Gemma do not say."""
    name = file.pairs["general.architecture"]
    by_hidden = config["num_hidden_layers"] == _SCALED_BY_HIDDEN[name]
    size = (
        config["hidden_size"] // config["num_attention_heads"] if by_hidden else config["head_dim"]
    )
    found: Config = {"query_pre_attn_scalar": size}
    if name == "gemma3":
        kinds = [
            "sliding_attention" if (layer + 1) % _GEMMA3_PATTERN else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
        local = {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA}
        found |= {
            "layer_types": kinds,
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        }
    return found


def _rope(file: GgufFile, keys: _Keys, config: Config) -> Config:
    theta = keys.number("rope.freq_base", 10_000.0)
    if (rotated := keys.size("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = keys.optional("rope.scaling.type", "none")
    if any(name.startswith("rope_factors_") for name in file.tensors):
        kind = "longrope"
    if kind == "none":
        rope = {"rope_type": "default", "rope_theta": theta}
    elif kind in ("linear", "yarn"):
        rope = {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": keys.number("rope.scaling.factor"),
        }
    else:
        raise BundleError(f"{file.name}: positions scaled by {str(kind)[:40]!r} are not read")
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    if (factors := file.tensors.get(_ROPE_FACTORS)) is not None:
        return _llama3_rope(file.name, config, theta, read_values(factors).reshape(-1))
    return rope


def _llama3_rope(name: str, config: Config, theta: float, factors: Any) -> Config:
    """Return the scaling of Llama 3 that divides inverse frequencies by a file's factors.

    Raises:
        BundleError: no published one does.
    """
    size = config["head_dim"]
    plain = 1.0 / theta ** (np.arange(0, size, 2) / size)
    for factor in (8.0, 32.0, 16.0, 4.0):
        rope = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled = PretrainedConfig(**{**config, "rope_parameters": rope})
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
        if factors.shape == plain.shape and np.allclose(plain / found.numpy(), factors, rtol=1e-4):
            return rope
    raise BundleError(f"{name}: {_ROPE_FACTORS} are not the factors of a known scaling")


class _Keys:
    """Metadata of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._name, self._pairs = file.name, file.pairs
        self._prefix = file.pairs.get("general.architecture")

    def optional(self, key: str, default: Any) -> Any:
        return self._pairs.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BundleError(f"{self._name}: {self._prefix}.{key}: must be one number")
        return float(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value.is_integer() or value < 1:
            raise BundleError(f"{self._name}: {self._prefix}.{key}: must be a whole number above 0")
        return int(value)
