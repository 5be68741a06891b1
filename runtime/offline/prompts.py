"""Reads prompts from a file, and encodes them as token ids that fit the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.engines.bundle.manifest import Bundle, Manifest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.tokenizer import TextToTextCodec, TokenizersCodec, open_codec

Prompts = tuple[tuple[int, ...], ...]

KEY = "prompts"
FIELD = "prompt"


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
    texts: tuple[str, ...], codec: TokenizersCodec, manifest: Manifest, *, max_tokens: int
) -> Prompts:
    """Return the token ids of texts: of the sources, where the models have an encoder.

    Raises:
        ConfigError: a text has no token, or does not leave room for ``max_tokens``; of sources, one is too long.
    """
    max_context, source = manifest.max_context, manifest.target.source
    if isinstance(codec, TextToTextCodec) and source is not None:
        return _encode_sources(texts, codec, source.max_source, max_context, max_tokens)
    most = max_context - max_tokens
    if most < 1:
        raise ConfigError("max_tokens", f"must be less than {max_context}, the bundle's context")
    prompts = tuple(tuple(codec.encode(text)) for text in texts)
    for number, prompt in enumerate(prompts, 1):
        if not prompt or len(prompt) + max_tokens > max_context:
            rule = f"prompt {number}: must have 1..{most} tokens, so that {max_tokens} may follow"
            raise ConfigError(KEY, rule)
    return prompts


def _encode_sources(
    texts: tuple[str, ...],
    codec: TextToTextCodec,
    max_source: int,
    max_context: int,
    max_tokens: int,
) -> Prompts:
    most = max_context - len(codec.decoder_prefix())
    if max_tokens > most:
        raise ConfigError("max_tokens", f"must be at most {most}, the bundle's context")
    sources = tuple(codec.encode_source(text) for text in texts)
    for number, source in enumerate(sources, 1):
        if not 0 < len(source) <= max_source:
            raise ConfigError(KEY, f"prompt {number}: must have 1..{max_source} tokens")
    return sources


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
        return encode_prompts(everything, codec, bundle.manifest, max_tokens=max_tokens)

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
