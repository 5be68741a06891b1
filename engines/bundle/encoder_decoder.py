"""What a bundle says of a model with an encoder: its second graph, its sources, and how texts become both.

``encode.onnx`` reads a source and writes what each decoder layer attends to; ``model.onnx`` takes that as inputs
without outputs. Both share one data file. A draft whose encoder is the target's has ``cross.onnx`` too: ``encode.onnx``
without the encoder, over what the target's encoder answered. ``device_encode.onnx`` stands beside ``device.onnx`` as
``encode.onnx`` does beside ``model.onnx``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from outrider.engines.bundle.fields import FieldReader

ENCODE_FILE = "encode.onnx"
DEVICE_ENCODE_FILE = "device_encode.onnx"
CROSS_FILE = "cross.onnx"
SOURCE_TOKENIZER_FILE = "source_tokenizer.json"

# Inputs of encode.onnx and device_encode.onnx: [batch, length] and [batch] int64; model.onnx takes the second too.
SOURCE = "source"
SOURCE_LENGTH = "source_length"
# Output of the target's encode.onnx where a draft shares the encoder, and input of the draft's cross.onnx:
# [batch, length, width] float32.
HIDDEN = "hidden"
# In templates: the ids of the text, and the id of a language.
TEXT = "text"
LANGUAGE = "language"

Template = tuple[int | str, ...]
"""Token ids, and the words TEXT and LANGUAGE where a request's own stand."""


def cross_key_name(layer: int) -> str:
    """Input of a layer's keys of the source, [batch, H, capacity, D] float32."""
    return f"cross_key.{layer}"


def cross_value_name(layer: int) -> str:
    """Input of a layer's values of the source, [batch, H, capacity, D] float32."""
    return f"cross_value.{layer}"


@cache
def cross_past_names(num_layers: int) -> tuple[str, ...]:
    """Return the inputs of all caches of sources: cross_key.0, cross_value.0, cross_key.1 ..."""
    names = (cross_key_name, cross_value_name)
    return tuple(name(layer) for layer in range(num_layers) for name in names)


@cache
def cross_present_names(num_layers: int) -> tuple[str, ...]:
    """Return the outputs of ``encode.onnx``, each bound to the memory of its like in ``cross_past_names``."""
    return tuple(f"new_{name}" for name in cross_past_names(num_layers))


def is_source_cache(name: str) -> bool:
    """Return whether a graph's input or output of this name is a cache of sources."""
    return name.startswith(("cross_key.", "cross_value.", "new_cross_key.", "new_cross_value."))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """The encoder of one model of a bundle.

    Attributes:
        num_heads: H of the cache of sources.
        head_size: D of the cache of sources.
        max_source: tokens of a source at most.
        vocab_size: of the sources' tokens.
        hidden_size: width of what the encoder answers.
        shares_encoder: of a draft, whether the target's encoder answers for its own.
    """

    num_heads: int
    head_size: int
    max_source: int
    vocab_size: int
    hidden_size: int
    shares_encoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """How requests to an encoder-decoder pair become tokens.

    Attributes:
        decoder_prefix: what every answer begins with, never drawn; LANGUAGE is the target language's id.
        source_template: what the encoder reads; TEXT is the text's ids, LANGUAGE the source language's id.
        languages: ids by code; empty where the model has none.
        default_source_language: code; empty where a request must name one, or there are no languages.
        default_target_language: likewise.
        banned_token_ids: never drawn: the model has no place for them in an answer.
        generation_defaults: what the checkpoint asks for in generation; JSON values, applied only where asked for.
        has_source_tokenizer: whether sources have a tokenizer of their own, ``SOURCE_TOKENIZER_FILE``.
        shares_vocabulary: whether ids of sources and answers stand for the same tokens.
    """

    decoder_prefix: Template
    source_template: Template
    languages: Mapping[str, int] = field(default_factory=dict)
    default_source_language: str = ""
    default_target_language: str = ""
    banned_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, object] = field(default_factory=dict)
    has_source_tokenizer: bool = False
    shares_vocabulary: bool = True


def read_source_entry(reader: FieldReader) -> SourceEntry | None:
    """Return the encoder of a manifest's model; None for a decoder-only one.

    Raises:
        BundleError: a field is missing or of the wrong kind, named.
    """
    if reader.values.get("source") is None:
        return None
    section = reader.section("source")
    return SourceEntry(
        num_heads=section.count("num_heads"),
        head_size=section.count("head_size"),
        max_source=section.count("max_source"),
        vocab_size=section.count("vocab_size"),
        hidden_size=section.count("hidden_size"),
        # Bundles made before drafts could share an encoder do not have the field.
        shares_encoder="shares_encoder" in section.values and section.flag("shares_encoder"),
    )


def read_text2text(reader: FieldReader) -> EncoderDecoder | None:
    """Return a manifest's part on texts of encoder-decoder models; None for decoder-only ones.

    Raises:
        BundleError: a field is missing or of the wrong kind, named.
    """
    if reader.values.get("text2text") is None:
        return None
    section = reader.section("text2text")
    languages = section.section("languages")
    found = EncoderDecoder(
        decoder_prefix=_template(section, "decoder_prefix", (LANGUAGE,)),
        source_template=_template(section, "source_template", (TEXT, LANGUAGE)),
        languages={code: languages.count(code, at_least=0) for code in languages.values},
        default_source_language=section.text("default_source_language"),
        default_target_language=section.text("default_target_language"),
        banned_token_ids=section.counts("banned_token_ids"),
        generation_defaults=section.plain("generation_defaults"),
        has_source_tokenizer=section.flag("has_source_tokenizer"),
        shares_vocabulary=section.flag("shares_vocabulary"),
    )
    if not found.decoder_prefix:
        raise section.wrong("decoder_prefix", "of at least one token")
    if found.source_template.count(TEXT) != 1:
        raise section.wrong("source_template", f"with {TEXT!r} in one place")
    if LANGUAGE in (*found.decoder_prefix, *found.source_template) and not found.languages:
        raise section.wrong("languages", f"not empty: a template has a {LANGUAGE!r}")
    for name in ("default_source_language", "default_target_language"):
        if getattr(found, name) not in ("", *found.languages):
            raise section.wrong(name, "empty or one of languages")
    return found


def used_ids(
    found: EncoderDecoder, source_vocab_size: int, vocab_size: int
) -> Iterable[tuple[str, int, int]]:
    """Yield the token ids of languages and templates: the name of the field, the id, and the vocabulary's size."""
    sizes = {
        "decoder_prefix": vocab_size,
        "source_template": source_vocab_size,
        "banned_token_ids": vocab_size,
    }
    for name, size in sizes.items():
        yield from ((name, one, size) for one in getattr(found, name) if isinstance(one, int))
    if LANGUAGE in found.source_template:
        yield from (("languages", one, source_vocab_size) for one in found.languages.values())
    if LANGUAGE in found.decoder_prefix:
        yield from (("languages", one, vocab_size) for one in found.languages.values())


def _template(section: FieldReader, name: str, words: tuple[str, ...]) -> Template:
    values = section.values.get(name)
    rule = f"a list of token ids and of {', '.join(map(repr, words))}"
    if not isinstance(values, list):
        raise section.wrong(name, rule)
    for value in values:
        is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_id and value not in words:
            raise section.wrong(name, rule)
    return tuple(values)
