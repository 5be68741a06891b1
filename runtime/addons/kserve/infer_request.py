"""One request of the Open Inference Protocol: its message in, its responses out.

An id is a caller's own: it is repeated in answers, and several requests may have the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve.options import add_options, read_options
from outrider.runtime.addons.kserve.response import (
    LOGPROBS,
    OUTPUTS,
    TEXT_OUTPUT,
    Answer,
    add_outputs,
    answer_of,
)
from outrider.runtime.addons.kserve.tensors import BOOL, BYTES, read_inputs
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import ModelNotFound, RequestError, UnsupportedOption
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.response_stream import Batch
from outrider.runtime.serving.v1.wire import parse
from outrider.v1 import inference_pb2 as wire

VERSION = "1"
"""Of every model: there is one."""
# Triton's way to ask for an output: an input of this name.
_RETURNS = {
    f"return_{name}": name
    for name in ("finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")
}
INPUTS = {
    "text_input": BYTES,
    "stream": BOOL,
    "sampling_parameters": BYTES,
    "exclude_input_in_output": BOOL,
    **dict.fromkeys(_RETURNS, BOOL),
}
"""Datatypes of the tensors that a request may have, by name."""
EMPTY_FINAL, IS_FINAL, INDEX = (
    "triton_enable_empty_final_response",
    "triton_final_response",
    "index",
)
# Microseconds.
_TIMEOUT = "timeout"
MOST_ID = 128
_ID = oip.ModelInferRequest.ID_FIELD_NUMBER
_MOST_PARAMETERS = 64

Send = Callable[[oip.ModelInferResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How a request is to be answered.

    Attributes:
        outputs: names of tensors, at least one.
        streams: whether responses are sent as they are made.
        has_empty_final: whether an empty response ends them.
        echo_prefix: what the text begins with; empty unless the prompt is to be repeated.
    """

    outputs: tuple[str, ...] = (TEXT_OUTPUT,)
    streams: bool = False
    has_empty_final: bool = False
    echo_prefix: str = ""


class InferRequest:
    """A request of ``runtime.serving.request_handler``, parsed from bytes.

    Args:
        serving: the served model.
        data: a ``ModelInferRequest``.
        client: who asks.
        send: takes the responses.
        is_stream: whether ``send`` takes more than one, each of which says if it is the last.
    """

    default_max_tokens: int | None = None

    def __init__(
        self,
        serving: LoadedModel,
        data: bytes,
        client: ClientIdentity,
        send: Send,
        *,
        is_stream: bool = False,
    ) -> None:
        self._serving = serving
        self._client = client
        self._send = send
        self._is_stream = is_stream
        self._data = data
        self._id = ""
        self._wishes = Wishes()
        self._num_input_tokens = 0
        self._answers: list[Answer] = []
        self._num_open = 0

    def client(self) -> ClientIdentity:
        """Return who asks; behind ``message``, with the time that the request gives itself."""
        return self._client

    def message(self) -> wire.GenerateRequest:
        """Return what the bytes ask for, unchecked but for its tensors."""
        message, serving = parse(oip.ModelInferRequest, self._data), self._serving
        self._data = b""  # it may have megabytes, and the request may wait for long
        self._id = message.id
        if len(message.id) > MOST_ID:
            raise RequestError("id", f"must be at most {MOST_ID} characters")
        if not is_served(message.model_name, message.model_version, serving):
            raise ModelNotFound
        inputs: dict[str, Any] = read_inputs(message, INPUTS)
        if "text_input" not in inputs:
            raise RequestError("text_input", "is required")
        request = wire.GenerateRequest(text=inputs["text_input"])
        given, has_empty_final = _parameters(message)
        self._limit_time(message)
        options = read_options(inputs.get("sampling_parameters", "{}"))
        if not options.keys().isdisjoint(given):
            rule = "must not say again what sampling_parameters say"
            raise RequestError("parameters", rule)
        add_options(request, given | options, serving.rules)
        self._wishes = Wishes(
            outputs=_outputs(message, inputs),
            streams=inputs.get("stream", False),
            has_empty_final=has_empty_final,
            echo_prefix=self._echo_prefix(inputs, echoes=request.echo),
        )
        return request

    def _limit_time(self, message: oip.ModelInferRequest) -> None:
        client, timeout_us = self._client, _timeout_us(message)
        if timeout_us is not None:
            own_s = timeout_us / 1e6
            remaining_s = own_s if client.remaining_s is None else min(own_s, client.remaining_s)
            self._client = replace(client, remaining_s=remaining_s)

    def _echo_prefix(self, inputs: dict[str, Any], *, echoes: bool) -> str:
        """Return the prompt where the text is to begin with it: by Triton's rule unless it is streamed."""
        streams = inputs.get("stream", False)
        if streams and not self._is_stream:
            raise RequestError("stream", "must be false or left out with ModelInfer")
        if inputs.get("exclude_input_in_output", streams):
            return ""
        if streams:
            raise RequestError("exclude_input_in_output", "must be true or left out with stream")
        echo_prefix: str = inputs["text_input"]
        return "" if echoes else echo_prefix

    def begin(self, spec: RequestSpec) -> None:
        """Note how many completions the request in the queue has."""
        self._num_input_tokens = spec.num_prompt_tokens
        self._num_open = spec.num_samples
        self._answers = [Answer(texts=[self._wishes.echo_prefix]) for _ in range(spec.num_samples)]

    async def write(self, batch: Batch) -> None:
        """Send what has come; or, where nothing is to be streamed, all completions at the end of the last one."""
        wishes, answer = self._wishes, self._answers[batch.index]
        answer.add(batch, self._serving.codec if LOGPROBS in wishes.outputs else None)
        self._num_open -= isinstance(batch.end, Finished)
        if isinstance(batch.end, Finished) and batch.end.beams:
            found = batch.end.beams
            await self._respond([answer_of(beam, answer, wishes.echo_prefix) for beam in found], 0)
        elif wishes.streams:
            self._answers[batch.index] = Answer()
            await self._respond([answer], batch.index)
        elif self._num_open == 0:
            await self._respond(self._answers, 0)

    async def _respond(self, shown: list[Answer], index: int) -> None:
        wishes, is_last = self._wishes, self._num_open == 0
        response = self._response()
        add_outputs(response, wishes.outputs, shown, self._num_input_tokens)
        if self._is_stream:
            if wishes.streams and len(self._answers) > 1:
                response.parameters[INDEX].int64_param = index
            response.parameters[IS_FINAL].bool_param = is_last and not wishes.has_empty_final
        await self._send(response)
        if self._is_stream and is_last and wishes.has_empty_final:
            final = self._response()
            final.parameters[IS_FINAL].bool_param = True
            await self._send(final)

    def _response(self) -> oip.ModelInferResponse:
        """Return a response without outputs."""
        return oip.ModelInferResponse(
            model_name=self._serving.model.name, model_version=VERSION, id=self._id
        )


def id_of(data: bytes) -> str:
    """Return the id of a request that may never be parsed, or its beginning; empty where it is not in its usual place.

    Whoever writes fields in their order has nothing before it but the model's name and version.
    """
    at = 0
    for _ in range(_ID):
        # The field's number and the kind of a text; then its size, in two bytes at most.
        field, size, more = (*data[at : at + 3], 0, 0, 0)[:3]
        at += 2 + (size > 127)
        size = size & 127 | more << 7 if size > 127 else size
        if field == _ID << 3 | 2:
            return data[at : at + min(size, 4 * MOST_ID)].decode(errors="ignore")[:MOST_ID]
        at += size
    return ""


def is_served(name: str, version: str, serving: LoadedModel) -> bool:
    """Return whether a model is the served one; each of its names may be left out."""
    return name in ("", serving.model.name) and version in ("", VERSION)


def _value(parameter: oip.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _timeout_us(message: oip.ModelInferRequest) -> int | None:
    """Return a request's own time, where it gives itself a possible one; reads no other parameter."""
    if _TIMEOUT not in message.parameters:
        return None
    value = _value(message.parameters[_TIMEOUT])
    is_possible = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_possible else None


def _parameters(message: oip.ModelInferRequest) -> tuple[dict[str, Any], bool]:
    """Return the options among a request's parameters, and whether an empty response is to end the answer."""
    check_count("parameters", message.parameters, _MOST_PARAMETERS)
    given = {name: _value(one) for name, one in message.parameters.items()}
    has_empty_final = given.pop(EMPTY_FINAL, False)
    if _TIMEOUT in given and _timeout_us(message) is None:
        raise RequestError(_TIMEOUT, "must be a whole number of microseconds above 0")
    if not isinstance(has_empty_final, bool):
        raise RequestError(EMPTY_FINAL, "must be true or false")
    given.pop(_TIMEOUT, None)
    return given, has_empty_final


def _outputs(message: oip.ModelInferRequest, inputs: dict[str, Any]) -> tuple[str, ...]:
    check_count("outputs", message.outputs, len(OUTPUTS))
    for one in message.outputs:
        if one.name not in OUTPUTS:
            raise RequestError("outputs", f"each must be one of {', '.join(OUTPUTS)}")
        if one.parameters:
            raise UnsupportedOption(
                "outputs", "must have no parameters: shared memory is not served"
            )
    names = [one.name for one in message.outputs] or [TEXT_OUTPUT]
    names += [output for name, output in _RETURNS.items() if inputs.get(name)]
    return tuple(dict.fromkeys(names))
