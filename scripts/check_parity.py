"""Exported float32 graphs against PyTorch at a long context, every family that the tests export."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
import typer
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity import (
    Bound,
    CaseResult,
    bound_by_rounding,
    compare_logits,
)
from outrider.export.certificate.reference import Reference
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GPT2: dict[str, object] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
# Narrow, so that texts of a few dozen tokens reach beyond it.
WINDOW: dict[str, object] = {"sliding_window": 20}
MIXED: dict[str, object] = WINDOW | {
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
# What a family's configuration needs beside the sizes; None leaves a size out.
# Caches of 2 heads of 16 in layers with a window, of 1 head of 24 in others; the last two read the first two's.
GEMMA4_CACHES: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 24,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gpt2": GPT2,
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "phi3": WINDOW,
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "gemma4_text": WINDOW
    | GEMMA4_CACHES
    | {"vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8},
    "mimo_v2_flash": MIXED
    | {
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
    "granite_swa": MIXED | {"bos_token_id": None, "eos_token_id": None},
}
# After the prompt in two chunks: a verification, a single token, another verification.
TAIL = (5, 1, 5)


def random_model(
    family: str, num_positions: int, seed: int = 5, **other_sizes: object
) -> PreTrainedModel:
    """A tiny model of a family with room for ``num_positions`` tokens, every parameter random."""
    torch.manual_seed(seed)
    if family == "gpt2":
        sizes: dict[str, object] = GPT2 | {"n_positions": num_positions}
    else:
        sizes = SIZES | {"max_position_embeddings": num_positions} | FAMILIES[family]
    sizes |= other_sizes
    known = {name: value for name, value in sizes.items() if value is not None}
    config = AutoConfig.for_model(family, **known)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():  # biases and norms too: an ignored one must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def measure(family: str, context: int, folder: Path) -> tuple[CaseResult, Bound]:
    """Every position of a context and its tail, through the cache, against one pass of PyTorch; what is allowed."""
    model = random_model(family, context + sum(TAIL))
    path = folder / family / "model.onnx"
    path.parent.mkdir()
    export_model(model, path)
    model_config = read_model_config(model.config)
    tokens = np.random.default_rng(0).integers(0, model_config.vocab_size, (2, context + sum(TAIL)))
    runner = GraphRunner(path, model_config, batch=2, capacity=context + sum(TAIL) + 16)
    cuts = list(itertools.accumulate((context - context // 2, context // 2, *TAIL), initial=0))
    answered = [
        runner.extend(tokens[:, begin:end], np.full(2, begin))
        for begin, end in itertools.pairwise(cuts)
    ]
    reference = Reference(model)
    found = compare_logits(np.concatenate(answered, axis=1), reference.logits(tokens))
    return found, bound_by_rounding(reference, tokens)


def main(context: int = 512) -> None:
    """Export every family with random weights and exit 1 where a logit differs by more than rounding explains."""
    table = Table(title=f"float32 graphs against PyTorch, {context} tokens of context and a tail")
    for head in ("family", "max |logit difference|", "allowed", "greedy agreement"):
        table.add_column(head, justify="right")
    has_passed = True
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            found, bound = measure(family, context, Path(scratch))
            has_passed &= found.max_difference <= bound.value
            table.add_row(
                family,
                f"{found.max_difference:.2g}",
                f"{bound.value:.2g}",
                f"{found.num_greedy_equal} of {found.num_compared}",
            )
    Console(width=100).print(table)
    raise typer.Exit(0 if has_passed else 1)


if __name__ == "__main__":
    typer.run(main)
