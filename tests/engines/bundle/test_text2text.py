"""A manifest of a model with an encoder: what it says is read back, and contradictions are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import (
    LANGUAGE,
    TEXT,
    EncoderDecoder,
    SourceEntry,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.bundle.manifest import (
    SCHEMA_VERSION,
    TEXT2TEXT_VERSION,
    Manifest,
    ModelEntry,
)
from outrider.engines.bundle.manifest_rules import check_manifest

SOURCE = SourceEntry(num_heads=2, head_size=4, max_source=32, vocab_size=20, hidden_size=8)
ENTRY = ModelEntry(
    path="target",
    num_layers=2,
    num_kv_heads=2,
    head_size=4,
    vocab_size=16,
    weights="float32",
    source=SOURCE,
)
TEXTS = EncoderDecoder(
    decoder_prefix=(2, LANGUAGE),
    source_template=(LANGUAGE, TEXT, 1),
    languages={"de": 3, "en": 15},
    default_target_language="de",
    banned_token_ids=(0,),
    generation_defaults={"num_beams": 4},
)


def manifest(entry: ModelEntry = ENTRY, texts: EncoderDecoder | None = TEXTS) -> Manifest:
    return Manifest(
        target=entry,
        draft=None,
        max_context=64,
        max_batch=2,
        max_gamma=4,
        max_extend=8,
        eos_token_ids=(1,),
        bos_token_id=None,
        text2text=texts,
    )


def test_what_is_written_is_read_back() -> None:
    written = manifest()
    assert written.schema_version == TEXT2TEXT_VERSION
    assert Manifest.from_json(written.to_json()) == written
    check_manifest(written)


def test_a_decoder_only_manifest_says_nothing_of_sources() -> None:
    plain = ModelEntry(
        path="target", num_layers=2, num_kv_heads=2, head_size=4, vocab_size=16, weights="float32"
    )
    data = json.loads(manifest(plain, None).to_json())
    assert data["schema_version"] == SCHEMA_VERSION
    assert "text2text" not in data
    assert "source" not in data["target"]
    assert Manifest.from_json(json.dumps(data)).target.source is None


def test_caches_of_sources_are_named_by_layer() -> None:
    assert cross_past_names(2)[2:] == ("cross_key.1", "cross_value.1")
    assert cross_present_names(2)[:2] == ("new_cross_key.0", "new_cross_value.0")


def set_text(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["text2text"].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_text("decoder_prefix", []), "decoder_prefix': Expected `array` of length >= 1"),
        (set_text("decoder_prefix", ["text"]), "decoder_prefix' must not have 'text'"),
        (set_text("decoder_prefix", ["lang"]), r"decoder_prefix\[0\]': Invalid enum value$"),
        (set_text("decoder_prefix", [True]), r"decoder_prefix\[0\]': Expected `int | str`"),
        (set_text("source_template", [1]), "source_template' must have 'text' in one place"),
        (set_text("source_template", "text"), "source_template': Expected `array`"),
        (set_text("languages", {}), "languages' must not be empty"),
        (set_text("languages", {"de": -1}), r"languages\[...\]': Expected `int` >= 0"),
        (set_text("languages", {"de": 16}), r"'text2text\.languages' must be at most 15"),
        (set_text("banned_token_ids", [16]), r"'text2text\.banned_token_ids' must be at most 15"),
        (
            set_text("source_template", [20, TEXT]),
            r"'text2text\.source_template' must be at most 19",
        ),
        (set_text("source_template", [1] * 32 + [TEXT]), r"source_template' must be at most 32"),
        (set_text("decoder_prefix", [1] * 64), r"decoder_prefix' must be at most 63"),
        (set_text("default_source_language", "fr"), "default_source_language' must be empty or"),
        (set_text("shares_vocabulary", 1), "shares_vocabulary': Expected `bool`"),
        (lambda data: data["target"].pop("source"), r"'target\.source' is missing"),
        (
            lambda data: data["target"]["source"].pop("head_size"),
            "Object missing required field `head_size`",
        ),
        (lambda data: data.__setitem__("schema_version", 1), "'schema_version': expected"),
        (lambda data: data.__setitem__("text2text", None), "'schema_version': expected"),
    ],
)
def test_contradictions_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    data = json.loads(manifest().to_json())
    change(data)
    with pytest.raises(BundleError, match=message):
        check_manifest(Manifest.from_json(json.dumps(data)))


def test_a_draft_has_an_encoder_too() -> None:
    draft = replace(ENTRY, path="draft", source=None)
    with pytest.raises(BundleError, match=r"'draft\.source' is missing"):
        check_manifest(replace(manifest(), draft=draft))


@pytest.mark.parametrize(("field", "least"), [("max_source", 32), ("vocab_size", 20)])
def test_a_draft_reads_whatever_the_target_reads(field: str, least: int) -> None:
    few = replace(SOURCE, **{field: least - 1})
    pair = replace(manifest(), draft=replace(ENTRY, path="draft"))
    check_manifest(pair)
    with pytest.raises(BundleError, match=rf"'draft\.source\.{field}' must be at least {least}"):
        check_manifest(replace(pair, draft=replace(ENTRY, path="draft", source=few)))


def test_an_encoder_needs_to_be_told_how_texts_become_sources() -> None:
    with pytest.raises(BundleError, match="'text2text' is missing: target has an encoder"):
        check_manifest(manifest(texts=None))
