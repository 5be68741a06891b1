"""Parses a request's JSON: OpenAI's fields and our own, as fields of a generation request.

Our own fields have the names of ``outrider.v1`` and stand at the top, where clients put what they call extra. Unknown
names are ignored; known ones that would change the answer and are not served are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.options import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.http.openai import json_types
from outrider.runtime.serving.http.openai.messages import chat_of
from outrider.runtime.serving.http.openai.prompts import prompts_of
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.v1.fields import Given, generate_fields

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI's; a chat may fill the context."""
_FIELDS: Mapping[str, json_types.Kind] = {
    "model": json_types.text,
    "max_tokens": json_types.count,
    "n": json_types.count,
    "best_of": json_types.count,
    "stop": json_types.text_or_texts,
    "stop_token_ids": json_types.ids,
    "include_stop_str_in_output": json_types.flag,
    "ignore_eos": json_types.flag,
    "skip_special_tokens": json_types.flag,
    "echo": json_types.flag,
    "regex": json_types.text,
    "json_schema": json_types.text,
    "grammar": json_types.text,
    "disable_any_whitespace": json_types.flag,
    "num_beams": json_types.count,
    "length_penalty": json_types.number,
    "early_stopping": json_types.flag,
    "exhaustive_search": json_types.flag,
    "source_language": json_types.text,
    "target_language": json_types.text,
    "answer_prefix": json_types.text,
    "answer_prefix_tokens": json_types.ids,
    "cache_salt": json_types.text,
    "priority": json_types.count,
    "adapter": json_types.text,
    "return_provenance": json_types.flag,
    "return_trace": json_types.flag,
}
_SAMPLING: Mapping[str, json_types.Kind] = {
    "temperature": json_types.number,
    "top_k": json_types.top_k,
    "top_p": json_types.number,
    "min_p": json_types.number,
    "repetition_penalty": json_types.number,
    "presence_penalty": json_types.number,
    "frequency_penalty": json_types.number,
    "logit_bias": json_types.biases,
    "allowed_token_ids": json_types.ids,
    "bad_words": json_types.texts,
    "min_tokens": json_types.count,
    "seed": json_types.count,
    "no_repeat_ngram_size": json_types.count,
}
_SPECULATION: Mapping[str, json_types.Kind] = {
    "enabled": json_types.flag,
    "drafter": json_types.text,
    "gamma": json_types.count,
    "mode": json_types.mode,
    "lenience": json_types.number,
    "phrase_length": json_types.count,
    "num_phrases": json_types.count,
    "window": json_types.count,
    "reference": json_types.text,
    "adaptive": json_types.flag,
    "block_verification": json_types.flag,
    "beam_width": json_types.count,
    "branching": json_types.ids,
}
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
_REFUSED: Mapping[str, str] = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What an HTTP request asks for, and how it is to be answered.

    Attributes:
        requests: one per prompt.
        is_chat: which of the two shapes the answer has.
        request_id: the caller's; empty where he gives none.
        streams: whether the answer comes in events.
        includes_usage: whether the last event has the usage.
        continuous_usage: whether every event has it so far.
        has_logprobs: whether tokens are told with log-probabilities.
        has_token_ids: whether choices have their token ids.
        has_provenance: whether it is told where each token came from.
        has_trace: whether each pass of the target is told.
    """

    requests: tuple[GenerateFields, ...]
    is_chat: bool
    request_id: str = ""
    streams: bool = False
    includes_usage: bool = False
    continuous_usage: bool = False
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_provenance: bool = False
    has_trace: bool = False


def completion_request(
    values: Mapping[str, Any], serving: LoadedModel, *, is_chat: bool
) -> CompletionRequest:
    """Return what the JSON object of a request asks for; ranges are not checked yet.

    Raises:
        RequestError: a field has another type, or may not stand beside another.
        UnsupportedOption: a field is not served here.
    """
    for name, rule in _REFUSED.items():
        if values.get(name) is not None:
            raise UnsupportedOption(name, rule)
    if isinstance(biases := values.get("logit_bias"), dict):
        check_count("logit_bias", biases, serving.limits.max_logit_bias)
    answer = json_types.read(values, _ANSWER)
    stream = json_types.read(answer.get("stream_options", {}), _STREAM, "stream_options.")
    fields = json_types.read(values, _FIELDS) | _logprobs(values, is_chat=is_chat) | _form(values)
    if is_chat:
        if (most := json_types.read(values, {"max_completion_tokens": json_types.count})) != {}:
            fields["max_tokens"] = most["max_completion_tokens"]
        prompts: list[dict[str, Any]] = [{"chat": chat_of(values, serving.limits.max_messages)}]
    else:
        prompts = prompts_of(values.get("prompt"), serving)
    if "logprobs" in fields and fields.get("echo"):
        fields["prompt_logprobs"] = fields["logprobs"]
    sampling, speculation = json_types.read(values, _SAMPLING), _speculation(values)
    request_id = answer.get("request_id", "")
    requests = []
    for index, prompt in enumerate(prompts):
        name = f"{request_id}-{index}" if request_id and len(prompts) > 1 else request_id
        given = Given(
            fields=fields | prompt | {"request_id": name},
            sampling=sampling,
            speculation=speculation,
        )
        requests.append(generate_fields(given, serving.defaults, _most_tokens(serving, is_chat)))
    return CompletionRequest(
        requests=tuple(requests),
        is_chat=is_chat,
        request_id=request_id,
        streams=answer.get("stream", False),
        includes_usage=stream.get("include_usage", False),
        continuous_usage=stream.get("continuous_usage_stats", False),
        has_logprobs="logprobs" in fields,
        has_token_ids=answer.get("return_token_ids", False),
        has_provenance=fields.get("return_provenance", False),
        has_trace=fields.get("return_trace", False),
    )


def _most_tokens(serving: LoadedModel, is_chat: bool) -> int | None:
    """Return the output tokens of a request that does not say; None for the checkpoint's own default."""
    if serving.defaults.max_tokens is not None:
        return None
    return serving.limits.max_tokens if is_chat else DEFAULT_MAX_TOKENS


def _speculation(values: Mapping[str, Any]) -> dict[str, Any]:
    given = json_types.read(values, {"speculation": json_types.mapping}).get("speculation", {})
    for name in given:
        if name not in _SPECULATION:
            rule = f"must have no other names than {', '.join(_SPECULATION)}"
            raise RequestError("speculation", rule)
    return json_types.read(given, _SPECULATION, "speculation.")


def _logprobs(values: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return the number of alternatives; a chat asks for log-probabilities and for alternatives apart."""
    if not is_chat:
        return json_types.read(values, {"logprobs": json_types.count})
    given = json_types.read(values, {"logprobs": json_types.flag, "top_logprobs": json_types.count})
    if given.get("logprobs"):
        return {"logprobs": given.get("top_logprobs", 0)}
    if given.get("top_logprobs"):
        raise RequestError("top_logprobs", "needs logprobs true")
    return {}


def _form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the answer that ``response_format`` asks for, by the names of our own fields."""
    given = json_types.read(values, {"response_format": json_types.mapping}).get("response_format")
    if given is None:
        return {}
    if values.get("json_schema") is not None:
        raise RequestError("json_schema", "must be left out with response_format")
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    if kind != "json_schema":
        raise RequestError("response_format.type", "must be text, json_object or json_schema")
    found = json_types.mapping("response_format.json_schema", given.get("json_schema"))
    schema = found.get("schema")
    if not isinstance(schema, dict):
        raise RequestError("response_format.json_schema.schema", "must be an object")
    return {"json_schema": json_types.json_text("response_format.json_schema.schema", schema)}
