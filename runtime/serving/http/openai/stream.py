"""The sink of a streamed answer: server-sent events, one per batch.

Chunks are built of strings: most of one is the same in all, and a stream sends thousands.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.params import Finished, RequestSpec, StepTrace, sample_seed
from outrider.runtime.serving.http.answers import EVENTS, answer_error, json_bytes
from outrider.runtime.serving.http.errors import body_of
from outrider.runtime.serving.http.openai.call import Head, choices_per_prompt
from outrider.runtime.serving.http.openai.fields import Wish
from outrider.runtime.serving.http.openai.shapes import (
    REASONS,
    Tokens,
    chat_logprobs,
    completion_logprobs,
    provenance_of,
    report_of,
    steps_of,
)
from outrider.runtime.serving.http.openai.usage import Tally, metrics_of
from outrider.runtime.serving.outbox import Batch
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
# Proxies that keep pieces back would make a stream halt.
_HEADERS = (EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

_quote = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class _Choice:
    """How far a completion has come."""

    has_begun: bool = False
    text_offset: int = 0
    steps: list[StepTrace] = field(default_factory=list)


class StreamSink:
    """Sends events of one HTTP request as they come."""

    def __init__(self, wish: Wish, head: Head, send: Send, headers: Mapping[bytes, bytes]) -> None:
        self._wish = wish
        self._head = head
        self._send = send
        self._headers = [*_HEADERS, *headers.items()]
        self._has_started = False
        self._starting = asyncio.Lock()
        self._per_prompt = choices_per_prompt(wish)
        self._is_single = self._per_prompt * len(wish.requests) == 1
        self._specs: dict[int, RequestSpec] = {}
        self._choices: dict[int, _Choice] = {}
        self._tally = Tally()
        self._metrics: dict[str, Any] = {"speculative_decoding": None}
        kind = "chat.completion.chunk" if wish.is_chat else "text_completion"
        self._prefix = (
            f'data: {{"id":{_quote(head.id)},"object":"{kind}","created":{head.created_s},'
            f'"model":{_quote(head.model)},"choices":['
        )
        self._has_plain_chunks = not (
            wish.has_logprobs or wish.has_token_ids or wish.has_trace or wish.has_provenance
        )

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that a prompt is in the queue."""
        self._specs[prompt] = spec
        self._tally.begin(prompt, spec.num_prompt_tokens)

    async def write(self, prompt: int, batch: Batch) -> None:
        """Send a batch as an event, or one of each completion that a search found."""
        self._tally.num_output += len(batch.tokens)
        end = batch.end if isinstance(batch.end, Finished) else None
        first = prompt * self._per_prompt
        if end is not None:
            self._tally.finish(prompt, end)
        if end is not None and end.beams:
            for place, beam in enumerate(end.beams):
                reason = REASONS[beam.reason]
                await self._write_chunk(first + place, beam.text, reason, beam.stop, batch, prompt)
            return
        text = batch.text
        if end is None:
            if text or not self._has_plain_chunks:
                await self._write_chunk(first + batch.index, text, None, None, batch, prompt)
            return
        if self._is_single:
            choice = self._choices.get(0, _Choice())
            steps = [*choice.steps, *batch.steps] if self._wish.has_trace else None
            self._metrics = metrics_of(end.report, steps)
        await self._write_chunk(
            first + batch.index, text + end.text, REASONS[end.reason], end.stop, batch, prompt
        )

    async def ping(self) -> None:
        """Send a comment, where nothing has been sent."""
        if not self._choices:
            await self._start()
            await self._piece(PING)

    async def end(self) -> None:
        """Send the usage, where it is asked for, and the mark of the end."""
        await self._start()
        if self._wish.includes_usage:
            usage, metrics = json_bytes(self._tally.usage()), json_bytes(self._metrics)
            await self._piece(
                self._prefix.encode() + b'],"usage":' + usage + b',"metrics":' + metrics + b"}\n\n"
            )
        await self._piece(DONE, is_last=True)

    async def fail(self, error: ServingError) -> None:
        """Send an error as the answer, or as the last event of one that has begun."""
        if self._has_started:
            await self._piece(b"data: " + body_of(error) + b"\n\n", is_last=True)
        else:
            self._has_started = True
            await answer_error(error, self._send, self._headers[len(_HEADERS) :])

    async def _write_chunk(
        self,
        index: int,
        text: str,
        reason: str | None,
        stop: str | int | None,
        batch: Batch,
        prompt: int,
    ) -> None:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
            await self._start()
        parts = [self._prefix, f'{{"index":{index},', self._content(choice, text)]
        parts.append(
            '"logprobs":null' if not self._wish.has_logprobs else self._logprobs(choice, batch)
        )
        if reason is None:
            parts.append(',"finish_reason":null')
        else:
            parts.append(f',"finish_reason":"{reason}","stop_reason":{_quote(stop)}')
        if self._wish.has_token_ids:
            parts.append(f',"token_ids":{[one.token for one in batch.tokens]}')
        parts.append("}]")
        if self._wish.has_trace or self._wish.has_provenance:
            choice.steps.extend(batch.steps)
            parts.append(f',"outrider":{_quote(self._outrider(batch, prompt))}')
        if self._wish.continuous_usage:
            parts.append(f',"usage":{_quote(self._tally.usage())}')
        elif self._wish.includes_usage:
            parts.append(',"usage":null')
        parts.append("}\n\n")
        choice.has_begun = True
        await self._piece("".join(parts).encode())

    def _content(self, choice: _Choice, text: str) -> str:
        if not self._wish.is_chat:
            return f'"text":{_quote(text)},'
        if choice.has_begun:
            return f'"delta":{{"content":{_quote(text)}}},'
        return f'"delta":{{"role":"assistant","content":{_quote(text)}}},'

    def _logprobs(self, choice: _Choice, batch: Batch) -> str:
        spelling = self._head.spelling
        if self._wish.is_chat:
            return f'"logprobs":{_quote(chat_logprobs(batch.tokens, spelling))}'
        tokens: Tokens = [*batch.prompt, *batch.tokens]
        found, choice.text_offset = completion_logprobs(tokens, spelling, choice.text_offset)
        return f'"logprobs":{_quote(found)}'

    def _outrider(self, batch: Batch, prompt: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._wish.has_trace:
            found["steps"] = steps_of(batch.steps, self._head.spelling)
        if self._wish.has_provenance:
            found["tokens"] = provenance_of(batch.tokens)
        if isinstance(batch.end, Finished):
            seed = sample_seed(self._specs[prompt].seed, batch.index)
            found["speculation"] = report_of(batch.end, seed)
        return found

    async def _start(self) -> None:
        if self._has_started:
            return
        async with self._starting:
            if not self._has_started:
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
                self._has_started = True

    async def _piece(self, body: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
