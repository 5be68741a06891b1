"""GGUF files of tiny random models, written with the names of the package gguf, as llama.cpp's converters write them.

What those converters change (rows of queries and keys, norms) is written here once more, and shares nothing with what
reads it back.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from tests.export.gguf.test_blocks import random_blocks

ARCHES = gguf.MODEL_ARCH_NAMES
# Converters that put the rows of a rotary pair side by side, and those that add 1 to norms.
INTERLEAVED = {"llama", "granite", "smollm3"}
HOLDING_ONE = {"gemma", "gemma2", "gemma3_text"}
TOKENS = [chr(33 + index) for index in range(94)]


def architecture_name(model: PreTrainedModel) -> str:
    return model.config.model_type.removesuffix("_text")


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kinds: dict[str, str] | None = None,
    factors: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Write a model; matrices whose names have a part are random blocks of a type, all else is float32.

    Returns:
        Values of the blocks, as ggml reads them, by the model's names.
    """
    name = architecture_name(model)
    arch = next(arch for arch, text in ARCHES.items() if text == name)
    writer = gguf.GGUFWriter(path, name)
    config = model.config
    write_facts(writer, config)
    write_tokens(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    drawn: dict[str, np.ndarray] = {}
    for seed, (key, tensor) in enumerate(tensors.items()):
        values, place = tensor.float().numpy(), names.get_name(key, (".weight", ".bias"))
        if config.model_type in INTERLEAVED:
            values = rows_paired(key, values, config)
        if config.model_type in HOLDING_ONE and key.endswith("norm.weight"):
            values = values + np.float32(1)
        kind = next((kind for part, kind in (kinds or {}).items() if part in key), None)
        if kind is not None and values.ndim == 2:
            blocks = random_blocks(kind, *values.shape, seed=seed)
            drawn[key] = gguf.quants.dequantize(blocks, Kind[kind])
            if config.model_type in INTERLEAVED:
                blocks = rows_paired(key, blocks, config)
            writer.add_tensor(place, blocks, raw_dtype=Kind[kind])
        else:
            writer.add_tensor(place, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return drawn


def rows_paired(key: str, values: np.ndarray, config) -> np.ndarray:
    if ".q_proj." in key:
        return paired(values, config.num_attention_heads)
    return paired(values, config.num_key_value_heads) if ".k_proj." in key else values


def paired(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order of rotary pairs (0, 1), of those in the order (0, D / 2)."""
    pairs = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write_facts(writer: gguf.GGUFWriter, config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def write_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A tokenizer of single characters, with an end and a merge."""
    tokens = [*TOKENS, "ab", "<|im_end|>"]
    kinds = [1] * (len(tokens) - 1) + [3]
    fill = vocab_size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in range(fill))])
    writer.add_token_types([*kinds, *([5] * fill)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
