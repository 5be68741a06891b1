"""A random pair of a wanted size, whose rows look like a language model's: what no small trained pair can stand in for.

A random Llama with tied embeddings mostly repeats its last token, and its rows are otherwise flat. Random signs in the
final norm take the repetition away and its scale sets the spread of the logits; the target's first hidden channels are
the draft's, so that the two agree about as often as a trained pair does.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from outrider.engines.bundle.manifest import TOKENIZER_FILE
from outrider.export.pipeline import export_bundle
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 151_936
LOGIT_SPREAD = 3.0
"""Standard deviation of a row's logits: at this vocabulary a perplexity of about twenty."""
SHARED_SPREAD = 0.97
"""Correlation of the target's logits with the draft's."""
_EMBEDDING_STD = 0.02
_LAYER_SCALE = 0.003
"""Of what layers add: less than the embedding, so that the models agree on the current token's row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one model; heads are 64 wide."""

    hidden: int
    layers: int
    intermediate: int


TARGET = Shape(hidden=640, layers=6, intermediate=1664)  # 97.2M in the embedding, 28.8M in layers
DRAFT = Shape(hidden=64, layers=2, intermediate=192)


def build_bundle(out: Path, tokenizer: Path) -> None:
    """Export the random pair in float32.

    Args:
        out: folder to make.
        tokenizer: a ``tokenizer.json`` of fewer ids than the vocabulary.
    """
    torch.manual_seed(0)
    draft, target = _random_model(DRAFT), _random_model(TARGET)
    shared = DRAFT.hidden
    with torch.no_grad():
        target.model.embed_tokens.weight[:, :shared] = draft.model.embed_tokens.weight
        signs = torch.sign(torch.randn(TARGET.hidden))
        apart = (1.0 - SHARED_SPREAD**2) ** 0.5
        scale = torch.full((TARGET.hidden,), apart * _channel_scale(TARGET.hidden - shared))
        scale[:shared] = SHARED_SPREAD * _channel_scale(shared)
        target.model.norm.weight.copy_(signs * scale)
        draft.model.norm.weight.copy_(signs[:shared] * _channel_scale(shared))
    with tempfile.TemporaryDirectory() as folder:
        paths = {"target": Path(folder) / "target", "draft": Path(folder) / "draft"}
        for name, model in (("target", target), ("draft", draft)):
            model.save_pretrained(paths[name])
            shutil.copyfile(tokenizer, paths[name] / TOKENIZER_FILE)
        export_bundle(**paths, out=out, progress=print)


def _channel_scale(num_channels: int) -> float:
    """Weight of the final norm at which so many channels spread the logits by ``LOGIT_SPREAD``."""
    return float(LOGIT_SPREAD / (_EMBEDDING_STD * num_channels**0.5))


def _random_model(shape: Shape) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 64,
            num_key_value_heads=shape.hidden // 64,
            intermediate_size=shape.intermediate,
            max_position_embeddings=2048,
            initializer_range=_EMBEDDING_STD,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= _LAYER_SCALE
            layer.mlp.down_proj.weight *= _LAYER_SCALE
    return model.eval()
