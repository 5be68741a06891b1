"""What a request may ask, by keyword: types for editors and mypy, and the message that they make.

Names and meanings are those of ``v1/inference.proto``, which says each field's unit, limits and default. What is left
out takes the server's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from outrider.chat import build_chat
from outrider.v1 import inference_pb2 as wire

Prompt: TypeAlias = str | Sequence[int] | wire.GenerateRequest
"""Text, token ids, or a whole request."""
Message: TypeAlias = Mapping[str, Any]
"""Of a conversation: ``{"role": "user", "content": "Hello"}`` and what else the model's template knows."""
Mode: TypeAlias = Literal["max_accept", "seed_stable", "lenient"]

_MODE_PREFIX = "EXACTNESS_MODE_"


class SpeculationParams(TypedDict, total=False):
    """How a request is drafted for: the message ``Speculation``; ``mode`` by name or number."""

    enabled: bool
    drafter: str
    gamma: int
    mode: Mode | int
    lenience: float
    phrase_length: int
    num_phrases: int
    window: int
    reference: str
    adaptive: bool
    block_verification: bool
    beam_width: int
    branching: Sequence[int]


class SamplingParams(TypedDict, total=False):
    """What an answer may look like and how it is drawn: ``SamplingParams(temperature=0.0, max_tokens=64)``.

    A dict, so that ``client.generate(prompt, **params)`` says the same. A stop string or a bad word may stand alone,
    a JSON schema may be a dict.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    min_tokens: int
    seed: int
    no_repeat_ngram_size: int
    top_n_sigma: float
    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    n: int
    best_of: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    regex: str
    json_schema: str | Mapping[str, Any]
    grammar: str
    disable_any_whitespace: bool
    num_beams: int
    length_penalty: float
    early_stopping: bool
    exhaustive_search: bool
    source_language: str
    target_language: str
    answer_prefix: str
    answer_prefix_tokens: Sequence[int]
    speculation: SpeculationParams
    return_provenance: bool
    return_trace: bool
    cache_salt: str
    priority: int
    add_special_tokens: bool
    adapter: str


class ChatParams(TypedDict, total=False):
    """A conversation in place of a prompt, and how it is rendered: the message ``Chat``.

    ``tools`` are told to the template as JSON, ``template_arguments`` are further variables of it. How the answer calls
    tools, and whether its parts are told apart, is said by the fields of ``Chat`` of the same names.
    """

    messages: Sequence[Message]
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]]
    template_arguments: Mapping[str, Any]
    template: str
    tool_choice: str
    tool_name: str
    parallel_tool_calls: bool
    parse_answer: bool
    max_reasoning_tokens: int


class RequestOptions(SamplingParams, ChatParams, total=False):
    """All that a request may ask beside its prompt."""

    request_id: str
    model: str


def build_request(
    prompt: Prompt | None = None, **options: Unpack[RequestOptions]
) -> wire.GenerateRequest:
    """Return a request made from a prompt, or from ``messages``, and options.

    Options replace those of a whole request, but for ``speculation``, of which those given do; None is as not given.

    Raises:
        TypeError: there is no such option, not one of prompt and messages, or a value has another type.
        ValueError: a value does not fit its field.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    of_chat = {name: given.pop(name) for name in ChatParams.__annotations__ if name in given}
    request = wire.GenerateRequest()
    if (prompt is None) == ("messages" not in of_chat):
        raise TypeError("one of prompt and messages is required")
    if "messages" in of_chat:
        request.chat.CopyFrom(build_chat(**of_chat))
    elif of_chat:
        raise TypeError(f"{', '.join(of_chat)}: only with messages")
    elif isinstance(prompt, wire.GenerateRequest):
        request.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.tokens.CopyFrom(_token_ids(prompt))
    _add_options(request, given)
    return request


def _token_ids(prompt: Any) -> wire.TokenIds:
    # A dict and bytes are iterables of something else.
    if not isinstance(prompt, Mapping | bytes | bytearray | memoryview):
        with suppress(TypeError):
            return wire.TokenIds(ids=prompt)
    raise TypeError(
        f"prompt must be a text, a list of token ids or a GenerateRequest, not {type(prompt).__name__}"
    )


def build_tokenize(
    text: str,
    add_special_tokens: bool | None,
    target: bool,
    source_language: str,
    chat: ChatParams,
) -> wire.TokenizeRequest:
    """Return the request of ``tokenize``: of a text, or of a conversation.

    Raises:
        TypeError: as ``build_request``.
    """
    of_chat: Any = {name: value for name, value in chat.items() if value is not None}
    if of_chat and "messages" not in of_chat:
        raise TypeError(f"{', '.join(of_chat)}: only with messages")
    return wire.TokenizeRequest(
        text=text,
        add_special_tokens=add_special_tokens,
        target=target,
        source_language=source_language,
        chat=build_chat(**of_chat) if of_chat else None,
    )


def _add_options(request: wire.GenerateRequest, given: dict[str, Any]) -> None:
    """Set options of a request, each where its field is."""
    in_sampling = wire.Sampling.DESCRIPTOR.fields_by_name
    descriptor = wire.GenerateRequest.DESCRIPTOR
    prompts = {one.name for one in descriptor.oneofs_by_name["prompt"].fields}
    if unknown := set(given) - set(in_sampling) - (set(descriptor.fields_by_name) - prompts):
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    for name in ("stop", "bad_words"):
        # A string is a sequence of strings, too: its letters.
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    if isinstance(given.get("json_schema"), Mapping):
        given["json_schema"] = json.dumps(given["json_schema"], ensure_ascii=False)
    if isinstance(given.get("answer_prefix_tokens"), Sequence):
        given["answer_prefix_tokens"] = wire.TokenIds(ids=given["answer_prefix_tokens"])
    if isinstance(given.get("speculation"), Mapping):
        request.speculation.SetInParent()
        _set(request.speculation, _speculation(given.pop("speculation")))
    sampling = {name: given.pop(name) for name in [*given] if name in in_sampling}
    _set(request, given)
    _set(request.sampling, sampling)


def _set(message: Any, values: Mapping[str, Any]) -> None:
    """Set fields of a message; lists are replaced, too."""
    new = type(message)(**values)
    for name in values:
        message.ClearField(name)
    message.MergeFrom(new)


def _speculation(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is given of ``Speculation``, the mode by number."""
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(mode := given.get("mode"), str):
        names = wire.ExactnessMode.DESCRIPTOR.values_by_name
        name = _MODE_PREFIX + mode.upper().removeprefix(_MODE_PREFIX)
        if name not in names:
            raise ValueError("speculation.mode must be max_accept, seed_stable or lenient")
        given["mode"] = names[name].number
    return given
