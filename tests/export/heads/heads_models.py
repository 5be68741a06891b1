"""Heads with random weights, in the dialects that are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Not what configurations have that name none.
THETA = 500000.0
VOCAB, NUM_IDS, HIDDEN, MLP, HEAD_SIZE = 50, 20, 32, 48, 8
PREFIXES = {"plain": "midlayer.", "speculators": "layers.0."}


def write_head(
    folder: Path,
    *,
    dialect: str = "plain",
    layer: str = "llama",
    hidden: int = HIDDEN,
    target_hidden: int = HIDDEN,
    vocab: int = VOCAB,
    num_ids: int = NUM_IDS,
    taps: Sequence[int] | None = None,
    num_taps: int = 3,
    flags: Sequence[str] = (),
    has_embedding: bool = True,
) -> Path:
    """Write a head to a new folder; four query heads share two of the cache."""
    random = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=random)

    def norm(size: int) -> Tensor:
        return 1.0 + weights(size)

    prefix = PREFIXES[dialect]
    rows = {"q": 4 * HEAD_SIZE, "k": 2 * HEAD_SIZE, "v": 2 * HEAD_SIZE}
    attention = {name: weights(count, 2 * hidden) for name, count in rows.items()}
    attention["o"] = weights(hidden, rows["q"])
    mlp = {"gate": (MLP, hidden), "up": (MLP, hidden), "down": (hidden, MLP)}
    tensors = {
        "fc.weight": weights(hidden, num_taps * target_hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": weights(num_ids, hidden),
        **{f"{prefix}self_attn.{name}_proj.weight": one for name, one in attention.items()},
        **{f"{prefix}mlp.{name}_proj.weight": weights(*shape) for name, shape in mlp.items()},
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = norm(hidden)
    if layer == "qwen3":
        tensors |= {f"{prefix}self_attn.{one}_norm.weight": norm(HEAD_SIZE) for one in "qk"}
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = norm(num_taps * target_hidden)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{one}.weight": norm(target_hidden) for one in range(num_taps)}
    if has_embedding:
        tensors["embed_tokens.weight"] = weights(vocab, hidden)
    if num_ids < vocab:
        ids = torch.randperm(vocab, generator=random)[:num_ids].sort().values
        marked = torch.zeros(vocab, dtype=torch.bool)
        marked[ids] = True
        tensors |= {"d2t": ids - torch.arange(num_ids), "t2d": marked}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    sizes: dict[str, Any] = {
        "model_type": layer, "hidden_size": hidden, "intermediate_size": MLP, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": HEAD_SIZE, "num_hidden_layers": 1, "vocab_size": vocab,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": THETA,
    }  # fmt: skip
    told: dict[str, Any] = {"draft_vocab_size": num_ids, **dict.fromkeys(flags, True)}
    if target_hidden != hidden:
        told["target_hidden_size"] = target_hidden
    named = {} if taps is None else {"eagle_aux_hidden_state_layer_ids": list(taps)}
    if dialect == "plain":
        told |= {**sizes, "architectures": ["LlamaForCausalLMEagle3"]}
        told |= {"eagle_config": named} if named else {}
    else:
        told |= {"speculators_model_type": "eagle3", "transformer_layer_config": sizes, **named}
    (folder / "config.json").write_text(json.dumps(told), "utf-8")
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return a head's tensors as they are stored."""
    return dict(load_file(folder / "model.safetensors"))


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **fields: object) -> Path:
    """Write other tensors, and fields of the configuration; a field of None is left out."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text("utf-8"))
    told = {name: value for name, value in (told | fields).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told), "utf-8")
    return folder
