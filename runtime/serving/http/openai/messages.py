"""Parses the messages of OpenAI's chats, and what belongs to them, to a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.chat.conversation import MOST_LEVELS, check_plain
from outrider.runtime.serving.chat.formats import AnswerFormat
from outrider.runtime.serving.chat.tools import AUTO, REQUIRED
from outrider.runtime.serving.requests import json_types
from outrider.v1 import inference_pb2 as wire

_FIELDS: Mapping[str, json_types.Kind] = {
    "add_generation_prompt": json_types.flag,
    "continue_final_message": json_types.flag,
    "chat_template": json_types.text,
    "chat_template_kwargs": json_types.mapping,
    "parallel_tool_calls": json_types.flag,
    "max_reasoning_tokens": json_types.size,
}
# With those that ``fields`` reads of chats alone.
CHAT_FIELDS = frozenset(
    {*_FIELDS, "messages", "documents", "tools", "tool_choice", "max_completion_tokens", "top_logprobs"}
)  # fmt: skip
NONE = "none"


def chat_of(values: Mapping[str, Any], max_messages: int, answers: AnswerFormat) -> wire.Chat:
    """Return the conversation of a request; roles, sizes and templates are not checked yet.

    Messages are counted before they are looked at: 4 MiB of short ones take seconds of the event loop.

    Raises:
        RequestError: a field has another type.
        UnsupportedOption: a content is no text, or the choice of tools is one of a kind that is not served.
    """
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages", "is required, and must be an array of at least one message")
    check_count("messages", messages, max_messages)
    given = json_types.read(values, _FIELDS)
    arguments = dict(given.get("chat_template_kwargs", {}))
    if (documents := values.get("documents")) is not None:
        arguments["documents"] = documents
    choice, name = _choice(values.get("tool_choice"))
    tools = "" if choice == NONE else _tools(values.get("tools"))
    reads_calls = answers.calls is None or not answers.calls.has_text_arguments
    return wire.Chat(
        messages=[_message(index, one, reads_calls) for index, one in enumerate(messages)],
        add_generation_prompt=given.get("add_generation_prompt"),
        continue_final_message=given.get("continue_final_message", False),
        tools_json=tools,
        tool_choice=choice if tools or choice == REQUIRED else "",
        tool_name=name,
        parallel_tool_calls=given.get("parallel_tool_calls"),
        parse_answer=True,
        max_reasoning_tokens=given.get("max_reasoning_tokens"),
        template_arguments_json=(
            json_types.json_text("chat_template_kwargs", arguments) if arguments else ""
        ),
        template=given.get("chat_template", ""),
    )


def _message(index: int, value: Any, reads_calls: bool) -> wire.ChatMessage:
    path = f"messages[{index}]"
    message = dict(json_types.mapping(path, value))
    role = json_types.text(f"{path}.role", message.pop("role", None))
    content = message.pop("content", None)
    rest = {name: one for name, one in message.items() if one is not None}
    if reads_calls and "tool_calls" in rest:
        rest["tool_calls"] = [_read_call(one) for one in _list(path, rest["tool_calls"])]
    if content is None:
        # Of an assistant that calls tools: no content is not the empty one.
        fields = json_types.json_text(path, {**rest, "content": None})
        return wire.ChatMessage(role=role, fields_json=fields)
    return wire.ChatMessage(
        role=role,
        content=_text(f"{path}.content", content),
        fields_json=json_types.json_text(path, rest) if rest else "",
    )


def _text(path: str, content: Any) -> str:
    """Return a content as text; parts are lines of it, as in vLLM's for templates that want a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(path, "must be a string or an array of parts")
    parts = []
    for part in content:
        found = json_types.mapping(path, part)
        if found.get("type") != "text":
            raise UnsupportedOption(f"{path}.type", "must be text: this server reads nothing else")
        parts.append(json_types.text(f"{path}.text", found.get("text")))
    return "\n".join(parts)


def _list(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{path}.tool_calls", "must be an array")
    return value


_AROUND_ARGUMENTS = 4  # levels of a message: itself, its calls, one of them, its function


def _read_call(call: Any) -> Any:
    """Return a call of an earlier answer with its arguments as what their JSON says, as templates want them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(
        arguments := function.get("arguments"), str
    ):
        return call
    try:
        read = json.loads(arguments)
        check_plain("arguments", read, MOST_LEVELS - _AROUND_ARGUMENTS)
    except (ValueError, RecursionError, RequestError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


def _tools(tools: Any) -> str:
    """Return the tools as the template is told of them."""
    if tools is None:
        return ""
    if not isinstance(tools, list):
        raise RequestError("tools", "must be an array of objects")
    return json_types.json_text("tools", tools) if tools else ""


def _choice(choice: Any) -> tuple[str, str]:
    """Return how tools are chosen, and the name of the one that is called; empty for any."""
    if choice is None:
        return AUTO, ""
    if choice in (NONE, AUTO, REQUIRED):
        return choice, ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or choice.get("type") != "function":
        rule = f"must be {NONE}, {AUTO} or {REQUIRED}, or an object of type function with a name"
        raise UnsupportedOption("tool_choice", rule)
    return REQUIRED, name
