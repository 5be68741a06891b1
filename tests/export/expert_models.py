"""Tiny random models with experts, of several families."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_POSITIONS = 96
NUM_EXPERTS = 4
_SIZES: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
}
_SMALL: dict[str, object] = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 48}
# Keys of 24 columns, values of 12, both expanded from 16 that all heads share; experts in two groups, one shared.
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 0,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
FAMILIES: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS, "sliding_window": None, "num_hidden_layers": 2},
    "qwen3_moe": _SMALL | {"head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": NUM_EXPERTS},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
}


def random_experts(family: str, **other_sizes: object) -> PreTrainedModel:
    """Return a model of a family, every parameter random, experts of its own chosen by two for a token."""
    torch.manual_seed(5)
    sizes = _SIZES | FAMILIES[family] | other_sizes
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():  # biases and norms too: an ignored one must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model
