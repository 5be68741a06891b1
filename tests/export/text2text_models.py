"""Tiny random encoder-decoder models of every family that is exported, and the answers of PyTorch to them."""

from __future__ import annotations

import numpy as np
import torch
from outrider.engines.base import FloatArray, IntArray
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

VOCAB_SIZE = 96
PAD = 0
NUM_POSITIONS = 200
SPECIAL: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD,
    "eos_token_id": 1,
}
T5: dict[str, object] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}
BART: dict[str, object] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": NUM_POSITIONS,
    "decoder_start_token_id": 1,
    "bos_token_id": 2,
}
GATED: dict[str, object] = {"feed_forward_proj": "gated-gelu"}
# Name of a family, its model type, and what its configuration takes.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "t5": ("t5", T5 | {"feed_forward_proj": "relu"}),
    "t5_v1_1": ("t5", T5 | GATED | {"tie_word_embeddings": False}),
    "umt5": ("umt5", T5 | GATED),
    "bart": ("bart", BART),
    "marian": ("marian", BART | {"decoder_vocab_size": VOCAB_SIZE}),
    "pegasus": ("pegasus", BART),
    "m2m_100": ("m2m_100", BART),
    "mbart": ("mbart", BART),
    "blenderbot": ("blenderbot", BART),
    "plbart": ("plbart", BART),
}


def random_text2text(family: str, seed: int = 0, **other_sizes: object) -> PreTrainedModel:
    """Return a tiny model of a family, every parameter random, so that an ignored one shows.

    Without ``other_sizes`` it is d 32, 2 layers of the encoder and 3 of the decoder, 96 tokens.
    """
    torch.manual_seed(seed)
    kind, sizes = FAMILIES[family]
    config = AutoConfig.for_model(kind, **SPECIAL | sizes | other_sizes)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Sinusoids are no weights.
            if "embed_positions" not in name:
                width = 0.15 if parameter.ndim > 1 else 0.05
                parameter += width * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if "final_logits_bias" in name:
                buffer += 0.1 * torch.randn_like(buffer)
    return model


def random_sources(lengths: IntArray, seed: int = 0) -> IntArray:
    """Return sources [B, L] int64 of the lengths [B], padded."""
    drawn = np.random.default_rng(seed).integers(3, VOCAB_SIZE, (len(lengths), lengths.max()))
    return np.where(np.arange(lengths.max()) < lengths[:, None], drawn, PAD)


def random_texts(model: PreTrainedModel, num_rows: int, num_tokens: int, seed: int = 1) -> IntArray:
    """Return texts [B, N] int64 that begin as an answer of the model does."""
    texts = np.random.default_rng(seed).integers(3, VOCAB_SIZE, (num_rows, num_tokens))
    texts[:, 0] = model.config.decoder_start_token_id
    return texts


def pytorch_logits(
    model: PreTrainedModel, sources: IntArray, lengths: IntArray, texts: IntArray
) -> FloatArray:
    """Return logits [B, N, V] float32 of whole texts [B, N] to padded sources [B, L], without a cache."""
    mask = (np.arange(sources.shape[1]) < lengths[:, None]).astype(np.int64)
    with torch.no_grad():
        answer = model(
            input_ids=torch.from_numpy(sources),
            attention_mask=torch.from_numpy(mask),
            decoder_input_ids=torch.from_numpy(texts),
            use_cache=False,
        )
    logits: FloatArray = answer.logits.numpy()
    return logits
