"""``/v1/responses``: other names for what chats ask, and answers of items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.serving.chat.scripted import TOOLS, USER
from tests.runtime.serving.http.openai.test_tools import CALL, OTHER
from tests.runtime.serving.http.openai.test_tools import start_writing as start_writing

FUNCTIONS = [{"type": "function", **one["function"]} for one in TOOLS]
ASKED: dict[str, Any] = {"input": "Weather?", "temperature": 0, "max_output_tokens": 300}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


async def respond(http: Any, **fields: Any) -> Any:
    return await http.ask("/v1/responses", ASKED | fields)


def events_of(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types, in the order of their numbers."""
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def bare(items: list[dict[str, Any]]) -> list[Any]:
    """What items say, without names that a server makes."""
    return [
        (one["name"], one["arguments"])
        if one["type"] == "function_call"
        else (one["type"], one["content"][0]["text"])
        for one in items
    ]


async def test_a_response_has_reasoning_text_and_calls_as_items(start_writing):
    async with start_writing(f"<think>hm</think>\n\nSo:\n{CALL}\n{OTHER}") as http:
        answer = await respond(http, tools=FUNCTIONS, metadata={"a": "b"}, store=True, user="x")
        chat = await http.chat(messages=USER, tools=TOOLS, temperature=0, max_tokens=300)
    found = answer.json()
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert bare(found["output"]) == [
        ("reasoning", "hm"),
        ("message", "So:"),
        ("weather", '{"city": "Rome"}'),
        ("weather_more", '{"a": 12, "b": 1}'),
    ]
    assert {one["status"] for one in found["output"]} == {"completed"}
    assert len({one["id"] for one in found["output"]}) == 4
    assert (found["tools"], found["metadata"], found["store"]) == (FUNCTIONS, {"a": "b"}, False)
    assert found["max_output_tokens"] == 300
    usage = chat.json()["usage"]
    assert found["usage"]["output_tokens"] == usage["completion_tokens"]
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert answer.headers["outrider-ignored"] == "store, metadata, user"


async def test_events_add_up_to_the_response(start_writing):
    async with start_writing(f"<think>hm</think>\n\nSo:\n{CALL}") as http:
        whole = (await respond(http, tools=FUNCTIONS)).json()
        events = events_of(await respond(http, tools=FUNCTIONS, stream=True))
    first, second, *middle, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == "in_progress" and first["response"]["output"] == []
    assert last["type"] == "response.completed"
    assert bare(last["response"]["output"]) == bare(whole["output"])
    assert last["response"]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    texts: dict[int, str] = {}
    for event in middle:
        place = event["output_index"]
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert place == len(texts) and event["item"]["status"] == "in_progress"
                texts[place] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                texts[place] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[place]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[place]
            case "output_item.done":
                assert event["item"] == last["response"]["output"][place]
    assert [*texts.values()] == [text for _, text in bare(whole["output"])]


async def test_what_went_before_comes_back_as_items(start_writing):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "2", "name": "weather_more", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
    ]  # fmt: skip
    functions = [("1", "weather", '{"city": "Rome"}'), ("2", "weather_more", "{}")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "So.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in functions
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
    ]
    async with start_writing("Three.") as http:
        found = (await respond(http, input=items, instructions="Be brief.")).json()
        alone = (await respond(http, input=items[3:])).json()
        tokens = (await http.ask("/tokenize", {"messages": messages})).json()["count"]
    assert bare(found["output"]) == bare(alone["output"]) == [("message", "Three.")]
    assert found["usage"]["input_tokens"] == tokens
    assert found["instructions"] == "Be brief."


async def test_choices_forms_and_limits_are_those_of_chats(start_writing):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    async with start_writing("Hi", "qwen25") as http:
        named = {"type": "function", "name": "weather_more"}
        called = (await respond(http, tools=FUNCTIONS, tool_choice=named)).json()
        formed = (await respond(http, text=form)).json()
        cut = (await respond(http, max_output_tokens=1)).json()
        events = events_of(await respond(http, max_output_tokens=1, stream=True))
        empty = (await respond(http, stop=["H"])).json()
        plain = (await respond(http, text={"format": {"type": "text"}})).json()
        own = (await respond(http, speculation={"enabled": False}, top_k=1, min_tokens=0)).json()
    assert [name for name, _ in bare(called["output"])] == ["weather_more"]
    assert json.loads(bare(formed["output"])[0][1])["a"] in (1, 2)
    assert formed["text"] == form
    for one in (cut, events[-1]["response"]):
        assert one["status"] == "incomplete"
        assert one["incomplete_details"] == {"reason": "max_output_tokens"}
        assert one["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert bare(empty["output"]) == [("message", "")]
    assert bare(plain["output"]) == bare(own["output"]) == [("message", "Hi")]


REFUSED = [
    ({"input": None}, "input", "is required"),
    ({"input": [7]}, "input[0]", "must be an object"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "must be one of message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content.type", "input_text"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "array of parts"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name", "must be a string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"conversation": "c"}, "conversation", "stores no responses"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "auto"}, "truncation", "must be disabled"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "chat_template_kwargs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "must be text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be an object"),
    ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
    ({"n": 2}, "n", "one answer"),
    ({"temperature": 7}, "temperature", "must be"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "must be in"),
    ({"instructions": "x", "input": [{"role": "a" * 99, "content": ""}]}, "input.role", "must be"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice.name", "one of the"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "text.format.schema", "odd"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format", "left out with regex"),
    ({"json_schema": '{"type": "odd"}'}, "json_schema", "odd"),
    *(
        ({"json_schema": "{}", "text": {"format": {"type": kind, "schema": {}}}},
         "json_schema", "json_schema: must be left out with text.format")
        for kind in ("text", "json_object", "json_schema")
    ),
    ({"json_schema": "{}", "regex": "a"}, "json_schema", "json_schema: must be left out with regex"),
]  # fmt: skip


async def test_what_a_response_cannot_have_is_refused_by_name(start_writing):
    async with start_writing("Hi") as http:
        for fields, name, rule in REFUSED:
            for stream in (False, True):
                answer = await respond(http, **fields, stream=stream)
                assert answer.status == 400, fields
                assert answer.error["param"] == name, answer.error
                assert rule in answer.error["message"], answer.error


@pytest.mark.parametrize("streams", [False, True])
async def test_a_failure_in_the_midst_is_the_end_of_a_response(start_writing, streams):
    async with start_writing("Hi there, how are you?", failing_extends=(6, 7)) as http:
        answer = await respond(http, stream=streams, speculation={"enabled": False})
    if not streams:
        assert (answer.status, answer.error["type"]) == (500, "internal_error")
        return
    last = events_of(answer)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["usage"] is None
