"""Single tokens as callers are shown them: texts, and the bytes that they stand for."""

from __future__ import annotations

import re
from functools import lru_cache

from outrider.runtime.core.text import REPLACEMENT
from outrider.runtime.serving.tokenizer import TextCodec

_MOST_TEXTS = 1 << 14
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""What a leading space is in vocabularies of SentencePiece."""


def _letters() -> dict[str, int]:
    """Return the bytes that letters stand for in byte-level vocabularies.

    Source: Radford et al. 2019, GPT-2, ``bytes_to_unicode``: what can be printed is itself, the rest follows at 256.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _letters()


class TokenText:
    """Spells the tokens of one codec; keeps what was asked for often."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.text = lru_cache(_MOST_TEXTS)(self._text)

    def _text(self, token: int) -> str:
        """Return a token's text; a token alone may not be a whole character."""
        text = self._codec.decode((token,), skip_special_tokens=False)
        if self._codec.spell(token).startswith(_SPACE) and not text.startswith(" "):
            return f" {text}"
        return text

    def bytes_of(self, token: int) -> list[int]:
        """Return a token's bytes of UTF-8, also where they are no whole character."""
        text = self.text(token)
        if REPLACEMENT in text:
            spelled = self._codec.spell(token)
            if (found := _BYTE.fullmatch(spelled)) is not None:
                return [int(found[1], 16)]
            if all(letter in _BYTE_OF for letter in spelled):
                return [_BYTE_OF[letter] for letter in spelled]
        return [*text.encode()]
