"""Tiny random models some of whose layers keep a recurrent state, or a window of a convolution's inputs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import VOCAB_SIZE, write_tokenizer

_SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_DELTA: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 3,
}
_NO_EXPERTS: dict[str, object] = {"num_local_experts": 0, "num_experts_per_tok": 0}
_EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_KIMI: dict[str, object] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": _DELTA
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
    },
    "qwen3_next": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | _NO_EXPERTS
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 96},
    "falcon_h1": _MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 128, "head_dim": 16},
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
    },
    "kimi_linear": _KIMI
    | {"linear_num_heads": 4, "linear_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "bailing_hybrid": _KIMI
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"num_nextn_predict_layers": 0},
    "minimax": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 8,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "head_dim": 16,
    },
}


def random_hybrid(family: str, seed: int = 5, **other_sizes: object) -> PreTrainedModel:
    """Return a tiny model of a family, every parameter random and large enough that states matter."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB_SIZE} | _SIZES | FAMILIES[family] | other_sizes
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        elif name.endswith("dt_bias"):  # steps from 1e-4, as trained models have them, to 1
            parameter.data = torch.linspace(-9.0, 1.0, len(parameter))
        elif name.endswith(
            ".D"
        ):  # as it begins, what passes the scan by hides what the scan rounds
            parameter.data *= 0.1
        elif "A_log" not in name:  # biases and norms too: an ignored one must show
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def write_hybrid(family: str, folder: Path, seed: int = 5, **other_sizes: object) -> None:
    """Save a tiny model of a family, with a tokenizer, to ``folder``."""
    random_hybrid(family, seed, **other_sizes).save_pretrained(folder)
    write_tokenizer(folder)
