"""Random models of published shapes and scales pass the certificate: a whole 1B, and 8B's widths with four layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.certificate.parity_cases import certified_prompts
from outrider.export.certificate.reference import reference_logits
from outrider.export.model_config import read_model_config
from outrider.export.pipeline import ExportOptions, export_bundle
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.real]
LOGITS = 35.0
# Llama 3's rotary factors; the tokenizer and so the vocabulary are Qwen's.
COMMON = {
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b_widths": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
}  # fmt: skip


def write_model(shape: str, folder: Path, tokenizer: Path) -> None:
    """Write a random model in bfloat16 whose attention looks somewhere and whose largest logit is ``LOGITS``."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[shape])).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 4
    largest = np.abs(
        reference_logits(model, certified_prompts(read_model_config(model.config), 8))
    ).max()
    model.model.norm.weight *= LOGITS / largest
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_graph_passes(shape: str, models: Path, tmp_path: Path) -> None:
    if not (models / "qwen-coder-0.5b").exists():
        pytest.skip("no real models: qwen-coder-0.5b, whose tokenizer is lent, is missing")
    folder, root = tmp_path / "model", tmp_path / "bundle"
    write_model(shape, folder, models / "qwen-coder-0.5b")
    export_bundle(
        target=folder,
        draft=None,
        out=root,
        options=ExportOptions(max_context=1024, max_batch=4),
        progress=print,
    )
    certificate = load_bundle(root).manifest.certificate["target"]
    print(shape, json.dumps(certificate, default=str))
    shutil.rmtree(tmp_path)
