"""Every architecture of GGUF files that is read: the model of a file is the one that was written."""

from pathlib import Path

import pytest
import torch
from outrider.export.checkpoint import open_checkpoint
from outrider.export.gguf.architectures import ARCHITECTURES
from outrider.export.gguf.folder import write_folder
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.export.gguf.gguf_models import architecture_name, write_gguf

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
MODELS = {
    "llama": ("llama", {}),
    "llama with biases, untied, heads of their own size": (
        "llama",
        {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 32},
    ),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-5}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "attn_logit_softcapping": None,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8}),
    "granite": ("granite", SCALES),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
}


def random_model(name: str) -> PreTrainedModel:
    model_type, sizes = MODELS[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**SIZES, "tie_word_embeddings": True, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms too: an ignored one must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def reopened(path: Path, folder: Path) -> PreTrainedModel:
    folder.mkdir()
    write_folder(path, folder)
    return open_checkpoint(folder, max_context=64).load()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_a_file_answers_as_the_one_that_was_written(tmp_path: Path, name: str):
    model = random_model(name)
    write_gguf(model, tmp_path / "model.gguf")
    found = reopened(tmp_path / "model.gguf", tmp_path / "folder")
    tokens = torch.randint(0, 96, (2, 24), generator=torch.manual_seed(1))
    with torch.no_grad():
        expected, answered = (one(input_ids=tokens).logits for one in (model, found))
    # Norms that hold 1 are rounded; angles are computed of a float32.
    assert (answered - expected).abs().max() < 2e-5 * expected.abs().max()


def test_every_architecture_is_tried():
    assert {architecture_name(random_model(name)) for name in MODELS} == ARCHITECTURES.keys()
