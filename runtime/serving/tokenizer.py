"""Converts text to token ids and back, with the bundle's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

from outrider.engines.base import BundleError
from outrider.engines.bundle.manifest import TOKENIZER_FILE
from outrider.runtime.core.text import REPLACEMENT
from tokenizers import Tokenizer, decoders

# Streams decode the last one or two tokens many times: half of a step's work on text. A pair takes 310 bytes.
_SHORT = 2
_MOST_SHORT_TEXTS = 1 << 12


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

    Raises:
        BundleError: it cannot be read.
    """

    def __init__(self, source: Path | bytes) -> None:
        try:
            self.source = source if isinstance(source, bytes) else source.read_bytes()
            self._tokenizer = Tokenizer.from_str(self.source.decode("utf-8"))
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
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

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
