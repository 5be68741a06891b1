"""A vocabulary of six tokens, two of which spell what two others spell together, and grammars over it."""

from __future__ import annotations

import json
from functools import cache

from outrider.runtime.core.params import GrammarKind, GrammarParams
from outrider.runtime.grammar.base import Constraint
from outrider.runtime.grammar.constraint import GrammarConstraints

TEXTS = ("a", "b", "c", "ab", "bc")
END = 5
V = 6


def tokenizer(texts: tuple[str, ...] = TEXTS, special: tuple[str, ...] = ("</s>",)) -> bytes:
    """Return a ``tokenizer.json`` of byte-level BPE: texts of one letter, texts of two, special tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(texts) + index, "content": text, "special": True, **flags}
            for index, text in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: index for index, text in enumerate((*texts, *special))},
            "merges": [[text[0], text[1]] for text in texts if len(text) == 2],
        },
    }
    return json.dumps(contents).encode()


@cache
def constraints() -> GrammarConstraints:
    return GrammarConstraints(tokenizer(), V, (END,))


def regex(text: str) -> GrammarParams:
    return GrammarParams(kind=GrammarKind.REGEX, text=text)


def constraint(text: str) -> Constraint:
    """Return the constraint of a regular expression over the six tokens."""
    return constraints().constraint(regex(text))


def bits(row: object, vocab_size: int = V) -> set[int]:
    """Return the tokens that a row of a mask allows."""
    return {t for t in range(vocab_size) if int(row[t // 32]) >> (t % 32) & 1}  # type: ignore[index]
