"""Parses the messages of OpenAI's chats, and what belongs to them, to a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.requests import json_types
from outrider.v1 import inference_pb2 as wire

_FIELDS: Mapping[str, json_types.Kind] = {
    "add_generation_prompt": json_types.flag,
    "continue_final_message": json_types.flag,
    "chat_template": json_types.text,
    "chat_template_kwargs": json_types.mapping,
}
# With those that ``fields`` reads of chats alone.
CHAT_FIELDS = frozenset(
    {*_FIELDS, "messages", "documents", "tools", "tool_choice", "max_completion_tokens", "top_logprobs"}
)  # fmt: skip
_CHOICES = ("none", "auto")


def chat_of(values: Mapping[str, Any], max_messages: int) -> wire.Chat:
    """Return the conversation of a request; roles, sizes and templates are not checked yet.

    Messages are counted before they are looked at: 4 MiB of short ones take seconds of the event loop.

    Raises:
        RequestError: a field has another type.
        UnsupportedOption: a content is no text, or a tool is to be called for certain.
    """
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages", "is required, and must be an array of at least one message")
    check_count("messages", messages, max_messages)
    given = json_types.read(values, _FIELDS)
    arguments = dict(given.get("chat_template_kwargs", {}))
    if (documents := values.get("documents")) is not None:
        arguments["documents"] = documents
    return wire.Chat(
        messages=[_message(index, one) for index, one in enumerate(messages)],
        add_generation_prompt=given.get("add_generation_prompt"),
        continue_final_message=given.get("continue_final_message", False),
        tools_json=_tools(values),
        template_arguments_json=(
            json_types.json_text("chat_template_kwargs", arguments) if arguments else ""
        ),
        template=given.get("chat_template", ""),
    )


def _message(index: int, value: Any) -> wire.ChatMessage:
    path = f"messages[{index}]"
    message = dict(json_types.mapping(path, value))
    role = json_types.text(f"{path}.role", message.pop("role", None))
    content = message.pop("content", None)
    rest = {name: one for name, one in message.items() if one is not None}
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


def _tools(values: Mapping[str, Any]) -> str:
    """Return the tools as the template is told of them; what the answer says of them is left in its text."""
    tools, choice = values.get("tools"), values.get("tool_choice")
    if choice is not None and choice not in _CHOICES:
        raise UnsupportedOption("tool_choice", f"must be {' or '.join(_CHOICES)}, or left out")
    if tools is None or choice == "none":
        return ""
    if not isinstance(tools, list):
        raise RequestError("tools", "must be an array of objects")
    return json_types.json_text("tools", tools) if tools else ""
