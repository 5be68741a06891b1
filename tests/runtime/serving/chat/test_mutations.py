"""Known mistakes in the rendering of chats, each caught by what Transformers makes of some conversation."""

from __future__ import annotations

from types import ModuleType

import pytest
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat import control_token_escaping, conversation, encoder, template

from tests.mutants import assert_caught
from tests.runtime.serving.chat.test_conversation import (
    test_everything_but_the_models_own_words_is_marked as all_marked,
)
from tests.runtime.serving.chat.test_golden import (
    test_texts_and_ids_are_those_of_transformers as golden,
)
from tests.runtime.serving.chat.test_marks import HOSTILE
from tests.runtime.serving.chat.test_marks import (
    test_no_template_makes_a_control_token_of_what_people_write as hostile,
)


@pytest.mark.parametrize(
    ("module", "old", "new", "name"),
    [
        (template, "trim_blocks=True, ", "", "chatml"),
        (template, "lstrip_blocks=True, ", "", "chatml"),
        (template, "ensure_ascii=ensure_ascii", "ensure_ascii=True", "qwen25"),
        (template, "return json.dumps(\n", "return __import__('html').escape(json.dumps)(\n", "qwen25"),
        (conversation, " if value is not None}", "}", "llama3"),
        (conversation, '**message, "reasoning_content": given[0]}', "**message}", "qwen3"),
        (control_token_escaping, '"?" if words', '"??" if words', "zephyr"),
        (conversation, "if is_whole else rendered[:place].rstrip()", "", "mistral"),
        (control_token_escaping, "inner = self._control.sub(", "inner = text or self._control.sub(", "phi"),
        (encoder, "found[len(line) :] if", "found if", "phi"),
        (encoder, "encode(_NEW_LINE + text)", "encode(text)", "granite"),
        (encoder, "if piece:", "if piece and number % 2 == 0:", "gemma"),
        (encoder, "is_token = number % 2 == 1", "is_token = False", "deepseek"),
        (encoder, "if not one.isspace() and one", "if one", "gemma"),
        (encoder, "(*files.control_tokens, *found)", "files.control_tokens", "zephyr"),
        (encoder, "pieces[0], add_special_tokens=False", "pieces[0]", "command_r"),
    ],
)  # fmt: skip
def test_a_mistake_is_seen(
    module: ModuleType, old: str, new: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = (AssertionError, RequestError, AttributeError, TypeError)
    assert_caught(monkeypatch, module, old, new, lambda: golden(name), errors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('one["role"] in TRUSTED_ROLES', "True"),
        ('one["role"] in TRUSTED_ROLES', 'one["role"] not in ("user", "tool")'),
        ("documents=mark(conversation.documents)", "documents=conversation.documents"),
        ("tools=mark(conversation.tools)", "tools=conversation.tools"),
        ("arguments=mark(conversation.arguments)", "arguments=conversation.arguments"),
    ],
)
def test_what_is_left_unmarked_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, conversation, old, new, all_marked)


def test_unmarked_names_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        monkeypatch, control_token_escaping, "{_map_texts(name, change): ", "{name: ", all_marked
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{MARK_EDGE * front}", ""),
        ("{MARK_EDGE * back}", ""),
        ("is_part or any(", "any("),
        ("is_parted or ", ""),
        (" or start in starts", ""),
        (" or end in ends", ""),
        ("split(_unescaped(rendered))", "split(rendered)"),
        ('if "\\\\ud" in text else text', "if False else text"),
    ],
)
def test_a_way_around_the_marks_is_seen(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        for source, chat, text in HOSTILE:
            hostile(source, chat, text)

    assert_caught(monkeypatch, control_token_escaping, old, new, check)
