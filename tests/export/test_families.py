"""Every family exports without a line of its own, and answers as PyTorch does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from export.checkpoint import model_facts
from export.parity import check_parity
from export.quantize import quantize_file
from export.to_onnx import export_model
from export.tree_graph import derive_tree_graphs
from export.tree_parity import check_tree_parity

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
FAMILIES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96, "vocab_size": 128},
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    overrides = FAMILIES[family]
    sizes = overrides if family == "gpt2" else SIZES | overrides
    config = AutoConfig.for_model(
        family, **{name: value for name, value in sizes.items() if value is not None}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms too: an ignored one must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    path = tmp_path / "model.onnx"
    export_model(model, path)
    certificate = check_parity(model, path, model_facts(config), max_gamma=4)
    assert certificate["rollback"]["num_compared"] > 0
    derive_tree_graphs(path)
    trees = check_tree_parity(model, path, model_facts(config), max_tree_nodes=40)
    assert trees["tree_masks"]["num_greedy_equal"] == trees["tree_masks"]["num_compared"] == 3 * 40
    if family == "gpt2":  # the one whose projections are Gemm nodes
        assert quantize_file(path, "int8") == 2 * 4 + 1
        check_parity(model, path, model_facts(config), max_gamma=4, tolerance=0.5)
    assert model.config._attn_implementation != "outrider_kv"
