"""Requests of ``/v1/responses`` as requests of chats: other names for the same, and nothing that a server would store.

What has no name of its own here is passed on as it is, so that all options of chats go along.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.http.errors import with_names
from outrider.runtime.serving.http.openai.fields import (
    CompletionRequest,
    completion_request,
    field_names,
)
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests import json_types

_NOT_STORED = (
    "is not supported: this server stores no responses; send the whole conversation as input"
)
_ONE_ANSWER = "is not supported by responses, which have one answer; use chat completions"
_NOT_SERVED: Mapping[str, str] = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "background": "is not supported by this server; leave it out",
    "prompt": _NOT_STORED,
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "n": _ONE_ANSWER,
    "num_beams": _ONE_ANSWER,
    "echo": "is not supported by responses; use chat completions",
}
_READ: Mapping[str, json_types.Kind] = {
    "instructions": json_types.text,
    "max_output_tokens": json_types.count,
    "text": json_types.mapping,
    "reasoning": json_types.mapping,
    "truncation": json_types.text,
    "metadata": json_types.mapping,
}
# What chats do not have, beside the above; those of them that are given are told as ignored.
_IGNORED = ("include", "store", "top_logprobs", "metadata", "max_tool_calls")
_FORMATS = ("text", "json_object", "json_schema")
_TEXTS = ("input_text", "output_text", "text")
_REPEATED = ("temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", *_READ)


# Of a path of chats' fields: its beginning, and what stands for it in a response's.
_BEGINNINGS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
}
_INDEX = re.compile(r"^\[\d+\]")


def response_request(values: Mapping[str, Any], serving: LoadedModel) -> CompletionRequest:
    """Return what the JSON object of a request asks for; ranges are not checked yet.

    Raises:
        RequestError: a field has another type, or may not stand beside another.
        UnsupportedOption: a field is not served here.
    """
    for name, rule in _NOT_SERVED.items():
        if values.get(name) and (rule != _ONE_ANSWER or values[name] != 1):
            raise UnsupportedOption(name, rule)
    given = json_types.read(values, _READ)
    if given.get("truncation", "disabled") != "disabled":
        raise UnsupportedOption("truncation", "must be disabled, or left out")
    if given.get("text", {}).get("verbosity") is not None:
        raise UnsupportedOption("text.verbosity", "is not supported by this server; leave it out")
    if given.get("reasoning", {}).get("effort") is not None:
        rule = "use chat_template_kwargs, if the template knows it"
        raise UnsupportedOption("reasoning.effort", rule)
    own = {*_READ, *_IGNORED, *_NOT_SERVED, "input", "tools", "tool_choice"}
    chat = {name: value for name, value in values.items() if name not in own}
    chat["messages"] = _messages(values.get("input"), serving.limits.max_messages)
    if instructions := given.get("instructions"):
        chat["messages"].insert(0, {"role": "system", "content": instructions})
    chat["max_completion_tokens"] = given.get("max_output_tokens")
    chat["response_format"] = _format(given.get("text", {}).get("format"))
    chat["tools"] = _tools(values.get("tools"))
    chat["tool_choice"] = _choice(values.get("tool_choice"))
    names = response_names(values)
    try:
        asked = completion_request(chat, serving, is_chat=True)
    except RequestError as error:
        raise with_names(error, names) from error.__cause__
    ignored = [name for name in _IGNORED if values.get(name)]
    repeated = {name: values[name] for name in _REPEATED if values.get(name) is not None}
    return replace(asked, names=names, ignored=(*ignored, *asked.ignored), repeated=repeated)


def response_names(values: Mapping[str, Any]) -> Callable[[str], str]:
    """Return what gives the name of a field in a response's JSON, by the one that refusals of chats have."""
    text = values.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    most, schema = values.get("max_output_tokens"), values.get("json_schema")
    own = {"max_completion_tokens": most, "response_format": form, "json_schema": schema}
    chat = field_names(own, is_chat=True)

    def written(name: str) -> str:
        name = chat(name)
        for beginning, own in _BEGINNINGS.items():
            rest = name.removeprefix(beginning)
            if rest != name and rest[:1] in ("", ".", "["):
                # Messages have other places than the items that they were made of.
                return own + _INDEX.sub("", rest)
        return name

    return written


def _messages(given: Any, most: int) -> list[dict[str, Any]]:
    """Return the messages of an input; a call joins the assistant's message in front of it."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input", "is required, and must be a string or an array of items")
    check_count("input", given, most)
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for index, one in enumerate(given):
        path = f"input[{index}]"
        item = json_types.mapping(path, one)
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(f"{path}.content", item.get("content") or "", ("reasoning_text",))
            continue
        read = _ITEMS.get(kind) if isinstance(kind, str) else None
        if read is None:
            rule = f"must be one of {', '.join((*_ITEMS, 'reasoning'))}"
            raise UnsupportedOption(f"{path}.type", rule)
        message = read(path, item)
        last = messages[-1] if messages else {}
        if kind == "function_call" and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            message = messages.pop() | ({"reasoning_content": reasoning} if reasoning else {})
        elif reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
        messages.append(message)
    return messages


def _message(path: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = json_types.text(f"{path}.role", item.get("role"))
    return {"role": role, "content": _text(f"{path}.content", item.get("content"), _TEXTS)}


def _call(path: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (
        json_types.text(f"{path}.{field}", item.get(field))
        for field in ("call_id", "name", "arguments")
    )
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _output(path: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": json_types.text(f"{path}.call_id", item.get("call_id")),
        "content": _text(f"{path}.output", item.get("output"), _TEXTS),
    }


_ITEMS: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
}


def _text(path: str, content: Any, kinds: tuple[str, ...]) -> str:
    """Return a content as text; parts are lines of it, as in chats."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(path, "must be a string or an array of parts")
    parts = [json_types.mapping(path, one) for one in content]
    if any(one.get("type") not in kinds for one in parts):
        raise UnsupportedOption(f"{path}.type", f"must be {' or '.join(kinds)}")
    return "\n".join(json_types.text(f"{path}.text", one.get("text")) for one in parts)


def _format(given: Any) -> dict[str, Any] | None:
    """Return the form of the text as chats have it."""
    if given is None:
        return None
    form = json_types.mapping("text.format", given)
    if form.get("type") not in _FORMATS:
        raise RequestError("text.format.type", f"must be {' or '.join(_FORMATS)}")
    if form["type"] != "json_schema":
        return form
    json_types.mapping("text.format.schema", form.get("schema"))
    return {"type": "json_schema", "json_schema": form}


def _tools(given: Any) -> Any:
    """Return functions as chats have them."""
    if not isinstance(given, list):
        return given
    tools = []
    for index, one in enumerate(given):
        tool = json_types.mapping(f"tools[{index}]", one)
        if tool.get("type") != "function":
            raise UnsupportedOption(f"tools[{index}].type", "must be function")
        function = {name: value for name, value in tool.items() if name != "type"}
        tools.append({"type": "function", "function": function})
    return tools


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given
