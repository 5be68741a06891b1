"""Converts text to token ids and back, with the bundle's ``tokenizer.json``.

A model with an encoder has two sides: what the encoder reads, and what the decoder writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import (
    LANGUAGE,
    SOURCE_TOKENIZER_FILE,
    TEXT,
    EncoderDecoder,
    Template,
)
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.text import REPLACEMENT
from tokenizers import Tokenizer, decoders, pre_tokenizers

# Streams decode the last one or two tokens many times: half of a step's work on text. A pair takes 310 bytes.
_SHORT = 2
_MOST_SHORT_TEXTS = 1 << 12
# NFC shortens a text to 2/7 of its bytes at most (what U+0390 is composed of; by enumeration).
_NFC_SHORTENS = 4
# Steps before the model that keep every byte of a text.
_LOSSLESS = ("ByteLevel", "Digits", "Punctuation", "Split")
# Languages that a refusal lists; a model may have two hundred.
_MOST_LISTED = 6


class TextCodec(Protocol):
    """Encoder and decoder of text; also the ``Decoder`` of ``runtime.core.text``."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        ...

    def spell(self, token: int) -> str:
        """Return one token as the vocabulary spells it; empty beyond the vocabulary."""
        ...


class TokenizersCodec:
    """``TextCodec`` over the tokenizers library, and the ``PieceDecoder`` of ``runtime.core.text``.

    Args:
        source: a ``tokenizer.json``, or its bytes.
        name: of the file, for messages.

    Attributes:
        source: its bytes.
        max_token_bytes: bytes of a text that one token stands for at most; None where that is not known.

    Raises:
        BundleError: it cannot be read.
    """

    def __init__(self, source: Path | bytes, name: str = TOKENIZER_FILE) -> None:
        try:
            self.source = source if isinstance(source, bytes) else source.read_bytes()
            text = self.source.decode("utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            self.max_token_bytes = max_token_bytes(json.loads(text))
        # The library raises bare Exception for a file it cannot read.
        except Exception as error:
            raise BundleError(f"{name}: not a tokenizer") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._decode_short = lru_cache(_MOST_SHORT_TEXTS)(self._decode)
        # Tokens that stand for bytes are joined as they are; other decoders look at neighbours, or at the beginning.
        self._has_pieces = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        # Every step asks; at most one of each token of the vocabulary.
        self.piece = cache(self._piece)

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text."""
        # Unlike ``encode`` this leaves the interpreter to others meanwhile, and keeps no offsets: a third of the time.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encodings[0].ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text in which nothing is a token beside the model's own vocabulary.

        Source: transformers 5.23.0, ``TokenizersBackend._encode_without_added_tokens``.
        """
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return tuple(token.id for word in words for token in tokenizer.model.tokenize(word))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        decode = self._decode_short if len(ids) <= _SHORT else self._decode
        return decode(tuple(ids), skip_special_tokens)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that are found in any text, whatever stands beside them."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in found.items()}

    def is_special(self, text: str) -> bool:
        """Return whether a text is that of a special token, which texts may leave out."""
        return text in self._special

    def is_mark(self, text: str) -> bool:
        """Return whether a grammar's plain text never stands for this added token: llguidance has a rule of its own."""
        return self.is_special(text) or (text.startswith("<") and text.endswith(">"))

    @cached_property
    def _special(self) -> frozenset[str]:
        found = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in found if token.special)

    def _piece(self, token: int, skip_special_tokens: bool) -> str | None:
        """Text of a token of whole characters, the same behind any text; None for any other token."""
        text = self._decode((token,), skip_special_tokens) if self._has_pieces else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        if len(ids) <= _SHORT:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        # Unlike ``decode`` this leaves the interpreter to others meanwhile.
        texts = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(texts[0])

    def spell(self, token: int) -> str:
        """Return one token as the vocabulary spells it; empty beyond the vocabulary."""
        return self._tokenizer.id_to_token(token) or ""


class EncoderDecoderCodec(TokenizersCodec):
    """The codec of a model with an encoder: of answers, and with a part of its own for sources.

    Args:
        answers: the ``tokenizer.json`` of what the decoder writes, or its bytes.
        text2text: what the bundle says of its texts.
        sources: that of what the encoder reads; None where it is the same.

    Attributes:
        text2text: what the bundle says of its texts.
        sources: what reads and writes the text of sources, without what the template puts around it.

    Raises:
        BundleError: a tokenizer cannot be read.
    """

    def __init__(
        self, answers: Path | bytes, text2text: EncoderDecoder, sources: Path | bytes | None = None
    ) -> None:
        super().__init__(answers)
        self.text2text = text2text
        self.sources: TokenizersCodec = (
            self if sources is None else TokenizersCodec(sources, SOURCE_TOKENIZER_FILE)
        )

    def encode_source(self, text: str, source_language: str = "") -> tuple[int, ...]:
        """Return the ids that the encoder reads: the text's, and what the template puts around them.

        Args:
            text: the source.
            source_language: its language's code; empty for the bundle's default.

        Raises:
            RequestError: a language is missing, unknown, or named to a model that has none.
        """
        encoder_decoder = self.text2text
        language = self._language(
            encoder_decoder.source_template,
            "source_language",
            source_language,
            encoder_decoder.default_source_language,
        )
        place = encoder_decoder.source_template.index(TEXT)
        return (
            *self._ids(encoder_decoder.source_template[:place], language),
            *self.sources.encode(text, add_special_tokens=False),
            *self._ids(encoder_decoder.source_template[place + 1 :], language),
        )

    def decoder_prefix(self, target_language: str = "") -> tuple[int, ...]:
        """Return the ids that an answer begins with, never drawn.

        Args:
            target_language: code of the answer's language; empty for the bundle's default.

        Raises:
            RequestError: a language is missing, unknown, or named to a model that has none.
        """
        encoder_decoder = self.text2text
        language = self._language(
            encoder_decoder.decoder_prefix,
            "target_language",
            target_language,
            encoder_decoder.default_target_language,
        )
        return self._ids(encoder_decoder.decoder_prefix, language)

    def encode_prefix(self, text: str) -> tuple[int, ...]:
        """Return the ids of the text that a request wants its answer to begin with."""
        return self.encode(text, add_special_tokens=False)

    def _language(self, template: Template, field: str, code: str, default: str) -> str:
        """Return the code of the language that a template wants; empty where it wants none."""
        languages = self.text2text.languages
        if LANGUAGE not in template:
            if code:
                raise RequestError(
                    field, "this model is not told the language; leave the field out"
                )
            return ""
        chosen = code or default
        if chosen not in languages:
            listed = ", ".join([*languages][:_MOST_LISTED])
            num_more = len(languages) - _MOST_LISTED
            rule = "must be a language of this model" if code else "required by this model"
            raise RequestError(field, f"{rule}: {listed}{f' and {num_more} more' * (num_more > 0)}")
        return chosen

    def _ids(self, template: Template, language: str) -> tuple[int, ...]:
        """Return the ids of a part of a template without its text."""
        languages = self.text2text.languages
        return tuple(one if isinstance(one, int) else languages[language] for one in template)


def open_codec(bundle: Bundle) -> TokenizersCodec:
    """Return the codec of a bundle, a ``EncoderDecoderCodec`` where its models have an encoder.

    Raises:
        BundleError: a tokenizer cannot be read.
    """
    answers, text2text = bundle.read(TOKENIZER_FILE), bundle.manifest.text2text
    if text2text is None:
        return TokenizersCodec(answers)
    has_sources = text2text.has_source_tokenizer
    return EncoderDecoderCodec(
        answers, text2text, bundle.read(SOURCE_TOKENIZER_FILE) if has_sources else None
    )


def max_token_bytes(description: Mapping[str, Any]) -> int | None:
    """Return the bytes of a text that one token stands for at most; None where it may stand for any number.

    Known of byte-level BPE whose vocabulary has every byte: each byte of a text is part of a token there. Other
    tokenizers may drop parts of a text, or take one unknown token for a long word.

    Args:
        description: the contents of a ``tokenizer.json``.
    """
    model, added = description["model"], description.get("added_tokens", ())
    vocab = model.get("vocab", ())
    steps = [*_steps(description.get("pre_tokenizer"))]
    kinds = {step["type"] for step in steps}
    is_lossless = (
        model.get("type") == "BPE"
        and "ByteLevel" in kinds
        and kinds.issubset(_LOSSLESS)
        and not any(step.get("behavior") == "Removed" for step in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
    )
    normalizers = {step["type"] for step in _steps(description.get("normalizer"))}
    if not is_lossless or not normalizers.issubset({"NFC"}):
        return None
    # One letter stands for each byte of a token.
    longest = max([*map(len, vocab), *(len(token["content"].encode()) for token in added)])
    return longest * (_NFC_SHORTENS if normalizers else 1)


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, those within sequences too."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for inner in part.get("pretokenizers", part.get("normalizers", ())):
        yield from _steps(inner)


def tokenize_bad_words(codec: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words: each at a text's start and, where it differs, after a space.

    Source: vLLM, ``SamplingParams.update_from_tokenizer``.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = codec.encode(word.lstrip(), add_special_tokens=False)
        spaced = codec.encode(" " + word.lstrip(), add_special_tokens=False)
        if plain:
            sequences.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            sequences.append(spaced)
    return tuple(sequences)
