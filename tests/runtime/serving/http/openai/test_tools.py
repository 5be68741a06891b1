"""Calls of tools and reasoning over HTTP, and as fields of gRPC's answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider.runtime.core.checks.limits import RequestLimits

from tests.runtime.serving.chat.scripted import TOOLS, USER, scripted

ASSISTANT = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "weather_more", "arguments": {"a": 12, "b": 1}}\n</tool_call>'
ASKED: dict[str, Any] = {"messages": USER, "tools": TOOLS, "max_tokens": 300, "temperature": 0}
PLAIN = {"speculation": {"enabled": False, "mode": "seed_stable"}}
DRAFTED = {"speculation": {"drafter": "model", "gamma": 3, "mode": "seed_stable"}}
NAMED = {"type": "function", "function": {"name": "weather_more"}}


@pytest.fixture
def start_writing(start_http):
    """A server whose model writes a text."""

    def begin(text: str, shape: str = "qwen3", opening: str = ASSISTANT, **options: Any) -> Any:
        return start_http(**scripted(shape, text, opening, **options))

    return begin


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls."""
    functions = [one["function"] for one in message.get("tool_calls", [])]
    return [(one["name"], arguments_of(one["arguments"])) for one in functions]


def arguments_of(text: str) -> Any:
    """What arguments say; the text of those that are cut."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def joined(events: list[Any]) -> dict[str, Any]:
    """The message of a stream's deltas, as clients put it together."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["finish_reason"] = choice["finish_reason"]
            for name in ("content", "reasoning_content"):
                if name in delta and (delta[name] or name != "content"):
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] not in calls
                    calls[piece["index"]] = {**piece, "function": dict(piece["function"])}
                else:
                    function = calls[piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


async def answers(http: Any, **fields: Any) -> tuple[Any, Any]:
    """The message of an answer, drafted and plain and streamed alike, and its usage."""
    found = []
    for speculation in (PLAIN, DRAFTED):
        asked = ASKED | speculation | fields
        whole = (await http.chat(**asked)).json()
        events = (await http.chat(**asked, stream=True)).events()
        message = whole["choices"][0]["message"]
        message["finish_reason"] = whole["choices"][0]["finish_reason"]
        streamed = joined(events)
        found += [
            (one["content"] or "", one.get("reasoning_content"), called(one), one["finish_reason"])
            for one in (message, streamed)
        ]
    assert all(one == found[0] for one in found)
    return message, whole["usage"]


async def test_auto_gives_text_and_calls_apart_with_drafts_and_without(start_writing):
    async with start_writing(f"Let me see.\n{CALL}\n{OTHER}") as http:
        message, usage = await answers(http)
        single, _ = await answers(http, parallel_tool_calls=False)
        text, _ = await answers(http, tool_choice="none")
        cut, _ = await answers(http, max_tokens=60)
    assert (message["content"], message["finish_reason"]) == ("Let me see.", "tool_calls")
    assert called(message) == [("weather", {"city": "Rome"}), ("weather_more", {"a": 12, "b": 1})]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert {one["type"] for one in message["tool_calls"]} == {"function"}
    assert called(single) == [("weather", {"city": "Rome"})]
    assert text["content"].startswith(f"Let me see.\n{CALL}") and "tool_calls" not in text
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert cut["finish_reason"] == "length" and called(cut) == [("weather", '{"city": "Rome')]


async def test_what_is_called_follows_its_schema_whatever_the_model_writes(start_writing):
    wrong = '<tool_call>\n{"name": "weathers", "arguments": {"city": "Bonn", "x": 1}}\n</tool_call>'
    async with start_writing(f"I call {wrong}", "qwen25") as http:
        auto, _ = await answers(http)
        required, _ = await answers(http, tool_choice="required")
        named, _ = await answers(http, tool_choice=NAMED)
        several, _ = await answers(http, tool_choice="required", parallel_tool_calls=True)
        sampled, _ = await answers(http, tool_choice="required", temperature=1.5, seed=4)
    assert auto["content"] == "I call"
    for message in (auto, required, named, several, sampled):
        for name, arguments in called(message):
            assert name in ("weather", "weather_more")
            assert set(arguments) == ({"city"} if name == "weather" else {"a", "b"})
        assert message["tool_calls"]
    assert required["content"] is None and len(required["tool_calls"]) == 1
    assert [name for name, _ in called(named)] == ["weather_more"]
    assert {required["finish_reason"], named["finish_reason"]} == {"tool_calls"}


async def test_calls_that_a_constraint_forces_take_few_passes(start_writing):
    async with start_writing("x", "qwen25") as http:
        asked = ASKED | PLAIN | {"tool_choice": NAMED, "return_provenance": True}
        found = (await http.chat(**asked)).json()["choices"][0]["outrider"]
    tokens = [one["provenance"] for one in found["tokens"]]
    assert tokens.count("forced") >= 0.8 * len(tokens)


async def test_an_answer_is_what_its_schema_says_or_a_call(start_writing):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text, has_call in (('{"a": 2}', False), (CALL, True)):
        async with start_writing(text) as http:
            message, _ = await answers(http, response_format=asked)
            own = (await http.chat(**ASKED, regex="[a-c]{3}")).json()["choices"][0]["message"]
        assert bool(called(message)) == has_call
        assert has_call or json.loads(message["content"]) == {"a": 2}
        assert len(own["content"]) == 3


async def test_reasoning_stands_apart_and_is_counted(start_writing):
    async with start_writing("<think>\nhm, so\n</think>\n\nYes.") as http:
        message, usage = await answers(http, tools=None)
        with_tools, _ = await answers(http)
        several = (await http.chat(**ASKED | {"tools": None, "n": 2})).json()
    for one in (message, with_tools):
        assert (one["reasoning_content"], one["content"]) == ("hm, so", "Yes.")
        assert one["finish_reason"] == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("?\nhm, so\n?")
    assert several["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len(
        "?\nhm, so\n?"
    )


@pytest.mark.parametrize(
    ("most", "reasoning", "content"), [(3, "hm,", "Yes."), (0, None, "m,!Yes.")]
)
async def test_reasoning_is_ended_behind_the_tokens_that_are_asked_for(
    start_writing, most: int, reasoning: str | None, content: str
):
    """The mark of its end stands in the place of the text's next token."""
    async with start_writing("<think>hm,!Yes.") as http:
        message, usage = await answers(http, max_reasoning_tokens=most)
        plain, _ = await answers(http, max_reasoning_tokens=most, tools=None)
        whole, _ = await answers(http)
        body = {"input": "Rome?", "max_reasoning_tokens": most, "temperature": 0}
        response = await http.ask("/v1/responses", body)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert message == plain
    assert usage["completion_tokens_details"]["reasoning_tokens"] == most + 2
    assert whole["reasoning_content"] == "hm,!Yes."
    assert response.json()["output"][-1]["content"][0]["text"] == content


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", "must be"),
        ({"max_reasoning_tokens": 10**6}, "max_reasoning_tokens", "must be in [0,"),
        ({"max_reasoning_tokens": 4, "regex": "a+"}, "max_reasoning_tokens", "left out with regex"),
        (
            {"max_reasoning_tokens": 4, "continue_final_message": True},
            "max_reasoning_tokens",
            "must be left out with continue_final_message",
        ),
        ({"max_reasoning_tokens": 4, "ignore_eos": True}, "ignore_eos", "max_reasoning_tokens"),
    ],
)
async def test_a_bound_on_reasoning_that_cannot_be_kept_is_refused(
    start_writing, fields: dict[str, Any], param: str, words: str
):
    async with start_writing("Hi") as http:
        answer = await http.chat(messages=USER, **fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert words in answer.error["message"]


async def test_a_bound_on_reasoning_needs_marks_that_are_known(start_writing):
    async with start_writing("Hi", "qwen25") as http:
        answer = await http.chat(messages=USER, max_reasoning_tokens=4)
    assert answer.status == 400
    assert "needs a chat template whose marks of reasoning are known" in answer.error["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_an_answer_that_begins_within_reasoning_ends_it_before_it_calls(
    start_writing, choice
):
    calls = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"  # noqa: RUF001
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
    )
    text = f"hm</think>\n\n{calls}"
    async with start_writing(text, "deepseek", "<think>\n") as http:
        message, usage = await answers(http, tool_choice=choice, max_tokens=300)
        header = (await http.chat(**ASKED | {"max_tokens": 1})).headers["outrider-ignored"]
    assert (message["reasoning_content"], message["content"]) == ("hm", None)
    assert called(message) == [("weather", {"city": "Rome"})]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("hm?")
    assert header == "tools"


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_an_answer_of_channels_has_its_reasoning_and_its_call_or_content_apart(
    start_writing, choice
):
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    final = "<|channel|>final<|message|>It rains."
    text = thought + (final if choice == "none" else call)
    async with start_writing(text, "gpt_oss", "?<|end|><|start|>assistant") as http:
        message, usage = await answers(http, tool_choice=choice)
    assert message["reasoning_content"] == "hm"
    assert message["content"] == ("It rains." if choice == "none" else None)
    assert called(message) == ([] if choice == "none" else [("weather", {"city": "Rome"})])
    # Three marks, and a token for each letter.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3 + len("analysishm")


async def test_an_answer_of_a_form_is_the_content_of_its_channel(start_writing):
    """The grammar stood right behind the prompt, where such a model writes no content."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    odd = {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}
    opening, final = "?<|end|><|start|>assistant", "<|channel|>final<|message|>"
    async with start_writing(final + '{"a": 2}', "gpt_oss", opening) as http:
        formed, usage = await answers(http, tools=None, response_format=asked)
        refused = await http.chat(**ASKED | {"tools": None, "grammar": 'start: "a"'})
        wrong = await http.chat(**ASKED | {"tools": None, "response_format": odd})
    # Two marks, two ends, and the letters between.
    assert formed["content"] == '{"a": 2}'
    assert usage["completion_tokens"] == 2 + len("final") + len('{"a": 2}') + 1
    assert (refused.status, refused.error["param"]) == (400, "grammar")
    assert "use regex" in refused.error["message"]
    assert wrong.error["message"] == "response_format.json_schema.schema: Invalid type: odd"
    async with start_writing(final + "a/b\n/", "gpt_oss", opening) as http:
        for regex in (r"a/b\n\/", r"a\/[b]" + "\n[/]"):
            found, _ = await answers(http, tools=None, regex=regex)
            assert found["content"] == "a/b\n/"


async def test_a_message_of_channels_that_goes_on_has_neither_marks_nor_calls(start_writing):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    for text, fields in (("it rains.", {}), ('{"a": 2}', {"response_format": form})):
        messages = [*USER, {"role": "assistant", "content": "So: "}]
        asked = {"messages": messages, "continue_final_message": True} | fields
        opening = "<|channel|>final<|message|>So: "
        async with start_writing(text, "gpt_oss", opening) as http:
            found = [(await answers(http, **asked, tool_choice=one))[0] for one in ("auto", "none")]
            refused = await http.chat(**ASKED | asked | {"tool_choice": "required"})
        assert [(one["content"], called(one)) for one in found] == [(text, [])] * 2
        assert (refused.status, refused.error["param"]) == (400, "tool_choice")
        assert "with continue_final_message" in refused.error["message"]


@pytest.mark.parametrize(
    ("shape", "told"), [("granite", "tool_calls"), ("chatml", "tools, tool_calls"), ("qwen3", None)]
)
async def test_an_answer_says_where_calls_stay_text(start_writing, shape, told):
    opening = "<|start_of_role|>assistant<|end_of_role|>" if shape == "granite" else ASSISTANT
    async with start_writing(CALL, shape, opening) as http:
        answer = await http.chat(**ASKED)
        required = await http.chat(**ASKED, tool_choice="required")
    assert answer.headers.get("outrider-ignored") == told
    message = answer.json()["choices"][0]["message"]
    assert bool(called(message)) == (shape == "qwen3")
    assert shape == "qwen3" or message["content"] == CALL
    if shape != "qwen3":
        assert (required.status, required.error["param"]) == (400, "tool_choice")
        assert "format of calls is known" in required.error["message"]


async def test_without_grammars_auto_is_read_and_required_is_refused(start_writing):
    async with start_writing(CALL) as http:
        constraints = http.running.serving.model.constraints
        object.__setattr__(http.running.serving.model, "constraints", ())
        auto, _ = await answers(http)
        required = await http.chat(**ASKED, tool_choice="required")
        object.__setattr__(http.running.serving.model, "constraints", constraints)
        ignoring, _ = await answers(http, ignore_eos=True, max_tokens=len(CALL) - 20)
    assert called(auto) == called(ignoring) == [("weather", {"city": "Rome"})]
    assert (required.status, required.error["param"]) == (400, "tools")


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


LOOSE = {"type": "object", "properties": {"b": {"type": "array", "uniqueItems": True}}}
REFUSED = [
    ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
    ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto or required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be none"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "tool_choice.function.name",
        "must be the name of one of the tools",
    ),
    ({"tools": tool(name="a b")}, "tools", "a name of 1..64 letters"),
    ({"tools": tool(name="a") * 2}, "tools", "each name once"),
    ({"tools": tool(name="a", parameters=[])}, "tools", "a JSON schema of an object"),
    ({"tools": tool(name="a", parameters={"type": "array"})}, "tools", "of an object"),
    ({"tools": tool(name="a", strict=True, parameters=LOOSE)}, "tools", "uniqueItems"),
    ({"tools": tool(name="a", parameters={"d": "x" * 3000})},
     "tools", "at most 2048 bytes"),
    ({"tool_choice": "required", "regex": "a"}, "regex", "must be left out with tool_choice"),
    ({"tools": TOOLS + tool(name="a", parameters={"properties": {"b": {"type": "odd"}}})},
     "tools", "parameters of tools[2]: "),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
     "tools", "response_format.json_schema.schema: Invalid type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}},
      "tools": None}, "response_format.json_schema.schema", "odd"),
    *(
        ({"tools": None, "grammar": text}, "grammar", "grammar: at ")
        for text in ('start: "a" %json {"type": "odd"}',
                     'start: arguments_7\narguments_7: %json {"type": "odd"}')
    ),
    ({"max_completion_tokens": 9999}, "max_completion_tokens", "must be in"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "must be in"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "must be true or false"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": 7}]}, "messages[1].tool_calls", "array"),
]  # fmt: skip


async def test_bad_tools_are_refused_by_field_and_rule(start_writing):
    async with start_writing("Hi", limits=RequestLimits(max_grammar_bytes=256)) as http:
        for fields, name, rule in REFUSED:
            answer = await http.chat(**ASKED | fields)
            assert answer.status == 400, fields
            assert answer.error["param"] == name, answer.error
            assert rule in answer.error["message"], answer.error
        loose = await http.chat(
            **ASKED | {"tools": tool(name="a", parameters=LOOSE), "max_tokens": 1}
        )
        schema = await http.chat(**ASKED, json_schema="[1")
    assert loose.status == 200
    assert (schema.status, schema.error["message"]) == (400, "json_schema: must be JSON")


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', "[" * 40])
async def test_arguments_that_cannot_be_read_go_back_in_as_their_text(start_writing, arguments):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with start_writing("Three.") as http:
        answer = await http.chat(**ASKED | {"messages": messages, "max_tokens": 2})
    assert answer.status == 200, answer.error


async def test_a_stop_string_within_a_call_is_the_reason(start_writing):
    async with start_writing(CALL) as http:
        whole = (await http.chat(**ASKED, stop=["Rom"])).json()["choices"][0]
        events = (await http.chat(**ASKED, stop=["Rom"], stream=True)).events()
    assert called(whole["message"]) == [("weather", '{"city": "')]
    assert whole["finish_reason"] == joined(events)["finish_reason"] == "stop"


async def test_an_answer_of_another_form_has_no_calls(start_writing):
    async with start_writing(CALL) as http:
        answer = (await http.chat(**ASKED, regex="(?s:.*)")).json()["choices"][0]
    assert '{"name": "weather"' in answer["message"]["content"]
    assert not called(answer["message"])


async def test_calls_and_results_go_back_in_as_templates_want_them(start_writing):
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "3 degrees"},
    ]  # fmt: skip
    async with start_writing("Three.") as http:
        tokens = (await http.ask("/tokenize", {"messages": messages, "tools": TOOLS})).json()
        asked = {"tokens": tokens["tokens"]}
        text = (await http.ask("/detokenize", asked)).json()["prompt"]
        message, _ = await answers(http, messages=messages)
    assert CALL in text and "<tool_response>\n3 degrees\n</tool_response>" in text
    assert message["content"] == "Three."


async def test_gRPC_has_calls_and_reasoning_as_fields_where_they_are_asked_for(start_writing):
    async with start_writing(f"<think>hm</think>\n\nSo: {CALL}") as http:
        client = http.running.client
        options: dict[str, Any] = {
            "max_tokens": 300,
            "temperature": 0.0,
            "messages": USER,
            "tools": TOOLS,
        }
        plain = await client.complete(**options)
        apart = client.generate(**options, tool_choice="auto", parse_answer=True)
        found = [one async for one in apart]
        info = await client.info()
    assert plain.text == f"<think>hm</think>\n\nSo: {CALL}"
    assert "".join(one.text for one in found) == "So:"
    assert "".join(one.reasoning for one in found) == "hm"
    pieces = [piece for one in found for piece in one.tool_calls]
    assert [one.name for one in pieces if one.name] == ["weather"]
    assert json.loads("".join(one.arguments for one in pieces)) == {"city": "Rome"}
    assert info.chat.tool_call_format == "hermes"
    assert [*info.chat.reasoning_marks] == ["<think>", "</think>"]
