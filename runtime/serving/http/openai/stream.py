"""The sink of a streamed answer: server-sent events, one per batch.

Chunks are built of strings: most of one is the same in all, and a stream sends thousands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.events import Finished, PromptToken, StepTrace
from outrider.runtime.core.params import RequestSpec, sample_seed
from outrider.runtime.serving.http.errors import body_of
from outrider.runtime.serving.http.openai.event_sender import EventSender
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.prompt_request import ResponseHeader, choices_per_prompt
from outrider.runtime.serving.http.openai.response_json import (
    REASONS,
    TextPlaces,
    Tokens,
    call_delta,
    chat_logprobs,
    completion_logprobs,
    provenance_of,
    reason_of,
    report_of,
    steps_of,
)
from outrider.runtime.serving.http.openai.usage import UsageCounter, metrics_of
from outrider.runtime.serving.http.responses import answer_error, json_bytes
from outrider.runtime.serving.response_stream import Batch, CallPiece
from starlette.types import Send

DONE = b"data: [DONE]\n\n"

_quote = json.JSONEncoder(ensure_ascii=False).encode


class _Piece(NamedTuple):
    """A piece of a completion, the ``number``-th choice; ``reason`` and ``stop`` are None but for the last one."""

    number: int
    text: str
    tokens: Sequence[int]
    reason: str | None = None
    stop: str | int | None = None
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True)
class _Choice:
    """How far a completion has come."""

    has_begun: bool = False
    has_calls: bool = False
    places: TextPlaces = field(default_factory=TextPlaces)
    steps: list[StepTrace] = field(default_factory=list)


class StreamSink:
    """Sends events of one HTTP request as they come."""

    def __init__(
        self,
        asked: CompletionRequest,
        header: ResponseHeader,
        send: Send,
        headers: Mapping[bytes, bytes],
    ) -> None:
        self._asked = asked
        self._header = header
        self._send = send
        self._headers = headers
        self._sender = EventSender(send, headers)
        self._per_prompt = choices_per_prompt(asked)
        self._is_single = self._per_prompt * len(asked.requests) == 1
        self._specs: dict[int, RequestSpec] = {}
        # Of several completions the first alone is told its prompt's; the text of all begins with it.
        self._prompts: dict[int, list[PromptToken]] = {}
        self._choices: dict[int, _Choice] = {}
        self._usage = UsageCounter()
        self._metrics: dict[str, Any] = {"speculative_decoding": None}
        kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        self._prefix = (
            f'data: {{"id":{_quote(header.id)},"object":"{kind}","created":{header.created_s},'
            f'"model":{_quote(header.model)},"choices":['
        )
        self._has_plain_chunks = not (
            asked.has_logprobs or asked.has_token_ids or asked.has_trace or asked.has_provenance
        )

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that a prompt is in the queue."""
        self._specs[prompt] = spec
        self._usage.begin(prompt, spec.num_prompt_tokens)

    async def write(self, prompt: int, batch: Batch) -> None:
        """Send a batch as an event, or one of each completion that a search found."""
        self._usage.add(batch)
        end = batch.end if isinstance(batch.end, Finished) else None
        if end is not None:
            self._finish(prompt, end, batch)
        elif not (batch.text or batch.reasoning or batch.calls) and self._has_plain_chunks:
            return
        for piece in self._pieces(prompt, batch, end):
            await self._write_chunk(piece, batch, prompt)

    async def ping(self) -> None:
        """Send a comment, where nothing has been sent."""
        if not self._choices:
            await self._sender.ping()

    async def end(self) -> None:
        """Send the usage, where it is asked for, and the mark of the end."""
        if self._asked.includes_usage:
            usage, metrics = json_bytes(self._usage.usage()), json_bytes(self._metrics)
            await self._sender.send(
                self._prefix.encode() + b'],"usage":' + usage + b',"metrics":' + metrics + b"}\n\n"
            )
        await self._sender.send(DONE, is_last=True)

    async def fail(self, error: ServingError) -> None:
        """Send an error as the answer, or as the last event of one that has begun."""
        if await self._sender.start():
            await self._sender.send(b"data: " + body_of(error) + b"\n\n", is_last=True)
        else:
            await answer_error(error, self._send, [*self._headers.items()])

    def _finish(self, prompt: int, end: Finished, batch: Batch) -> None:
        """Count what a completion used."""
        self._usage.finish(prompt, end)
        if self._is_single and not end.beams:
            before = self._choices[0].steps if self._choices else []
            steps = [*before, *batch.steps] if self._asked.has_trace else None
            self._metrics = metrics_of(end.report, steps)

    def _pieces(self, prompt: int, batch: Batch, end: Finished | None) -> list[_Piece]:
        """Return what a batch says: of one completion, or of all that a search found."""
        first = prompt * self._per_prompt
        if end is not None and end.beams:
            return [
                _Piece(first + place, beam.text, beam.tokens, REASONS[beam.reason], beam.stop)
                for place, beam in enumerate(end.beams)
            ]
        index, tokens = first + batch.index, [one.token for one in batch.tokens]
        piece = _Piece(index, batch.text, tokens, reasoning=batch.reasoning, calls=batch.calls)
        if end is None:
            return [piece]
        text, reason = batch.text + end.text, REASONS[end.reason]
        return [piece._replace(text=text, reason=reason, stop=end.stop)]

    async def _write_chunk(self, piece: _Piece, batch: Batch, prompt: int) -> None:
        asked, index = self._asked, piece.number
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
            await self._sender.open()
        choice.has_calls = choice.has_calls or bool(piece.calls)
        parts = [self._prefix, f'{{"index":{index},', self._content(choice, piece)]
        parts.append(
            self._logprobs(choice, batch, prompt) if asked.has_logprobs else '"logprobs":null'
        )
        if piece.reason is None:
            parts.append(',"finish_reason":null')
        else:
            stop, reason = (
                _quote(piece.stop),
                reason_of(piece.reason, has_calls=choice.has_calls, stop=piece.stop),
            )
            parts.append(f',"finish_reason":"{reason}","stop_reason":{stop}')
        if asked.has_token_ids:
            parts.append(f',"token_ids":{[*piece.tokens]}')
        parts.append("}]")
        if asked.has_trace or asked.has_provenance:
            choice.steps.extend(batch.steps)
            parts.append(f',"outrider":{_quote(self._outrider(batch, prompt))}')
        if asked.continuous_usage:
            parts.append(f',"usage":{_quote(self._usage.usage())}')
        elif asked.includes_usage:
            parts.append(',"usage":null')
        parts.append("}\n\n")
        choice.has_begun = True
        await self._sender.send("".join(parts).encode())

    def _content(self, choice: _Choice, piece: _Piece) -> str:
        text = piece.text
        if not self._asked.is_chat:
            return f'"text":{_quote(text)},'
        role = "" if choice.has_begun else '"role":"assistant",'
        if not piece.reasoning and not piece.calls:
            return f'"delta":{{{role}"content":{_quote(text)}}},'
        delta: dict[str, Any] = {} if choice.has_begun else {"role": "assistant"}
        if text:
            delta["content"] = text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [call_delta(one) for one in piece.calls]
        return f'"delta":{_quote(delta)},'

    def _logprobs(self, choice: _Choice, batch: Batch, prompt: int) -> str:
        token_text = self._header.token_text
        if self._asked.is_chat:
            return f'"logprobs":{_quote(chat_logprobs(batch.tokens, token_text))}'
        echoed: Sequence[PromptToken] = batch.prompt
        if batch.index == 0:
            self._prompts.setdefault(prompt, []).extend(echoed)
        elif not choice.has_begun:
            echoed = self._prompts.get(prompt, ())
        tokens: Tokens = [*echoed, *batch.tokens]
        found = completion_logprobs(tokens, token_text, choice.places)
        return f'"logprobs":{_quote(found)}'

    def _outrider(self, batch: Batch, prompt: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._asked.has_trace:
            found["steps"] = steps_of(batch.steps, self._header.token_text)
        if self._asked.has_provenance:
            found["tokens"] = provenance_of(batch.tokens)
        if isinstance(batch.end, Finished):
            seed = sample_seed(self._specs[prompt].seed, batch.index)
            found["speculation"] = report_of(batch.end, seed)
        return found
