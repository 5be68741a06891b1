"""What Transformers makes of the conversations of ``tests.runtime.serving.chat.shapes``, as it is stored there.

``python -m tests.export.test_chat_golden`` stores it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from tests.runtime.serving.chat.shapes import FOLDER, SHAPES, Case, Shape, golden_of, template_of


def opened(shape: Shape, source: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=shape.tokenizer(), chat_template=source, **shape.special_tokens
    )


def golden(tokenizer: PreTrainedTokenizerFast, case: Case) -> dict[str, Any]:
    """The text and the ids of a conversation; neither where the template refuses it."""
    options = dict(
        tools=case.tools,
        add_generation_prompt=case.adds_prompt,
        continue_final_message=case.continues_final,
        **case.arguments,
    )
    messages = list(case.messages)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        return {"refused": str(error)}
    ids = tokenizer.apply_chat_template(
        messages, return_dict=False, sanitize_control_tokens=case.is_hostile, **options
    )
    return {"text": text, "ids": ids}


def all_golden(name: str) -> list[dict[str, Any]]:
    tokenizer = opened(SHAPES[name], template_of(name))
    return [golden(tokenizer, case) for case in SHAPES[name].cases]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_stored_is_what_transformers_renders(name: str) -> None:
    assert golden_of(name) == all_golden(name)


if __name__ == "__main__":
    for one in SHAPES:
        lines = [json.dumps(value, ensure_ascii=False) for value in all_golden(one)]
        text = "[\n" + ",\n".join(lines) + "\n]\n"
        (FOLDER / f"{one}.json").write_text(text, encoding="utf-8")
