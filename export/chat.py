"""What a decoder-only checkpoint says of conversations and of generation, as files of a bundle.

A checkpoint that says nothing adds no file, and nothing is opened for it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.names import (
    CHAT_FOLDER,
    CHAT_TOKENS_FILE,
    GENERATION_DEFAULTS_FILE,
    TEMPLATE_SUFFIX,
)
from outrider.export.tokenizers.generation import generation_defaults
from outrider.export.tokenizers.own import OwnTokenizer
from transformers import GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template

# Where Transformers finds templates: beside the tokenizer, and in its configuration.
_TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Names become files of the bundle.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def write_chat(path: Path, out: Path) -> None:
    """Write a checkpoint's chat templates, and the tokens that they use, to a bundle's folder.

    Args:
        path: the checkpoint's folder.
        out: the bundle's folder.

    Raises:
        BundleError: Transformers does not open the tokenizer or finds no template with it, a template does not
            compile, or its name is none for a file.
    """
    if not _has_template(path):
        return
    own = OwnTokenizer(path)
    templates = own.chat_templates()
    if not templates:
        rule = f"Transformers does not find its chat template: {_TOKENIZER_CONFIG} must say how to open it"
        raise BundleError(f"{path.name}: {rule}")
    (out / CHAT_FOLDER).mkdir()
    for name, source in templates.items():
        _check_template(path.name, name, source)
        file = out / CHAT_FOLDER / f"{name}{TEMPLATE_SUFFIX}"
        # Byte for byte, whatever ends the lines.
        file.write_bytes(source.encode())
    tokens = {"special_tokens": own.special_tokens(), "control_tokens": own.control_tokens()}
    _write_json(out / CHAT_TOKENS_FILE, tokens)


def write_generation_defaults(path: Path, out: Path) -> None:
    """Write what a checkpoint's ``generation_config.json`` asks for, but for special tokens, to a bundle's folder.

    Raises:
        BundleError: a number is not finite.
    """
    if not (path / "generation_config.json").is_file():
        return
    asked = generation_defaults(GenerationConfig.from_pretrained(path, local_files_only=True))
    if asked:
        _write_json(out / GENERATION_DEFAULTS_FILE, asked)


def _has_template(path: Path) -> bool:
    """Return whether a checkpoint may have a chat template: opening its tokenizer takes seconds."""
    if (path / _TEMPLATE_FILE).is_file() or (path / _MORE_TEMPLATES).is_dir():
        return True
    config = path / _TOKENIZER_CONFIG
    if not config.is_file():
        return False
    try:
        return bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
    except (ValueError, AttributeError) as error:
        raise BundleError(f"{path.name}: {_TOKENIZER_CONFIG} is not a JSON object") from error


def _check_template(checkpoint: str, name: str, source: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "its name must be 1..64 of [A-Za-z0-9._-] and begin with no dot"
        raise BundleError(f"{checkpoint}: chat template {name!r}: {rule}")
    try:
        # Of no conversations: this compiles the template and renders nothing.
        render_jinja_template(conversations=[], chat_template=source)
    # Whatever the compiler makes of a wrong text; jinja2 itself is no business of an export.
    except Exception as error:
        raise BundleError(f"{checkpoint}: chat template {name}: {error}") from error


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
