"""Converts text to token ids and back, with the bundle's ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

from outrider.engines.base import BundleError
from outrider.engines.bundle.manifest import TOKENIZER_FILE
from outrider.runtime.core.text import REPLACEMENT
from tokenizers import Tokenizer, decoders, pre_tokenizers

# Streams decode the last one or two tokens many times: half of a step's work on text. A pair takes 310 bytes.
_SHORT = 2
_MOST_SHORT_TEXTS = 1 << 12
# NFC shortens a text to 2/7 of its bytes at most (what U+0390 is composed of; by enumeration).
_NFC_SHORTENS = 4
# Steps before the model that keep every byte of a text.
_LOSSLESS = ("ByteLevel", "Digits", "Punctuation", "Split")


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

    Attributes:
        source: its bytes.
        max_token_bytes: bytes of a text that one token stands for at most; None where that is not known.

    Raises:
        BundleError: it cannot be read.
    """

    def __init__(self, source: Path | bytes) -> None:
        try:
            self.source = source if isinstance(source, bytes) else source.read_bytes()
            text = self.source.decode("utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            self.max_token_bytes = max_token_bytes(json.loads(text))
        # The library raises bare Exception for a file it cannot read.
        except Exception as error:
            raise BundleError(f"{TOKENIZER_FILE}: not a tokenizer") from error
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

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        decode = self._decode_short if len(ids) <= _SHORT else self._decode
        return decode(tuple(ids), skip_special_tokens)

    def _piece(self, token: int, skip_special_tokens: bool) -> str | None:
        """Text of a token of whole characters, the same behind any text; None for any other token."""
        text = self._decode((token,), skip_special_tokens) if self._has_pieces else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def spell(self, token: int) -> str:
        """Return one token as the vocabulary spells it; empty beyond the vocabulary."""
        return self._tokenizer.id_to_token(token) or ""


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
