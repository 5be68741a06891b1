"""What a bundle says of conversations: its chat templates and the tokens that have a meaning in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.fields import FieldReader
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
    reader = FieldReader(_json(bundle, CHAT_TOKENS_FILE), where=CHAT_TOKENS_FILE)
    control = reader.values.get("control_tokens")
    if not isinstance(control, list) or not all(isinstance(one, str) and one for one in control):
        raise reader.wrong("control_tokens", "a list of strings that are not empty")
    return ChatFiles(
        templates=templates,
        special_tokens=reader.section("special_tokens").texts(),
        control_tokens=tuple(control),
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
    return FieldReader({"values": _json(bundle, name)}, where=name).plain("values")


def _text(bundle: Bundle, name: str) -> str:
    try:
        return bundle.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{name}: not UTF-8") from error


def _json(bundle: Bundle, name: str) -> object:
    try:
        found: object = json.loads(_text(bundle, name))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name}: not JSON: {error}") from error
    return found
