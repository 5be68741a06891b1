"""One ``Generate`` call of ``vllm.grpc.engine``: its bytes in, token ids out.

A stream has deltas, then the summary of each completion; without one the summaries are all there is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outrider.runtime.addons.vllm.wire import (
    REASONS,
    add_input_logprobs,
    add_output_logprobs,
    request_of,
)
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.response_stream import Batch
from outrider.runtime.serving.v1.wire import parse
from outrider.v1 import inference_pb2 as wire
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

Send = Callable[[bytes], Awaitable[None]]


class EngineRequest:
    """A request of ``runtime.serving.request_handler``, parsed from bytes; ``send`` takes its responses."""

    default_max_tokens: int | None = None

    def __init__(
        self, serving: LoadedModel, data: bytes, client: ClientIdentity, send: Send
    ) -> None:
        self._serving = serving
        self._data = data
        self._client = client
        self._send = send
        self._streams = False
        self._num_prompt_tokens = 0
        # By index: what the summaries of the completions say, as far as it is known.
        self._answers: list[vllm.GenerateComplete] = []

    def client(self) -> ClientIdentity:
        """Return who asks."""
        return self._client

    def message(self) -> wire.GenerateRequest:
        """Return what the bytes ask for, unchecked."""
        message = parse(vllm.GenerateRequest, self._data)
        self._data = b""
        self._streams = message.stream
        most = self._serving.limits.max_logit_bias
        check_count("logit_bias", message.sampling_params.logit_bias, most)
        return request_of(message)

    def begin(self, spec: RequestSpec) -> None:
        """Note how many completions the request in the queue has."""
        self._num_prompt_tokens = spec.num_prompt_tokens
        self._answers = [
            vllm.GenerateComplete(index=index, prompt_tokens=spec.num_prompt_tokens)
            for index in range(spec.num_samples)
        ]

    async def write(self, batch: Batch) -> None:
        """Send what has come, where it is streamed; and at a completion's end its summary."""
        answer = self._answers[batch.index]
        answer.output_ids.extend(token.token for token in batch.tokens)
        answer.completion_tokens = len(answer.output_ids)
        if self._streams and (batch.tokens or batch.prompt):
            await self._send(_serialized(chunk=self._chunk(batch, answer)))
        elif not self._streams:
            if batch.prompt:
                add_input_logprobs(answer.input_logprobs, batch.prompt)
            if batch.tokens and batch.tokens[0].logprobs is not None:
                add_output_logprobs(answer.output_logprobs, batch.tokens)
        if isinstance(batch.end, Finished):
            for summary in _summaries(answer, batch.end):
                await self._send(_serialized(complete=summary))

    def _chunk(self, batch: Batch, answer: vllm.GenerateComplete) -> vllm.GenerateStreamChunk:
        chunk = vllm.GenerateStreamChunk(
            token_ids=[token.token for token in batch.tokens],
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=answer.completion_tokens,
            index=batch.index,
        )
        if batch.prompt:
            add_input_logprobs(chunk.input_logprobs, batch.prompt)
        if batch.tokens and batch.tokens[0].logprobs is not None:
            add_output_logprobs(chunk.output_logprobs, batch.tokens)
        return chunk


def _serialized(
    *, chunk: vllm.GenerateStreamChunk | None = None, complete: vllm.GenerateComplete | None = None
) -> bytes:
    data: bytes = vllm.GenerateResponse(chunk=chunk, complete=complete).SerializeToString()
    return data


def _summaries(answer: vllm.GenerateComplete, end: Finished) -> list[vllm.GenerateComplete]:
    """Return the summary of a completion; of a beam search those of all that it found."""
    answer.cached_tokens = end.num_cached
    answer.spec_draft_tokens = end.report.num_drafted
    answer.spec_accepted_tokens = end.report.num_accepted
    if not end.beams:
        return [_ended(answer, REASONS[end.reason], end.stop)]
    found = []
    for index, beam in enumerate(end.beams):
        one = vllm.GenerateComplete()
        one.CopyFrom(answer)
        one.index = index
        one.output_ids.extend(beam.tokens)
        one.completion_tokens = len(beam.tokens)
        found.append(_ended(one, REASONS[beam.reason], beam.stop))
    return found


def _ended(
    answer: vllm.GenerateComplete, reason: str, stop: str | int | None
) -> vllm.GenerateComplete:
    answer.finish_reason = reason
    if isinstance(stop, int):
        answer.matched_token_id = stop
    elif isinstance(stop, str):
        answer.matched_stop_str = stop
    return answer
