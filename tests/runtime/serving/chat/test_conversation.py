"""What a conversation may say, field by field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from outrider.runtime.core.checks.rules import check_chat
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.core.params import ChatMessage, ChatParams
from outrider.runtime.serving.chat.control_token_escaping import MARK_START, ControlTokenEscaping
from outrider.runtime.serving.chat.conversation import marked, read_conversation
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.chat.files import ChatFiles
from outrider.runtime.serving.tokenizer import TokenizersCodec
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.runtime.serving.chat.shapes import byte_tokenizer

HELLO = ChatMessage(role="user", content="Hello")
CHAT = ChatParams(messages=(HELLO,))
DEEP = "[" * 40 + "]" * 40


def with_fields(text: str, content: str = "") -> ChatParams:
    return ChatParams(messages=(ChatMessage(role="user", content=content, fields=text),))


@pytest.mark.parametrize(
    ("field", "chat"),
    [
        ("chat.tools_json", replace(CHAT, tools="{}")),
        ("chat.tools_json", replace(CHAT, tools="[1]")),
        ("chat.tools_json", replace(CHAT, tools="[{")),
        ("chat.tools_json", replace(CHAT, tools="[" * 100_000)),
        ("chat.tools_json", replace(CHAT, tools='[{"a": 1e999}]')),
        ("chat.tools_json", replace(CHAT, tools='[{"a": NaN}]')),
        ("chat.tools_json", replace(CHAT, tools='[{"a": ' + "1" * 5000 + "}]")),
        ("chat.template_arguments_json", replace(CHAT, arguments="[]")),
        ("chat.template_arguments_json", replace(CHAT, arguments='{"a": "\\ud800"}')),
        ("chat.template_arguments_json", replace(CHAT, arguments='{"\\udfff": 1}')),
        ("chat.template_arguments_json", replace(CHAT, arguments=f'{{"a": {DEEP}}}')),
        ("chat.template_arguments_json", replace(CHAT, arguments='{"messages": []}')),
        ("chat.template_arguments_json", replace(CHAT, arguments='{"tools": []}')),
        (
            "chat.template_arguments_json",
            replace(CHAT, arguments=json.dumps({str(i): i for i in range(65)})),
        ),
        (
            "chat.template_arguments_json: documents",
            replace(CHAT, arguments='{"documents": ["text"]}'),
        ),
        ("chat.messages.fields_json", with_fields("[]")),
        ("chat.messages.fields_json", with_fields('{"role": "system"}')),
        ("chat.messages.fields_json", with_fields('{"content": []}', "text")),
    ],
)
def test_a_refusal_names_the_field(field: str, chat: ChatParams) -> None:
    with pytest.raises(RequestError) as refusal:
        read_conversation(chat)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"video": "x"},
        {"type": "input_audio"},
    ],
)
def test_images_and_their_like_are_refused(part: dict[str, object]) -> None:
    """A template would write a token in their place, and nothing would be behind it."""
    chat = with_fields(json.dumps({"content": [{"type": "text", "text": "What is this?"}, part]}))
    with pytest.raises(UnsupportedOption, match=r"fields_json.*content of texts: .* no images"):
        read_conversation(chat)


def test_messages_are_as_transformers_leaves_them() -> None:
    fields = '{"content": null, "name": "Ann", "tool_calls": null}'
    chat = ChatParams(
        messages=(replace(HELLO, fields='{"name": "Bob"}'), ChatMessage(role="a", fields=fields))
    )
    assert read_conversation(chat).messages == [
        {"role": "user", "content": "Hello", "name": "Bob"},
        {"role": "a", "name": "Ann"},
    ]


def test_an_answer_is_asked_for_unless_the_last_message_goes_on() -> None:
    assert read_conversation(CHAT).adds_generation_prompt
    assert not read_conversation(replace(CHAT, continues_final=True)).adds_generation_prompt
    assert not read_conversation(replace(CHAT, adds_generation_prompt=False)).adds_generation_prompt


BOUNDS: dict[str, Any] = {
    "max_messages": 2, "max_bytes": 20, "templates": ("default", "rag"), "has_encoder": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "chat", "bounds"),
    [
        ("chat", CHAT, {"has_encoder": True}),
        ("chat", CHAT, {"templates": ()}),
        ("chat.messages", ChatParams(messages=()), {}),
        ("chat.messages", ChatParams(messages=(HELLO,) * 3), {}),
        ("chat", replace(CHAT, tools="x" * 12), {}),
        ("chat.messages.role", ChatParams(messages=(ChatMessage(role=""),)), {}),
        (
            "chat.messages.role",
            ChatParams(messages=(ChatMessage(role="r" * 65),)),
            {"max_bytes": 99},
        ),
        ("chat.template", replace(CHAT, template="tool_use"), {}),
        (
            "chat.add_generation_prompt",
            replace(CHAT, adds_generation_prompt=True, continues_final=True),
            {},
        ),
    ],
)
def test_bounds_come_before_any_parsing(
    field: str, chat: ChatParams, bounds: dict[str, Any]
) -> None:
    check_chat(CHAT, **BOUNDS)
    with pytest.raises(RequestError) as refusal:
        check_chat(chat, **BOUNDS | bounds)
    assert refusal.value.field == field
    is_option = bool({"has_encoder", "templates"} & bounds.keys())
    assert isinstance(refusal.value, UnsupportedOption) == is_option


def encoder_of(
    templates: dict[str, str], tokenizer: Tokenizer | None = None, control: tuple[str, ...] = ()
) -> ChatEncoder:
    found = tokenizer or byte_tokenizer(["<s>", "</s>"])
    files = ChatFiles(
        templates=templates, special_tokens={"bos_token": "<s>"}, control_tokens=control
    )
    return ChatEncoder(files, TokenizersCodec(found.to_str().encode()))


def test_the_template_is_the_one_that_transformers_takes() -> None:
    both = encoder_of({"default": "a", "tool_use": "b", "rag": "c"})
    assert both.render(CHAT, 9) == "a"
    assert both.render(replace(CHAT, tools="[]"), 9) == "b"
    assert both.render(replace(CHAT, template="rag", tools="[]"), 9) == "c"
    assert encoder_of({"default": "a"}).render(replace(CHAT, tools="[]"), 9) == "a"
    with pytest.raises(RequestError, match=r"chat\.template: required: one of rag"):
        encoder_of({"rag": "c"}).render(CHAT, 9)


def test_arguments_win_over_special_tokens() -> None:
    one = encoder_of({"default": "{{ bos_token }}{{ x }}"})
    assert one.render(CHAT, 99) == "<s>"
    assert one.render(replace(CHAT, arguments='{"bos_token": "b", "x": 1}'), 99) == "b1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no such thing", HELLO),
        ("{{ messages[0].content | upper }}", HELLO),
        ("{{ messages[0].content }}", ChatMessage(role="user", fields='{"content": [{"a": "b"}]}')),
        ("{{ messages[0].content }}", ChatMessage(role="user", fields='{"content": null}')),
    ],
)
def test_a_message_that_cannot_go_on_is_refused(source: str, message: ChatMessage) -> None:
    chat = ChatParams(messages=(message,), continues_final=True)
    with pytest.raises(RequestError, match=r"chat\.continue_final_message: "):
        encoder_of({"default": source}).render(chat, 999)


def test_a_message_of_parts_goes_on_behind_its_last_text() -> None:
    fields = json.dumps({"content": [{"text": "one "}, {"text": "two "}, {"other": 1}]})
    chat = ChatParams(messages=(ChatMessage(role="a", fields=fields),), continues_final=True)
    source = "{% for one in messages[0].content %}{{ one.text }}{% endfor %}!"
    assert encoder_of({"default": source}).render(chat, 999) == "one two "


def test_everything_but_the_models_own_words_is_marked() -> None:
    chat = ChatParams(
        messages=tuple(
            ChatMessage(role=role, content="</s>", fields='{"a": {"</s>": ["</s>"]}}')
            for role in ("system", "user", "assistant", "tool", "x</s>")
        ),
        tools='[{"name": "</s>"}]',
        arguments='{"a": "</s>", "documents": [{"text": "</s>"}]}',
    )
    found = marked(read_conversation(chat), ControlTokenEscaping(("</s>",)))
    counts = [json.dumps(one, ensure_ascii=False).count(MARK_START) for one in found.messages]
    assert counts == [0, 3, 0, 3, 4]
    for part in (found.tools, found.arguments, found.documents):
        assert json.dumps(part, ensure_ascii=False).count(MARK_START) == 1


def test_a_control_token_that_is_a_word_is_spelled_in_letters() -> None:
    """As in tokenizers of the unigram kind: their vocabulary has control tokens, and takes them for words."""
    pieces = [("<s>", 0.0), *((letter, -5.0) for letter in "<s>a\n")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["<s>"])
    encoder = encoder_of({"default": "<s>{{ messages[0].content }}"}, tokenizer, ("<s>",))
    letters = [tokenizer.token_to_id(letter) for letter in "a<s>a"]
    chat = ChatParams(messages=(ChatMessage(role="user", content="a<s>a"),))
    assert encoder.encode(chat, 99) == (0, *letters)


def test_a_control_token_of_one_letter_is_refused() -> None:
    pieces = [("s", 0.0), ("a", -1.0), ("\n", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.add_special_tokens(["s"])
    encoder = encoder_of({"default": "{{ messages[0].content }}"}, tokenizer, ("s",))
    with pytest.raises(RequestError, match=r"chat\.messages: has a control token"):
        encoder.encode(ChatParams(messages=(ChatMessage(role="user", content="as"),)), 99)


def test_words_behind_a_mark_get_no_space_of_a_texts_beginning() -> None:
    tokenizer = Tokenizer(
        models.BPE({one: i for i, one in enumerate("▁<s>ab\n")}, [])  # one token a letter
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>"])
    encoder = encoder_of({"default": "{{ messages[0].content }}"}, tokenizer, ("<s>",))
    ids = encoder.encode(ChatParams(messages=(ChatMessage(role="user", content="a<s>b"),)), 99)
    assert "".join(tokenizer.id_to_token(one) for one in ids) == "▁a<s>b"


def test_marks_that_a_template_parts_still_part_the_text() -> None:
    encoder = encoder_of({"default": "{{ messages[0].content[:4] }}|"}, control=("</s>",))
    chat = ChatParams(messages=(ChatMessage(role="user", content="</s>"),))
    tokenizer = byte_tokenizer(["<s>", "</s>"])
    assert tokenizer.decode(encoder.encode(chat, 99)) == "</s|"
