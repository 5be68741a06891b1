"""Parses a request's JSON: OpenAI's fields and our own, as fields of a generation request.

Our own fields have the names of ``outrider.v1`` and stand at the top, where clients put what they call extra. Unknown
names are ignored; known ones that would change the answer and are not served are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.chat.formats import AnswerFormat
from outrider.runtime.serving.chat.tools import without_odd_patterns
from outrider.runtime.serving.http.openai.messages import CHAT_FIELDS, chat_of
from outrider.runtime.serving.http.openai.prompts import prompts_of
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests import json_types
from outrider.runtime.serving.requests.fields import MAX_SEED, SMALLEST_DIVISOR
from outrider.runtime.serving.requests.json_fields import JsonFields
from outrider.v1 import inference_pb2 as wire

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI's; a chat may fill the context."""
# What a request says by other means, or a part of one alone.
_NOT_BY_NAME = {
    "request_id", "text", "tokens", "chat", "sampling", "speculation", "logprobs", "prompt_logprobs",
}  # fmt: skip
_NAMES = frozenset(wire.GenerateRequest.DESCRIPTOR.fields_by_name) - _NOT_BY_NAME
_STREAM: Mapping[str, json_types.Kind] = {
    "include_usage": json_types.flag,
    "continuous_usage_stats": json_types.flag,
}
_ANSWER: Mapping[str, json_types.Kind] = {
    "stream": json_types.flag,
    "return_token_ids": json_types.flag,
    "request_id": json_types.text,
    "stream_options": json_types.mapping,
}
# What is read beside the fields of the wire.
_READ_APART = frozenset({*_ANSWER, "logprobs", "response_format"})
_MOST_TOLD, _MOST_NAME = 16, 64
_NOT_SHOWN = re.compile(r"[^\w.-]", re.ASCII)
NOT_SERVED_BY_NAME: Mapping[str, str] = {
    "suffix": "is not supported by this server; leave it out",
    "prompt_logprobs": "use logprobs with echo",
    "prompt_embeds": "is not supported by this server; leave it out",
    "use_beam_search": "use num_beams",
    "truncate_prompt_tokens": "is not supported by this server; leave it out",
    "allowed_token_strings": "use allowed_token_ids",
    "logits_processors": "is not supported by this server; leave it out",
    "guided_json": "use response_format or json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use regex",
    "guided_grammar": "use grammar",
    "structured_outputs": "use response_format, json_schema, regex or grammar",
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "is not supported by this server; leave it out",
    "reasoning_effort": "use chat_template_kwargs, if the template knows it",
    "verbosity": "is not supported by this server; leave it out",
    "web_search_options": "is not supported by this server; leave it out",
    "prediction": "use speculation.reference with drafter reference",
}
"""What would change the answer and is not served, with the rule that it breaks."""


def by_name() -> frozenset[str]:
    """Return the fields of ``outrider.v1`` that stand at the top of a request by their names."""
    return _NAMES | frozenset(wire.Sampling.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What an HTTP request asks for, and how it is to be answered.

    Attributes:
        requests: one per prompt.
        is_chat: which of the two shapes the answer has.
        default_max_tokens: of each, as far as limits and context have room; None for the server's.
        request_id: the caller's; empty where he gives none.
        streams: whether the answer comes in events.
        includes_usage: whether the last event has the usage.
        continuous_usage: whether every event has it so far.
        has_logprobs: whether tokens are told with log-probabilities.
        has_token_ids: whether choices have their token ids.
        has_provenance: whether it is told where each token came from.
        has_trace: whether each pass of the target is told.
        names: gives the name that the caller wrote a field by, which refusals have; see ``errors.with_names``.
        ignored: names of fields that change nothing here; the answer's header ``outrider-ignored`` has them.
    """

    requests: tuple[wire.GenerateRequest, ...]
    is_chat: bool
    default_max_tokens: int | None = None
    request_id: str = ""
    streams: bool = False
    includes_usage: bool = False
    continuous_usage: bool = False
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_provenance: bool = False
    has_trace: bool = False
    names: Callable[[str], str] = str
    ignored: tuple[str, ...] = ()
    repeated: Mapping[str, Any] = field(default_factory=dict)


def completion_request(
    values: Mapping[str, Any], serving: LoadedModel, *, is_chat: bool
) -> CompletionRequest:
    """Return what the JSON object of a request asks for; ranges are not checked yet.

    Raises:
        RequestError: a field has another type, or may not stand beside another.
        UnsupportedOption: a field is not served here.
    """
    for name, rule in NOT_SERVED_BY_NAME.items():
        if values.get(name) is not None:
            raise UnsupportedOption(name, rule)
    if not is_chat and values.get("max_reasoning_tokens") is not None:
        raise UnsupportedOption("max_reasoning_tokens", "needs a chat; use chat completions")
    answer = json_types.read(values, _ANSWER)
    stream = json_types.read(answer.get("stream_options", {}), _STREAM, "stream_options.")
    request, ignored = _asked(values, serving, is_chat=is_chat)
    request_id = answer.get("request_id", "")
    if is_chat:
        answers = serving.rules.answers
        request.chat.CopyFrom(chat_of(values, serving.limits.max_messages, answers))
        requests, ignored = [request], (*_unread(request.chat, answers), *ignored)
    else:
        requests = prompts_of(values.get("prompt"), request, serving.rules)
    for index, one in enumerate(requests):
        one.request_id = f"{request_id}-{index}" if request_id and len(requests) > 1 else request_id
    return CompletionRequest(
        requests=tuple(requests),
        is_chat=is_chat,
        request_id=request_id,
        streams=answer.get("stream", False),
        includes_usage=stream.get("include_usage", False),
        continuous_usage=stream.get("continuous_usage_stats", False),
        default_max_tokens=_most_tokens(serving, is_chat),
        has_logprobs=request.HasField("logprobs"),
        has_token_ids=answer.get("return_token_ids", False),
        has_provenance=request.return_provenance,
        has_trace=request.return_trace,
        names=field_names(values, is_chat=is_chat),
        ignored=ignored,
    )


def field_names(values: Mapping[str, Any], *, is_chat: bool) -> Callable[[str], str]:
    """Return what gives the name of a field in a request's JSON, by the one that refusals have."""
    # What a chat is rendered to is its prompt.
    names = {"prompt": "messages"} if is_chat else {}
    if values.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if values.get("top_logprobs") is not None:
        names["logprobs"] = "top_logprobs"
    form = values.get("response_format")
    paths = {"json_object": "response_format", "json_schema": "response_format.json_schema.schema"}
    kind = form.get("type") if isinstance(form, dict) else None
    if isinstance(kind, str) and kind in paths and values.get("json_schema") is None:
        names["json_schema"] = paths[kind]
    return lambda name: names.get(name, name)


def _asked(
    values: Mapping[str, Any], serving: LoadedModel, *, is_chat: bool
) -> tuple[wire.GenerateRequest, tuple[str, ...]]:
    """Return what a request asks for beside its prompts, and the names of what changes nothing.

    Fields that nobody here knows are not refused: clients send what other servers take.
    """
    request = wire.GenerateRequest()
    fields = JsonFields(request, serving.rules, _NAMES)
    # All are set, whether or not they are told.
    unknown = [name for name, value in values.items() if not fields.set(name, _taken(name, value))]
    read = _READ_APART | (CHAT_FIELDS if is_chat else {"prompt"})
    ignored = tuple(_shown(name) for name in unknown if name not in read)
    fields.set_field("logprobs", _num_logprobs(values, is_chat=is_chat))
    if is_chat:
        most = json_types.read(values, {"max_completion_tokens": json_types.count})
        fields.set("max_tokens", most.get("max_completion_tokens"))
    if (schema := _schema(values)) is not None:
        request.json_schema = schema
    if request.HasField("logprobs") and request.echo:
        request.prompt_logprobs = request.logprobs
    return request, ignored[:_MOST_TOLD]


def _unread(chat: wire.Chat, answers: AnswerFormat) -> tuple[str, ...]:
    """Return what of tools has no effect: the template does not name them, or calls stay in the answer's text."""
    if not chat.tools_json:
        return ()
    found = {"tools": answers.reads_tools, "tool_calls": answers.calls is not None}
    return tuple(name for name, is_read in found.items() if not is_read)


def _shown(name: str) -> str:
    """Return a caller's name as a header may have it."""
    return _NOT_SHOWN.sub("?", name[:_MOST_NAME])


def _taken(name: str, value: Any) -> Any:
    """Return a value as other servers take it: seeds are signed, -1 is none, and temperatures have a floor but 0."""
    if name == "seed" and type(value) is int and value == -1:
        return None
    if name == "seed" and type(value) is int and -(MAX_SEED + 1) // 2 <= value < 0:
        return value + MAX_SEED + 1
    if name == "temperature" and type(value) is float and 0 < value < SMALLEST_DIVISOR:
        return SMALLEST_DIVISOR
    return value


def _most_tokens(serving: LoadedModel, is_chat: bool) -> int | None:
    """Return the output tokens of a request that does not say; None for the checkpoint's own default."""
    if serving.defaults.max_tokens is not None:
        return None
    return serving.limits.max_tokens if is_chat else DEFAULT_MAX_TOKENS


def _num_logprobs(values: Mapping[str, Any], *, is_chat: bool) -> Any:
    """Return the number of alternatives; a chat asks for log-probabilities and for alternatives apart."""
    if not is_chat:
        return values.get("logprobs")
    given = json_types.read(values, {"logprobs": json_types.flag, "top_logprobs": json_types.count})
    if given.get("logprobs"):
        return given.get("top_logprobs", 0)
    if given.get("top_logprobs"):
        raise RequestError("top_logprobs", "needs logprobs true")
    return None


def _schema(values: Mapping[str, Any]) -> str | None:
    """Return the JSON schema that ``response_format`` asks for; None for none."""
    given = json_types.read(values, {"response_format": json_types.mapping}).get("response_format")
    if given is None:
        return None
    if values.get("json_schema") is not None:
        raise RequestError("json_schema", "must be left out with response_format")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema":
        raise RequestError("response_format.type", "must be text, json_object or json_schema")
    found = json_types.mapping("response_format.json_schema", given.get("json_schema"))
    schema = found.get("schema")
    if not isinstance(schema, dict):
        raise RequestError("response_format.json_schema.schema", "must be an object")
    if found.get("strict") is False:
        # What no grammar can keep is left out, as OpenAI does.
        own = schema.get("x-guidance")
        guidance = {"lenient": True, **(own if isinstance(own, dict) else {})}
        schema = {**without_odd_patterns(schema), "x-guidance": guidance}
    return json_types.json_text("response_format.json_schema.schema", schema)
