"""One prompt of a completion request as a request of its own, and what its sinks have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.spec import num_results
from outrider.runtime.serving.response_stream import Batch
from outrider.v1 import inference_pb2 as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """What every part of an answer says.

    Attributes:
        id: of the answer.
        created_s: seconds since 1970.
        model: name.
        token_text: of its tokens.
    """

    id: str
    created_s: int
    model: str
    token_text: TokenText


class Sink(Protocol):
    """Makes an answer of what comes of an HTTP request's prompts."""

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that a prompt, by its place in the request, is in the queue."""
        ...

    async def write(self, prompt: int, batch: Batch) -> None:
        """Take a batch of a prompt's completions."""
        ...

    async def ping(self) -> None:
        """Keep the connection where nothing has come for a while."""
        ...

    async def end(self) -> None:
        """Send what is left, when all completions have ended."""
        ...

    async def fail(self, error: ServingError) -> None:
        """Send an error as the end of the answer."""
        ...


class PromptRequest:
    """A request of ``runtime.serving.request_handler`` for one prompt, whose answer goes to a sink.

    Args:
        prompt: its place among the prompts of ``asked``.
        asked: by the HTTP request.
        client: who asks.
        sink: takes the answer.
    """

    def __init__(
        self, prompt: int, asked: CompletionRequest, client: ClientIdentity, sink: Sink
    ) -> None:
        self._prompt = prompt
        self._message = asked.requests[prompt]
        self.default_max_tokens = asked.default_max_tokens
        self._client = client
        self._sink = sink

    def client(self) -> ClientIdentity:
        """Return who asks."""
        return self._client

    def message(self) -> wire.GenerateRequest:
        """Return what is asked for."""
        return self._message

    def begin(self, spec: RequestSpec) -> None:
        """Note that the request is in the queue."""
        self._sink.begin(self._prompt, spec)

    async def write(self, batch: Batch) -> None:
        """Hand a batch to the sink."""
        await self._sink.write(self._prompt, batch)


def choices_per_prompt(asked: CompletionRequest) -> int:
    """Return the number of completions of each prompt."""
    return num_results(asked.requests[0])
