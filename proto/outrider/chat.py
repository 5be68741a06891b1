"""Conversations as messages of the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.v1 import inference_pb2 as wire


def build_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    template: str = "",
    **of_answer: Any,
) -> wire.Chat:
    """Return a conversation, with what its template is to make of it.

    Args:
        messages: each with a ``role``, mostly a ``content``, and other keys that the template knows, such as
            ``tool_calls``; JSON values.
        tools: what the template is told of; None for none.
        add_generation_prompt: whether to end with what an answer begins with; None for the default, which is to do so
            unless the final message is continued.
        continue_final_message: go on with the last message instead of answering it.
        template_arguments: further variables of the template, such as ``{"enable_thinking": False}``.
        template: name of the template; empty for the default.
        of_answer: fields of ``Chat`` that say how the answer calls tools, and whether its parts are told apart.

    Raises:
        TypeError: a message has no role, or a value is not JSON's.
    """
    return wire.Chat(
        messages=[_message(one) for one in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools_json="" if tools is None else _json(list(tools)),
        template_arguments_json=_json(dict(template_arguments)) if template_arguments else "",
        template=template,
        **of_answer,
    )


def _message(message: Mapping[str, Any]) -> wire.ChatMessage:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TypeError("each of messages must have a role")
    # A content that is no text, or is missing, is told apart from an empty one.
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    if not isinstance(content, str):
        fields = {"content": content, **fields}
    return wire.ChatMessage(
        role=role,
        content=content if isinstance(content, str) else "",
        fields_json=_json(fields) if fields else "",
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
