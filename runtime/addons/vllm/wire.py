"""Converts a ``vllm.grpc.engine.GenerateRequest`` to the request of ``outrider.v1`` that asks for the same.

Numbers of vLLM's ``SamplingParams`` without presence arrive as 0 where a caller says nothing, so 0 is as left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.core.events import EmittedToken, FinishReason, PromptToken
from outrider.v1 import inference_pb2 as wire
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
# Fields of a request that ask for what is not served; they may be sent empty.
_NOT_SERVED = (
    "kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs",
)  # fmt: skip
# Left out where 0: for some of them 0 means the same, for the others nothing.
_NUMBERS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_FORMS = ("json_schema", "regex", "grammar")
_ANY_OBJECT = '{"type": "object"}'
_MOST_CHOICES = 256


def request_of(message: vllm.GenerateRequest) -> wire.GenerateRequest:
    """Return the request that a message makes.

    Raises:
        RequestError: a field is not served, or has a value that no field of ``outrider.v1`` takes; names it.
    """
    _check_served(message)
    request = wire.GenerateRequest(request_id=message.request_id)
    match message.WhichOneof("input"):
        case "text":
            request.text = message.text
        case "tokenized":
            request.tokens.ids.extend(message.tokenized.input_ids)
            request.tokens.SetInParent()
    _add_params(request, message.sampling_params)
    return request


def _check_served(message: vllm.GenerateRequest) -> None:
    given = {field.name for field, _ in message.ListFields()}
    for name in _NOT_SERVED:
        if name in given:
            raise UnsupportedOption(name, "is not supported by this server; leave it out")
    if message.data_parallel_rank:
        raise UnsupportedOption("data_parallel_rank", "must be 0 or left out: there is one rank")
    if message.sampling_params.HasField("truncate_prompt_tokens"):
        raise UnsupportedOption("truncate_prompt_tokens", "is not supported; send a shorter prompt")


def _add_params(request: wire.GenerateRequest, params: vllm.SamplingParams) -> None:
    sampling = request.sampling
    for name in _NUMBERS:
        if value := getattr(params, name):
            setattr(sampling, name, _as_written(value))
    if params.HasField("temperature"):
        sampling.temperature = _as_written(params.temperature)
    for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
        if params.HasField(name):
            target = sampling if name == "seed" else request
            setattr(target, name, _not_negative(name, getattr(params, name)))
    if params.n:
        request.n = params.n
    request.stop.extend(params.stop)
    request.stop_token_ids.extend(params.stop_token_ids)
    request.skip_special_tokens = params.skip_special_tokens
    request.include_stop_str_in_output = params.include_stop_str_in_output
    request.ignore_eos = params.ignore_eos
    for token, bias in params.logit_bias.items():
        sampling.logit_bias[_not_negative("logit_bias", token)] = _as_written(bias)
    _add_form(request, params)


def _add_form(request: wire.GenerateRequest, params: vllm.SamplingParams) -> None:
    """Set the constraint of an answer: of the first token on, wherever a message says that it begins."""
    constraint = params.WhichOneof("constraint")
    if constraint in _FORMS:
        text = getattr(params, constraint)
        if not text:
            raise RequestError(constraint, "must not be empty")
        setattr(request, constraint, text)
    elif constraint == "json_object" and params.json_object:
        request.json_schema = _ANY_OBJECT
    elif constraint == "choice":
        choices = params.choice.choices
        check_count("choice", choices, _MOST_CHOICES)
        if not choices or not all(choices):
            raise RequestError("choice", "must have one or more texts, none of them empty")
        request.grammar = (
            f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"
        )
    elif constraint == "structural_tag":
        raise UnsupportedOption(
            constraint, "is not supported by this server; use json_schema, regex or grammar"
        )


def _as_written(value: float) -> float:
    """Return the shortest decimal number that 32 bits have this value for: what was asked for, at 64 bits."""
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise RequestError(name, "must not be negative")
    return value


def add_output_logprobs(field: vllm.OutputLogProbs, tokens: Sequence[EmittedToken]) -> None:
    """Append the log-probabilities of tokens that have some."""
    for token in tokens:
        if token.logprobs is None:
            continue
        field.token_ids.append(token.token)
        field.token_logprobs.append(token.logprobs.logprob)
        _add_top(field.top_logprobs.add(), token.logprobs.top)


def add_input_logprobs(field: vllm.InputLogProbs, tokens: Sequence[PromptToken]) -> None:
    """Append tokens of a prompt; the first one of all has no log-probability."""
    for token in tokens:
        field.token_ids.append(token.token)
        value, top = field.token_logprobs.add(), field.top_logprobs.add()
        if token.logprobs is not None:
            value.value = token.logprobs.logprob
            _add_top(top, token.logprobs.top)


def _add_top(field: vllm.TopLogProbs, top: Sequence[tuple[int, float]]) -> None:
    field.token_ids.extend(token for token, _ in top)
    field.values.extend(value for _, value in top)
