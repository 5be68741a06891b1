"""Wider and deeper T5 models that answer exactly as the small ones do.

As with Llamas (widen.py), but for what is T5's own:

* scores are not scaled, so heads may become larger too: new channels of the keys are zero, of the queries random;
* a tied head (v1.0) has its input multiplied by hidden ** -0.5: the decoder's last norm stays as it is, which makes up
  for that to the bit of arithmetic; a head of its own (v1.1) is not scaled, and that norm is scaled like the others;
* the position table's columns of new heads are random, and so are cross-attention's reads of the encoder's new
  channels, which are zero.

Random weights depend on a weight's name and shape alone: models with equal encoders still have equal ones afterwards.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from transformers import T5Config, T5ForConditionalGeneration

from scripts.demo_pair.t5 import untie

_CHECKED_TOKENS = (48, 32)
_POSITION_STD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Size:
    """Size of a widened T5; vocabulary and position buckets stay those of the source."""

    hidden: int
    encoder_layers: int
    decoder_layers: int
    intermediate: int
    heads: int
    head_size: int


def widened_t5_config(config: T5Config, size: T5Size) -> T5Config:
    """Configuration of the widened model.

    Raises:
        ValueError: a size smaller than the source's; says which.
    """
    floors = (
        ("hidden", size.hidden, config.d_model),
        ("encoder_layers", size.encoder_layers, config.num_layers),
        ("decoder_layers", size.decoder_layers, config.num_decoder_layers),
        ("intermediate", size.intermediate, config.d_ff),
        ("heads", size.heads, config.num_heads),
        ("head_size", size.head_size, config.d_kv),
    )
    for name, wanted, least in floors:
        if wanted < least:
            raise ValueError(f"{name}: {wanted} is below the source's {least}")
    return T5Config.from_dict(
        {
            **config.to_dict(),
            "d_model": size.hidden,
            "num_layers": size.encoder_layers,
            "num_decoder_layers": size.decoder_layers,
            "d_ff": size.intermediate,
            "num_heads": size.heads,
            "d_kv": size.head_size,
            "layer_norm_epsilon": config.layer_norm_epsilon * config.d_model / size.hidden,
            "tie_word_embeddings": config.scale_decoder_outputs,
            "dtype": "float32",
        }
    )


def random_t5(config: T5Config) -> T5ForConditionalGeneration:
    """Random weights, the same in every run; each depends on its name and shape alone."""
    model = T5ForConditionalGeneration(config).float().eval()
    if not config.scale_decoder_outputs:
        untie(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                is_table = "relative_attention_bias" in name
                std = _POSITION_STD if is_table else weight.shape[1] ** -0.5
                weight.normal_(std=std, generator=generator)
    return model


def widen_t5(source: T5ForConditionalGeneration, size: T5Size) -> T5ForConditionalGeneration:
    """A model of the wanted size with the source's logits, float32.

    Raises:
        ValueError: the source cannot be widened to this size.
    """
    old = source.config
    model = random_t5(widened_t5_config(old, size))
    scale = (old.d_model / size.hidden) ** 0.5
    with torch.no_grad():
        _place(source.shared.weight, model.shared.weight)
        if not old.scale_decoder_outputs:
            model.lm_head.weight[:, : old.d_model] = source.lm_head.weight
        for name in ("encoder", "decoder"):
            _fill_stack(getattr(source, name), getattr(model, name), scale)
        last = 1.0 if old.scale_decoder_outputs else scale
        _scale_norm(source.decoder.final_layer_norm, model.decoder.final_layer_norm, last)
    return model


def _fill_stack(old: torch.nn.Module, new: torch.nn.Module, scale: float) -> None:
    """Put an old encoder or decoder into a random one, whose layers then add nothing else."""
    for index, block in enumerate(new.block):
        for at, layer in enumerate(block.layer):
            inner = (
                layer.DenseReluDense.wo if hasattr(layer, "DenseReluDense") else _attention(layer).o
            )
            inner.weight.zero_()
            if index < len(old.block):
                before = old.block[index].layer[at]
                _scale_norm(before.layer_norm, layer.layer_norm, scale)
                if hasattr(layer, "DenseReluDense"):
                    _fill_mlp(before.DenseReluDense, layer.DenseReluDense)
                else:
                    _fill_attention(_attention(before), _attention(layer))
    _scale_norm(old.final_layer_norm, new.final_layer_norm, scale)


def _attention(layer: torch.nn.Module) -> torch.nn.Module:
    """The attention of a layer, over its own text or over the source."""
    return layer.SelfAttention if hasattr(layer, "SelfAttention") else layer.EncDecAttention


def _fill_attention(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Old heads first, each in the leading channels of a new one; new channels of their keys are zero."""
    was, size, width = old.key_value_proj_dim, new.key_value_proj_dim, old.d_model
    new.k.weight[: old.n_heads * size] = 0
    for head in range(old.n_heads):
        taken, given = slice(head * was, (head + 1) * was), slice(head * size, head * size + was)
        for name in ("q", "k", "v"):
            getattr(new, name).weight[given, :width] = getattr(old, name).weight[taken]
        new.o.weight[:width, given] = old.o.weight[:, taken]
    if old.has_relative_attention_bias:
        table = old.relative_attention_bias.weight
        new.relative_attention_bias.weight[:, : table.shape[1]] = table


def _fill_mlp(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Old channels first; what reads the new ones is zero."""
    for name in ("wi", "wi_0", "wi_1"):
        if hasattr(old, name):
            weight = getattr(old, name).weight
            getattr(new, name).weight[: weight.shape[0], : weight.shape[1]] = weight
    new.wo.weight[: old.wo.out_features, : old.wo.in_features] = old.wo.weight


def _place(old: torch.Tensor, new: torch.Tensor) -> None:
    """Old values in the leading corner of a matrix, zeros elsewhere."""
    new.zero_()
    new[: old.shape[0], : old.shape[1]] = old


def _scale_norm(old: torch.nn.Module, new: torch.nn.Module, scale: float) -> None:
    """Weights of a norm whose new channels are zero; theirs do not matter."""
    new.weight[: old.weight.shape[0]] = old.weight * scale


def t5_logit_difference(
    first: T5ForConditionalGeneration, second: T5ForConditionalGeneration
) -> float:
    """Greatest difference of two models' logits over random sources and texts, in parts of the greatest logit.

    Logits up to 10 count as 10: T5 scales neither scores nor, in v1.1, what its head reads, so that logits of 25 and
    more are common, and their last places worth more.
    """
    generator = torch.Generator().manual_seed(0)
    source, text = (
        torch.randint(first.config.vocab_size, (2, length), generator=generator)
        for length in _CHECKED_TOKENS
    )
    mask = torch.ones_like(source)
    mask[1, _CHECKED_TOKENS[0] // 2 :] = 0
    with torch.no_grad():
        one, other = (
            model(input_ids=source, attention_mask=mask, decoder_input_ids=text).logits
            for model in (first, second)
        )
    return float((one - other).abs().max() / max(1.0, float(one.abs().max()) / 10))
