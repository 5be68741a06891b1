"""One prompt of a completion request as a call of the request handler, and what its sinks have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.accounting import ClientIdentity
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.response_stream import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """What every part of an answer says.

    Attributes:
        id: of the answer.
        created_s: seconds since 1970.
        model: name.
        spelling: of its tokens.
    """

    id: str
    created_s: int
    model: str
    spelling: TokenText


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


class PromptCall:
    """A call of ``runtime.serving.request_handler`` for one prompt, whose answer goes to a sink."""

    def __init__(
        self, prompt: int, fields: GenerateFields, caller: ClientIdentity, sink: Sink
    ) -> None:
        self._prompt = prompt
        self._fields = fields
        self._caller = caller
        self._sink = sink

    def caller(self) -> ClientIdentity:
        """Return who asks."""
        return self._caller

    def fields(self) -> GenerateFields:
        """Return what is asked for."""
        return self._fields

    def begin(self, spec: RequestSpec) -> None:
        """Note that the request is in the queue."""
        self._sink.begin(self._prompt, spec)

    async def write(self, batch: Batch) -> None:
        """Hand a batch to the sink."""
        await self._sink.write(self._prompt, batch)


def choices_per_prompt(asked: CompletionRequest) -> int:
    """Return the number of completions of each prompt."""
    first = asked.requests[0]
    return first.num_samples if first.beams is None else first.beams.num_results
