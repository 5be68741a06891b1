"""What a bundle says of conversations: its chat templates and the tokens that have a meaning in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from msgspec import Meta
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.fields import Text, check_levels, read_json
from outrider.engines.bundle.names import (
    CHAT_FOLDER,
    CHAT_TOKENS_FILE,
    GENERATION_DEFAULTS_FILE,
    TEMPLATE_SUFFIX,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFiles:
    """The contents of a bundle's folder ``chat``.

    Attributes:
        templates: Jinja sources by name, at least one.
        special_tokens: variables of every template, such as "bos_token".
        control_tokens: tokens that steer the model wherever they stand.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    control_tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatTokens:
    special_tokens: Mapping[str, Text]
    control_tokens: tuple[Annotated[str, Meta(min_length=1)], ...]


def read_chat(bundle: Bundle) -> ChatFiles | None:
    """Return what a bundle says of conversations; None where it has no template.

    Raises:
        BundleError: a file is not what it should be; names it.
    """
    paths = {PurePosixPath(name): name for name in bundle.manifest.files}
    templates = {
        path.stem: _text(bundle, name)
        for path, name in sorted(paths.items())
        if path.parent == PurePosixPath(CHAT_FOLDER) and path.suffix == TEMPLATE_SUFFIX
    }
    if not templates:
        return None
    tokens = read_json(bundle.read(CHAT_TOKENS_FILE), _ChatTokens, where=CHAT_TOKENS_FILE)
    return ChatFiles(
        templates=templates,
        special_tokens=tokens.special_tokens,
        control_tokens=tokens.control_tokens,
    )


def read_generation_defaults(bundle: Bundle) -> Mapping[str, object]:
    """Return what a bundle's checkpoint asks for in generation, by names of Transformers; empty for nothing.

    Raises:
        BundleError: the file has no JSON object, or one of numbers that are not finite.
    """
    if bundle.manifest.text2text is not None:
        return bundle.manifest.text2text.generation_defaults
    name = GENERATION_DEFAULTS_FILE
    if name not in bundle.manifest.files:
        return {}
    defaults = read_json(bundle.read(name), dict[str, object], where=name)
    check_levels(defaults, "values", where=name)
    return defaults


def _text(bundle: Bundle, name: str) -> str:
    try:
        return bundle.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{name}: not UTF-8") from error
