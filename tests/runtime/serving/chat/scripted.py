"""Servers of a chat template whose model writes a given text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from outrider.engines.base import FloatArray
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.tokenizer import TokenizersCodec
from tokenizers import Tokenizer

from tests.runtime.conftest import EOS
from tests.runtime.serving.chat.shapes import SHAPES, template_of

USER = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}, "b": {"const": 1}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("weather", CITY), ("weather_more", NUMBERS))
]


def writing(
    tokenizer: Tokenizer, text: str, opening: str, slip: int = 0
) -> Callable[..., FloatArray]:
    """Return a model that writes a text behind the prompt, whose end is ``opening``, and then the end token.

    Args:
        tokenizer: of the model.
        text: to write; where a constraint bans its next token, another one comes in its place.
        opening: a token and what follows it.
        slip: every so many tokens another one is the likeliest: of a draft model that is sometimes wrong.
    """
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
    first, *rest = tokenizer.encode(opening, add_special_tokens=False).ids
    noise = np.random.default_rng(5).normal(size=tokenizer.get_vocab_size())

    def logits(prefix: tuple[int, ...]) -> FloatArray:
        begin = len(prefix) - 1 - prefix[::-1].index(first)
        place = len(prefix) - begin - 1 - len(rest)
        found = noise.astype(np.float32)
        found[ids[min(place, len(ids) - 1)]] = 99.0
        if slip and place % slip == 0:
            found[(place * 7) % 90] = 199.0
        return found

    return logits


def scripted(shape: str, text: str, opening: str, **options: Any) -> dict[str, Any]:
    """Return the options of a server of a published template's shape, whose model writes a text."""
    found = SHAPES[shape]
    tokenizer = found.tokenizer()
    source = tokenizer.to_str().encode()
    return {
        "tokenizer": source,
        "chats": ChatEncoder(found.files(template_of(shape)), TokenizersCodec(source)),
        "target": writing(tokenizer, text, opening),
        "draft": writing(tokenizer, text, opening, slip=3),
        "vocab_size": tokenizer.get_vocab_size(),
        **options,
    }
