"""What a decoder-only checkpoint says of conversations and of generation, as files of a bundle.

A checkpoint that says nothing adds no file, and nothing is opened for it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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

# Where Transformers finds templates: beside the tokenizer, and in its configuration; in earlier checkpoints of models
# that see, in a file of the processor.
_TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_FILE = "chat_template.json"
_MORE_TEMPLATES = "additional_chat_templates"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Names become files of the bundle.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_PROBE = "outrider"
# Templates of models that see may know a content as a list of parts only, and leave out one that is a text.
_TEXTS_AS_PARTS = (
    "{%- set given = namespace(messages=[]) -%}{%- for one in messages -%}{%- set given.messages = given.messages + "
    "[dict(one, content=[{'type': 'text', 'text': one.content}]) if one.content is string else one] -%}{%- endfor -%}"
    "{%- set messages = given.messages %}{{ '' }}"
)


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
    templates = _of_processor(path) or own.chat_templates()
    if not templates:
        rule = f"Transformers does not find its chat template: {_TOKENIZER_CONFIG} must say how to open it"
        raise BundleError(f"{path.name}: {rule}")
    (out / CHAT_FOLDER).mkdir()
    for name, source in templates.items():
        _check_template(path.name, name, source)
        file = out / CHAT_FOLDER / f"{name}{TEMPLATE_SUFFIX}"
        before = _TEXTS_AS_PARTS if _knows_parts_only(source) else ""
        # Byte for byte, whatever ends the lines.
        file.write_bytes((before + source).encode())
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
    return any(_template_in(path / name) for name in (_TOKENIZER_CONFIG, _PROCESSOR_FILE))


def _template_in(file: Path) -> Any:
    """Return what a JSON file says of chat templates; None where it says nothing, or does not exist."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise BundleError(f"{file.parent.name}: {file.name} is not a JSON object") from error


def _of_processor(path: Path) -> dict[str, str]:
    """Return the template of an earlier checkpoint's processor, which Transformers takes before the tokenizer's."""
    found = None if (path / _TEMPLATE_FILE).is_file() else _template_in(path / _PROCESSOR_FILE)
    return {"default": found} if isinstance(found, str) else {}


def _knows_parts_only(source: str) -> bool:
    """Return whether a template shows the text of a content of parts, and none of a content that is a text."""

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            texts, _ = render_jinja_template(conversations=[messages], chat_template=source)
        # What templates refuse or fail on is theirs to say.
        except Exception:
            return False
        return _PROBE in texts[0]

    return shows([{"type": "text", "text": _PROBE}]) and not shows(_PROBE)


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
