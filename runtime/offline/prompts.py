"""Reads prompts from a file, and encodes them as token ids that fit the bundle.

Of a model with an encoder a prompt is the source, in the bundle's own languages where it has any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import Manifest
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.core.params import ChatMessage, ChatParams, Prompt
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec, open_codec

Prompts = tuple[Prompt, ...]

KEY = "prompts"
FIELD = "prompt"
MAX_CHAT_BYTES = 1 << 22
"""Of a rendered prompt: far more than any context takes."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file.

    A ``.jsonl`` file has a JSON string, or an object with a string field "prompt", per line; any other file has one
    prompt per line. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, breaks these rules, or has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(KEY, f"{path}: must be a readable file of UTF-8 text") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(KEY, f"{path}: must have at least one prompt")
    if path.suffix != ".jsonl":
        return tuple(line for _, line in numbered)
    return tuple(_text(line, f"{path}: line {number}") for number, line in numbered)


def encode_prompts(
    texts: tuple[str, ...],
    codec: TokenizersCodec,
    *,
    max_tokens: int,
    manifest: Manifest,
    chats: ChatEncoder | None = None,
) -> Prompts:
    """Return the token ids of texts; with ``chats`` each is a user's message in the bundle's default template.

    Raises:
        ConfigError: a text has no token, is too long, or does not leave room for ``max_tokens``; or the model must be
            told a language.
    """
    max_context = manifest.max_context
    most = max_context - max_tokens
    if most < 1:
        raise ConfigError("max_tokens", f"must be less than {max_context}, the bundle's context")
    rule = f"must have 1..{most} tokens, so that {max_tokens} may follow"
    if isinstance(codec, EncoderDecoderCodec):
        assert manifest.target.source is not None
        most = manifest.target.source.max_source
        rule = f"must have 1..{most} tokens"
    prompts = tuple(
        prompt_of(text, codec) if chats is None else _chat_of(text, chats) for text in texts
    )
    for number, prompt in enumerate(prompts, 1):
        if not 1 <= len(prompt) <= most or len(prompt.tokens) + max_tokens > max_context:
            raise ConfigError(KEY, f"prompt {number}: {rule}")
    return prompts


def prompt_of(text: str, codec: TokenizersCodec) -> Prompt:
    """Return the token ids of a text.

    Raises:
        ConfigError: the model must be told a language.
    """
    if not isinstance(codec, EncoderDecoderCodec):
        return Prompt(tuple(codec.encode(text)))
    try:
        source, prefix = codec.encode_source(text), codec.decoder_prefix()
    except RequestError as error:
        raise ConfigError(KEY, f"the bundle has no default for {error.field}") from error
    return Prompt(prefix, source, codec.text2text.shares_vocabulary)


def _chat_of(text: str, chats: ChatEncoder) -> Prompt:
    """Return the token ids of a chat of one message.

    Raises:
        ConfigError: the template refuses it.
    """
    try:
        chat = ChatParams(messages=(ChatMessage(role="user", content=text),))
        return Prompt(chats.encode(chat, MAX_CHAT_BYTES))
    except RequestError as error:
        raise ConfigError(KEY, f"as a chat: {error}") from error


def own_prompts(
    texts: Sequence[str], path: Path | None, *, max_tokens: int
) -> Callable[[Bundle], Prompts] | None:
    """Return what encodes these texts and those of a file for a bundle; None without any.

    Raises:
        ConfigError: as ``read_prompts``; calling the result, as ``encode_prompts``.
    """
    everything = (*texts, *(() if path is None else read_prompts(path)))

    def encoded(bundle: Bundle) -> Prompts:
        codec = open_codec(bundle)
        return encode_prompts(everything, codec, max_tokens=max_tokens, manifest=bundle.manifest)

    return encoded if everything else None


def _text(line: str, where: str) -> str:
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise ConfigError(KEY, f"{where}: must be JSON") from error
    if isinstance(value, dict):
        value = value.get(FIELD)
    if not isinstance(value, str) or not value:
        raise ConfigError(KEY, f'{where}: must be a string, or an object with a string "{FIELD}"')
    return value
