"""Chats over HTTP: OpenAI's messages, and what stands beside them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.requests import json_types

from tests.runtime.serving.chat.test_requests import HELLO, RENDERED, TOKENIZER, chat_server

GREEDY = {"messages": HELLO, "max_tokens": 4, "temperature": 0}


@pytest.fixture
def start_chat(start_http):
    """A server of a bundle with a chat template."""

    def begin(**options: Any) -> Any:
        return start_http(**chat_server() | options)

    return begin


async def prompt_of(http: Any, **fields: Any) -> str:
    tokens = (await http.ask("/tokenize", fields)).json()["tokens"]
    text: str = (await http.ask("/detokenize", {"tokens": tokens})).json()["prompt"]
    return text


async def test_a_chat_is_answered_with_a_message_or_with_its_deltas(start_chat):
    async with start_chat() as http:
        answer = (await http.chat(**GREEDY)).json()
        *chunks, done = (await http.chat(**GREEDY, stream=True)).events()
        assert await prompt_of(http, messages=HELLO) == RENDERED
    message = answer["choices"][0]["message"]
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert (message["role"], message["refusal"]) == ("assistant", None)
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in one for one in deltas[1:])
    assert "".join(one["content"] for one in deltas) == message["content"]
    assert done == "[DONE]"


async def test_tokens_of_a_message_have_log_probabilities_and_bytes(start_chat):
    async with start_chat() as http:
        answer = await http.chat(**GREEDY, logprobs=True, top_logprobs=2)
        bare = await http.chat(**GREEDY, logprobs=True)
        refused = await http.chat(**GREEDY, top_logprobs=2)
    choice = answer.json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None and len(content) == 4
    for one in content:
        assert one["logprob"] == one["top_logprobs"][0]["logprob"]
        assert bytes(one["bytes"]).decode() == one["token"]
        assert len(one["top_logprobs"]) == 2
    assert bare.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert (refused.status, refused.error["param"]) == (400, "top_logprobs")


async def test_a_chat_that_is_too_long_is_refused_by_the_field_that_it_came_in(start_chat):
    text = "x" * 99
    async with start_chat(max_context=64) as http:
        found = [
            await http.chat(messages=[{"role": "user", "content": text}]),
            await http.ask("/v1/responses", {"input": text}),
            await http.complete(prompt=text),
        ]
    assert [one.error["param"] for one in found] == ["messages", "input", "prompt"]
    assert {one.error["code"] for one in found} == {"context_length_exceeded"}


async def test_a_rule_on_prompts_names_no_field_of_answers(start_chat):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    async with start_chat() as http:
        answer = await http.chat(**asked, max_tokens=0)
    assert answer.error["param"] == "max_tokens"
    assert answer.error["message"].endswith("or 0 with logprobs or echo")


async def test_a_chat_may_fill_the_context_and_the_newer_name_of_its_limit_wins(start_chat):
    async with start_chat(max_context=64) as http:
        rest = {"messages": HELLO, "temperature": 0}
        whole = (await http.chat(**rest)).json()["usage"]
        short = (await http.chat(**rest, max_tokens=9, max_completion_tokens=2)).json()["usage"]
        with_gRPC = await http.running.client.complete(messages=HELLO, temperature=0.0)
    assert whole["total_tokens"] == 64 and short["completion_tokens"] == 2
    assert with_gRPC.text


async def test_parts_names_and_tools_reach_the_template(start_chat):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    ]}  # fmt: skip
    async with start_chat() as http:
        as_parts = await prompt_of(
            http, messages=[{"role": "user", "content": parts, "name": None}]
        )
        with_tools = await prompt_of(http, messages=[*HELLO, called], tools=[tool])
        without = await prompt_of(http, messages=HELLO, tools=[tool], tool_choice="none")
        thinking = await prompt_of(
            http, messages=HELLO, chat_template_kwargs={"enable_thinking": False}
        )
        ahead = await prompt_of(http, messages=HELLO, add_generation_prompt=False)
    assert as_parts == RENDERED.replace("Hello", "Hel\nlo")
    assert "clock" in with_tools and "<tool_call>" in with_tools
    assert without == RENDERED and "<think>" in thinking
    assert ahead == RENDERED.removesuffix("<|im_start|>assistant\n")


REFUSED = [
    ({"messages": None}, "messages", "is required"),
    ({"messages": []}, "messages", "is required"),
    ({"messages": [7]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "must be a string"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "array of parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content.type",
        "must be text",
    ),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.role", "must be 1..64 bytes"),
    ({"tools": [7]}, "tools", "must be a JSON array of objects"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools to call"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "must be one of default"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not have messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", ""),
    ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
    ({"audio": {}}, "audio", "not supported"),
]


async def test_what_a_chat_cannot_have_is_refused_by_name(start_chat):
    async with start_chat() as http:
        for fields, name, rule in REFUSED:
            answer = await http.chat(**GREEDY | fields)
            assert answer.status == 400, fields
            assert answer.error["param"] == name, answer.error
            assert rule in answer.error["message"], answer.error


def test_what_is_too_deep_to_be_passed_on_is_refused():
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(RequestError, match="tools: must be less deep"):
        json_types.json_text("tools", deep)


async def test_a_bundle_without_a_template_refuses_chats(start_http):
    async with start_http() as http:
        answer = await http.chat(**GREEDY)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert answer.error["code"] == "unsupported_option"


async def test_what_no_grammar_keeps_of_a_schema_is_refused_or_left_out_as_the_caller_says(
    start_chat,
):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    asked = {"name": "x", "schema": {**schema, "uniqueItems": True, "contains": {"const": 1}}}
    async with start_chat(tokenizer=TOKENIZER.to_str().encode()) as http:
        fields = GREEDY | {"max_tokens": 40}
        answers = [
            await http.chat(**fields, response_format={"type": "json_schema", "json_schema": one})
            for one in (asked, {**asked, "strict": True}, {**asked, "strict": False})
        ]
    for refused in answers[:2]:
        assert refused.status == 400
        assert "cannot keep contains, uniqueItems; leave it out" in refused.error["message"]
    content = json.loads(answers[2].json()["choices"][0]["message"]["content"])
    assert len(content) == 2 and {*content} <= {1, 2}


async def test_an_answer_has_the_form_that_is_asked_for(start_chat):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    tokenizer = TOKENIZER.to_str().encode()
    async with start_chat(tokenizer=tokenizer) as http:
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields = GREEDY | {"max_tokens": 40}
        answer = await http.chat(**fields, response_format=asked)
        own = await http.chat(**fields, json_schema=json.dumps(schema))
        either = await http.chat(**fields, regex="x", json_schema="{}")
        both = await http.chat(**fields, response_format=asked, json_schema="{}")
        text = await http.chat(**fields, response_format={"type": "text"})
    content = answer.json()["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in (1, 2)
    assert own.json()["choices"][0]["message"]["content"] == content
    assert (either.status, either.error["param"]) == (400, "json_schema")
    assert (both.status, both.error["param"]) == (400, "json_schema")
    assert text.status == 200
