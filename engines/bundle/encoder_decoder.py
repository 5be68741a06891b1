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
from typing import Annotated, Final, Literal

from msgspec import Meta
from outrider.engines.bundle.fields import Count, Size, Text

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
TEXT: Final = "text"
LANGUAGE: Final = "language"

TemplateToken = Size | Literal["text", "language"]
Template = tuple[TemplateToken, ...]
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

    num_heads: Count
    head_size: Count
    max_source: Count
    vocab_size: Count
    hidden_size: Count
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

    decoder_prefix: Annotated[Template, Meta(min_length=1)]
    source_template: Template
    languages: Mapping[str, Size] = field(default_factory=dict)
    default_source_language: Text = ""
    default_target_language: Text = ""
    banned_token_ids: tuple[Size, ...] = ()
    generation_defaults: Mapping[str, object] = field(default_factory=dict)
    has_source_tokenizer: bool = False
    shares_vocabulary: bool = True


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
