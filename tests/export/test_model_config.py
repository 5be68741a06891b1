"""Sizes of models by their configurations: optimum's names, and what these do not know."""

from outrider.export.model_config import ModelConfig, read_model_config
from transformers import AutoConfig


def facts_of(family: str, **fields: object) -> ModelConfig:
    return read_model_config(AutoConfig.for_model(family, **fields))


def test_sizes_have_one_name_for_architectures_that_optimum_knows_and_others() -> None:
    known = facts_of("gpt2", n_layer=3, n_head=4, n_embd=64)
    assert (known.num_layers, known.num_kv_heads, known.head_size) == (3, 4, 16)
    unknown = facts_of("olmo3", num_hidden_layers=3, num_attention_heads=4, hidden_size=64)
    assert (unknown.num_layers, unknown.num_kv_heads, unknown.head_size) == (3, 4, 16)


def test_a_decoder_has_heads_and_layers_of_its_own() -> None:
    bart = facts_of(
        "bart",
        d_model=64,
        encoder_layers=5,
        decoder_layers=3,
        encoder_attention_heads=8,
        decoder_attention_heads=4,
    )
    assert (bart.num_layers, bart.num_kv_heads, bart.head_size) == (3, 4, 16)
    assert bart.source is not None
    # What an encoder answers is cached by the decoder's heads.
    assert (bart.source.num_layers, bart.source.num_heads, bart.source.head_size) == (5, 4, 16)
    t5 = facts_of("t5", num_layers=5, num_decoder_layers=3)
    assert t5.source is not None
    assert (t5.source.num_layers, t5.num_layers) == (5, 3)


def test_one_head_for_all_queries_is_cached_once() -> None:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64}
    assert facts_of("gpt_bigcode", multi_query=True, **sizes).num_kv_heads == 1
    assert facts_of("gpt_bigcode", multi_query=False, **sizes).num_kv_heads == 4


def test_a_configuration_without_special_tokens_has_none() -> None:
    assert facts_of("roc_bert").eos_token_ids == ()
