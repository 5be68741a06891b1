"""What the opening of a bundle with an encoder takes from its manifest, and what it tells."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.bundle.bundle import Bundle
from outrider.runtime.core.checks.limits import ServedModel
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.factory import (
    ServeOptions,
    _decided,
    _of_sources,
    _with_generation_defaults,
)
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec

from tests.conftest import write_tokenizer
from tests.engines.bundle.test_text2text import ENTRY, TEXTS, manifest

MODEL = ServedModel(
    name="m", vocab_size=16, max_context=64, max_gamma=4, eos_token_ids=(1,), drafters=("none",), max_beams=4,
    max_source=32,
)  # fmt: skip
PLAIN = manifest(replace(ENTRY, source=None), None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> bytes:
    write_tokenizer(tmp_path)
    return (tmp_path / "tokenizer.json").read_bytes()


def test_memory_of_sources_is_told_for_target_and_draft(
    tokenizer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pair = replace(manifest(), draft=replace(ENTRY, path="draft", num_layers=1))
    with caplog.at_level(logging.INFO):
        found = _of_sources(pair, EncoderDecoderCodec(tokenizer, TEXTS))
    assert (found["max_source"], found["source_vocab_size"]) == (32, 20)
    assert found["banned_token_ids"] == (0,)
    # Keys and values of three layers, two heads of four numbers, four bytes each.
    assert "32 tokens at most, 192 bytes per slot and token" in caplog.text


def test_bytes_of_a_prompt_are_those_of_the_sources_tokenizer(
    tokenizer: bytes, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, vocab_size=258)  # bytes alone
    sources = (tmp_path / "tokenizer.json").read_bytes()
    codec = EncoderDecoderCodec(tokenizer, TEXTS, sources)
    found = _of_sources(manifest(), codec)["max_token_bytes"]
    assert found == TokenizersCodec(sources).max_token_bytes
    assert found != codec.max_token_bytes


def test_a_decoder_only_model_has_no_sources(
    tokenizer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    codec = TokenizersCodec(tokenizer)
    assert _of_sources(PLAIN, codec) == {"max_token_bytes": codec.max_token_bytes}
    assert not caplog.text


def test_generation_defaults_are_applied_where_the_options_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    asked = {"num_beams": 4, "max_length": 12}
    given = manifest()
    limits, defaults = _with_generation_defaults(ServeOptions(), given, MODEL, asked)
    assert (limits, defaults) == (ServeOptions().limits, NO_DEFAULTS)
    options = ServeOptions(applies_generation_defaults=True)
    limits, defaults = _with_generation_defaults(options, given, MODEL, asked)
    assert defaults.search == {"num_beams": 4}
    # Twelve less the two of the decoder prefix.
    assert limits.default_max_tokens == 10
    assert "num_beams 4" in caplog.text


def test_generation_defaults_without_an_encoder_are_new_tokens_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    asked = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 7, "max_length": 12}
    options = ServeOptions(applies_generation_defaults=True)
    model = replace(MODEL, max_source=0)
    limits, defaults = _with_generation_defaults(options, PLAIN, model, asked)
    assert defaults.sampling == {"top_p": 0.9}
    assert limits.default_max_tokens == 7
    assert "not applied: max_length (counts the prompt's tokens too)" in caplog.text


def test_generation_defaults_must_be_in_the_bundle(tmp_path: Path) -> None:
    options = ServeOptions(applies_generation_defaults=True)
    with pytest.raises(ConfigError, match="generation_defaults: the bundle has none"):
        _decided(Bundle(root=tmp_path, manifest=PLAIN), options)
