"""Widened T5 models answer as their sources do, whatever form they have; equal encoders stay equal."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from scripts.demo_pair.t5 import Shape, share_encoder, untie
from scripts.demo_pair.widen import ALLOWED_DIFFERENCE, T5_PAIRS, write_model
from scripts.demo_pair.widen_t5 import (
    T5Size,
    random_t5,
    t5_logit_difference,
    widen_t5,
    widened_t5_config,
)

WIDER = T5Size(hidden=80, encoder_layers=3, decoder_layers=4, intermediate=96, heads=5, head_size=24)  # fmt: skip


def tiny(form: str, *, decoder_layers: int = 2) -> T5ForConditionalGeneration:
    """A random T5 whose norms are no ones and whose positions matter."""
    is_old = form == "v1.0"
    config = T5Config(
        vocab_size=97, d_model=48, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=decoder_layers, num_heads=3,
        feed_forward_proj="relu" if is_old else "gated-gelu", tie_word_embeddings=is_old, decoder_start_token_id=0,
        layer_norm_epsilon=1e-2, dropout_rate=0.0,
    )  # fmt: skip
    model = random_t5(config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
        model.shared.weight.mul_(4)
    return model


@pytest.mark.parametrize("form", ["v1.0", "v1.1"])
@pytest.mark.parametrize(
    "wider",
    [
        WIDER,
        T5Size(hidden=48, encoder_layers=2, decoder_layers=2, intermediate=64, heads=3, head_size=16),
        T5Size(hidden=49, encoder_layers=2, decoder_layers=3, intermediate=64, heads=4, head_size=16),
        T5Size(hidden=48, encoder_layers=2, decoder_layers=2, intermediate=64, heads=3, head_size=32),
    ],
)  # fmt: skip
def test_a_widened_model_has_its_sources_logits(form: str, wider: T5Size) -> None:
    source = tiny(form)
    model = widen_t5(source, wider)
    ones = torch.ones(1, 5, dtype=torch.long)
    assert source(input_ids=ones, decoder_input_ids=torch.arange(5)[None]).logits.std() > 0.3
    assert t5_logit_difference(source, model) < ALLOWED_DIFFERENCE
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.k.weight.shape == (wider.heads * wider.head_size, wider.hidden)
    assert (len(model.encoder.block), len(model.decoder.block)) == (
        wider.encoder_layers,
        wider.decoder_layers,
    )


@pytest.mark.parametrize("form", ["v1.0", "v1.1"])
@pytest.mark.parametrize("spoil", ["norm", "last norm", "epsilon", "positions", "keys"])
def test_a_widened_model_is_wrong_without_each_of_its_parts(form: str, spoil: str) -> None:
    source = tiny(form)
    model = widen_t5(source, WIDER)
    scale = (WIDER.hidden / 48) ** 0.5
    attention = model.decoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        if spoil == "norm":
            model.encoder.final_layer_norm.weight.mul_(scale)
        elif spoil == "last norm":
            model.decoder.final_layer_norm.weight.mul_(scale)
        elif spoil == "epsilon":
            model.decoder.block[0].layer[0].layer_norm.variance_epsilon *= WIDER.hidden / 48
        elif spoil == "positions":
            attention.relative_attention_bias.weight.copy_(
                attention.relative_attention_bias.weight.roll(1, dims=1)
            )
        else:
            attention.k.weight[16:24].normal_()
    assert t5_logit_difference(source, model) > ALLOWED_DIFFERENCE


def test_a_draft_that_shares_its_targets_encoder_still_does_when_both_are_wider() -> None:
    target = tiny("v1.1")
    draft = share_encoder(target, tiny("v1.1", decoder_layers=1))
    wide = [widen_t5(model, WIDER).encoder.state_dict() for model in (target, draft)]
    assert all(torch.equal(weight, wide[1][name]) for name, weight in wide[0].items())


def test_what_cannot_be_widened_is_refused_by_name() -> None:
    config = tiny("v1.1").config
    for name in (
        "hidden",
        "encoder_layers",
        "decoder_layers",
        "intermediate",
        "heads",
        "head_size",
    ):
        small = {field: getattr(WIDER, field) for field in WIDER.__dataclass_fields__} | {name: 1}
        with pytest.raises(ValueError, match=f"{name}: 1 is below the source's"):
            widened_t5_config(config, T5Size(**small))


@pytest.mark.parametrize(
    ("part", "millions"), [("target", 205), ("draft", 48), ("shared_draft", 110)]
)
def test_the_shipped_pair_has_its_size(part: str, millions: int) -> None:
    shape = Shape(hidden=64, encoder_layers=1, decoder_layers=1, heads=2, intermediate=128)
    size = getattr(T5_PAIRS["t5-base-220m-60m"], part)
    with torch.device("meta"):
        model = untie(T5ForConditionalGeneration(widened_t5_config(shape.config(), size)))
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("form", ["v1.0", "v1.1"])
def test_a_written_model_loads_with_the_sources_logits(form: str, tmp_path: Path) -> None:
    tiny(form).save_pretrained(tmp_path / "source")
    said = write_model(tmp_path / "source", tmp_path / "wide", WIDER, is_random=False)
    assert "logits within" in said
    small, wide = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("source", "wide")
    )
    assert t5_logit_difference(small, wide) < ALLOWED_DIFFERENCE
    random = write_model(tmp_path / "source", tmp_path / "random", WIDER, is_random=True)
    assert random.endswith("random weights")
