"""The T5 models of the translating pair: their shapes, first weights, and an encoder shared with a draft."""

from dataclasses import dataclass

import torch
from transformers import T5Config, T5ForConditionalGeneration

from scripts.demo_pair.text_pairs import EOS_ID, PAD_ID, VOCAB

# Small against the output of a layer, so that layers count from the first step; T5's own deviation of 1 is made for
# Adafactor, whose steps grow with the weight.
_EMBEDDING_STD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a T5 v1.1: gated-gelu, a head of its own that is not scaled."""

    hidden: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    intermediate: int
    head_size: int = 32
    vocab: int = VOCAB

    def config(self) -> T5Config:
        """The configuration of this shape; the decoder starts with the pad token, as every T5's does."""
        return T5Config(
            vocab_size=self.vocab,
            d_model=self.hidden,
            d_kv=self.head_size,
            d_ff=self.intermediate,
            num_layers=self.encoder_layers,
            num_decoder_layers=self.decoder_layers,
            num_heads=self.heads,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            decoder_start_token_id=PAD_ID,
        )


def new_model(shape: Shape) -> T5ForConditionalGeneration:
    """A model to be trained: layers add nothing at first, embedding and head are drawn from torch's generator."""
    model = untie(T5ForConditionalGeneration(shape.config()))
    with torch.no_grad():
        model.shared.weight.normal_(std=_EMBEDDING_STD)
        model.lm_head.weight.normal_(std=shape.hidden**-0.5 / 2)
        for name, weight in model.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                weight.zero_()
    return model


def untie(model: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """Give a model a head of its own, which T5Config ties whatever it is told, and have that written with it."""
    model.lm_head = torch.nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)
    model.config.tie_word_embeddings = False
    return model


def share_encoder(
    source: T5ForConditionalGeneration, draft: T5ForConditionalGeneration
) -> T5ForConditionalGeneration:
    """Put the source's encoder and embedding into a draft and keep them from being trained.

    Head and decoder begin as the source's, without its last layers.
    """
    weights = source.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    draft.encoder.requires_grad_(False)
    return draft
