"""From the texts of a conversation to the variables of a template, and back from what it renders.

What Transformers does to messages before it renders them is done here too: keys without a value are dropped, reasoning
is given under its three names, and a last message to go on with gets a tag where the text is cut.

Texts of people, tools and documents must not steer the model: they get the marks of
``runtime.serving.chat.control_token_escaping``.

Source: transformers 5.23.0, ``tokenization_utils_base.py`` (``apply_chat_template``) and
``utils/chat_template_utils.py`` (``render_jinja_template``, ``mark_control_tokens``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.core.params import ChatMessage, ChatParams
from outrider.runtime.serving.chat.control_token_escaping import ControlTokenEscaping, guarded

# Roles that the model, its maker or its caller speaks in; whatever else a template knows is somebody else's word.
TRUSTED_ROLES = ("system", "developer", "assistant", "model")
TOOLS_FIELD = "chat.tools_json"
ARGUMENTS_FIELD = "chat.template_arguments_json"
FIELDS_FIELD = "chat.messages.fields_json"
CONTINUE_FIELD = "chat.continue_final_message"
MAX_ARGUMENTS = 64
# Deeper than any schema of a tool, and far from where Python's own recursion ends.
MOST_LEVELS = 32
# Variables that a request has other fields for.
_OWN_VARIABLES = {
    "messages": "chat.messages",
    "tools": TOOLS_FIELD,
    "add_generation_prompt": "chat.add_generation_prompt",
}
# Words in the type or in a key of a part that is no text.
_MEDIA = ("image", "video", "audio")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given, as plain JSON values.

    Attributes:
        messages: with their roles and contents.
        tools: None for none, as templates ask.
        documents: likewise.
        arguments: further variables.
        adds_generation_prompt: whether the text ends with what an answer begins with.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    adds_generation_prompt: bool

    def variables(self, special_tokens: Mapping[str, str]) -> dict[str, Any]:
        """Return the variables of a template; arguments win over special tokens, as in Transformers."""
        return {
            **special_tokens,
            **self.arguments,
            "messages": self.messages,
            "tools": self.tools,
            "documents": self.documents,
            "add_generation_prompt": self.adds_generation_prompt,
        }


def read_conversation(chat: ChatParams) -> Conversation:
    """Return the conversation of a request.

    Raises:
        RequestError: a text is not the JSON that it should be, or has what a field of its own is for.
    """
    tools = _objects(TOOLS_FIELD, _read_json(TOOLS_FIELD, chat.tools, list))
    arguments = _read_json(ARGUMENTS_FIELD, chat.arguments, dict) or {}
    if len(arguments) > MAX_ARGUMENTS:
        raise RequestError(ARGUMENTS_FIELD, f"must have at most {MAX_ARGUMENTS} entries")
    for name, field in _OWN_VARIABLES.items():
        if name in arguments:
            raise RequestError(ARGUMENTS_FIELD, f"must not have {name}: use {field}")
    documents = _objects(f"{ARGUMENTS_FIELD}: documents", arguments.pop("documents", None))
    adds_prompt = chat.adds_generation_prompt
    return Conversation(
        messages=[_message(one) for one in chat.messages],
        tools=tools,
        documents=documents,
        arguments=arguments,
        adds_generation_prompt=not chat.continues_final if adds_prompt is None else adds_prompt,
    )


def marked(conversation: Conversation, marks: ControlTokenEscaping) -> Conversation:
    """Return the conversation with marks where its texts must not steer the model."""
    mark = marks.mark
    return replace(
        conversation,
        messages=[
            guarded(one) if one["role"] in TRUSTED_ROLES else mark(one)
            for one in conversation.messages
        ],
        tools=mark(conversation.tools),
        documents=mark(conversation.documents),
        arguments=mark(conversation.arguments),
    )


def reasoning_named(conversation: Conversation) -> Conversation:
    """Return the conversation with the reasoning of a message under the names that templates know."""
    messages = []
    for message in conversation.messages:
        given = [message[name] for name in _REASONING if message.get(name) is not None]
        named = {"thinking": given[0], **message, "reasoning_content": given[0]} if given else {}
        messages.append(named or message)
    return replace(conversation, messages=messages)


def tag_final(conversation: Conversation, source: str) -> str:
    """Put a tag behind the last message, where the text is to be cut; return the message's text.

    ``source`` is the template's, which must speak of a content.

    Raises:
        RequestError: the last message has no text to go on with.
    """
    last = conversation.messages[-1]
    content = last.get("content")
    if "content" not in source:
        raise RequestError(CONTINUE_FIELD, "the chat template writes no content")
    if isinstance(content, str):
        last["content"] = content + _TAG
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _TAG
            return text
    raise RequestError(CONTINUE_FIELD, "needs a last message with a text")


def cut_at_tag(rendered: str, text: str) -> str:
    """Return a rendered text up to the tag that ``tag_final`` put behind ``text``.

    Raises:
        RequestError: the template wrote them in another way.
    """
    tag = _TAG.strip()
    if text.strip() not in rendered or tag not in rendered:
        raise RequestError(CONTINUE_FIELD, "the chat template changes the last message")
    place = rendered.rindex(tag)
    # Where the template trimmed the message, its own white space goes too.
    is_whole = rendered.startswith(_TAG, place)
    return rendered[:place] if is_whole else rendered[:place].rstrip()


def _message(message: ChatMessage) -> dict[str, Any]:
    fields = _read_json(FIELDS_FIELD, message.fields, dict) or {}
    if "role" in fields:
        raise RequestError(FIELDS_FIELD, "must not have role: use chat.messages.role")
    if "content" in fields and message.content:
        raise RequestError(FIELDS_FIELD, "must not have content where chat.messages.content is set")
    _refuse_media(fields.get("content"))
    whole = {"role": message.role, "content": message.content, **fields}
    return {name: value for name, value in whole.items() if value is not None}


def _refuse_media(content: Any) -> None:
    """Refuse parts of a content that a template would write a placeholder for, which nothing is put into."""
    for part in content if isinstance(content, list) else []:
        words = " ".join([*part, str(part.get("type"))]) if isinstance(part, dict) else ""
        if any(medium in words for medium in _MEDIA):
            rule = "must have a content of texts: this server reads no images, audio or video"
            raise UnsupportedOption(FIELDS_FIELD, rule)


def _objects(field: str, values: list[Any] | None) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise RequestError(field, "must be a JSON array of objects")
    return values


def _read_json(field: str, text: str, kind: type[T]) -> T | None:
    """Return the value of a JSON text; None for an empty one."""
    if not text:
        return None
    name = "an array" if kind is list else "an object"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(field, f"must be JSON, {name}") from error
    if not isinstance(found, kind):
        raise RequestError(field, f"must be JSON, {name}")
    check_plain(field, found, MOST_LEVELS)
    return found


def check_plain(field: str, value: object, levels: int) -> None:
    """Refuse what no template can write: too many levels, half a character, a number that is none."""
    if levels < 0:
        raise RequestError(field, f"must be at most {MOST_LEVELS} levels deep")
    if isinstance(value, dict):
        for name, one in value.items():
            check_plain(field, name, levels - 1)
            check_plain(field, one, levels - 1)
    elif isinstance(value, list):
        for one in value:
            check_plain(field, one, levels - 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(field, "must be Unicode: it has a lone surrogate") from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(field, "must have finite numbers alone")
