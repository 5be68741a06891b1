"""One ``Generate`` call of ``outrider.v1``: its bytes in, its responses out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import RequestSpec, sample_seed
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.response_stream import Batch
from outrider.runtime.serving.v1.wire import (
    add_tokens,
    finish_of,
    parse,
    step_of,
)
from outrider.v1 import inference_pb2 as wire

# Characters of one response: at most 2 MiB of the 4 MiB that gRPC clients take.
MOST_TEXT = 1 << 19


class V1Request:
    """A request of ``runtime.serving.request_handler``, parsed from bytes.

    Args:
        serving: what is served.
        data: a ``GenerateRequest``.
        client: who asks.
        send: takes the responses.
    """

    default_max_tokens: int | None = None

    def __init__(
        self,
        serving: LoadedModel,
        data: bytes,
        client: ClientIdentity,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._serving = serving
        self._data = data
        self._client = client
        self._send = send
        self._returns_provenance = self._returns_trace = False
        self._spec: RequestSpec | None = None

    def client(self) -> ClientIdentity:
        """Return who asks."""
        return self._client

    def message(self) -> wire.GenerateRequest:
        """Return what the bytes ask for, unchecked."""
        request = parse(wire.GenerateRequest, self._data)
        self._data = b""  # it may have megabytes, and the request may wait for long
        self._returns_provenance = request.return_provenance
        self._returns_trace = request.return_trace
        return request

    def begin(self, spec: RequestSpec) -> None:
        """Note the seed and the name of the request in the queue."""
        self._spec = spec

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt as callers count it, once it is in the queue: with an encoder, the source."""
        assert self._spec is not None
        return self._spec.source_tokens or self._spec.prompt_tokens

    async def write(self, batch: Batch) -> None:
        """Send a response, and before it the beginning of a long text in responses of its own."""
        text = batch.text
        while len(text) > MOST_TEXT:
            part = wire.GenerateResponse(text=text[:MOST_TEXT], index=batch.index)
            await self._send(part.SerializeToString())
            text = text[MOST_TEXT:]
        response = self._response(batch, text)
        if batch.prompt:
            add_tokens(response.prompt, batch.prompt, has_provenance=False)
        await self._send(response.SerializeToString())

    def _response(self, batch: Batch, text: str) -> wire.GenerateResponse:
        response = wire.GenerateResponse(text=text, index=batch.index, reasoning=batch.reasoning)
        response.tool_calls.extend(wire.ToolCall(**asdict(piece)) for piece in batch.calls)
        add_tokens(response.tokens, batch.tokens, self._returns_provenance)
        if self._returns_trace:
            response.steps.extend(step_of(step, self._text) for step in batch.steps)
        if isinstance(batch.end, Finished):
            response.text += batch.end.text
            if batch.end.beams:
                best = batch.end.beams[0]
                response.tokens.extend(wire.Token(id=token) for token in best.tokens)
            spec = self._spec
            assert spec is not None
            seed = sample_seed(spec.seed, batch.index)
            response.finish.CopyFrom(finish_of(batch.end, seed, spec.request_id))
        return response

    def _text(self, token: int) -> str:
        return self._serving.codec.decode((token,), skip_special_tokens=False)
