"""The sink of a whole answer: gathers what comes, and sends it when everything has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import RequestSpec, sample_seed
from outrider.runtime.serving.http.openai.completion_buffer import CompletionBuffer, Logprobs
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.prompt_request import ResponseHeader, choices_per_prompt
from outrider.runtime.serving.http.openai.response_json import (
    REASONS,
    provenance_of,
    reason_of,
    report_of,
    steps_of,
)
from outrider.runtime.serving.http.openai.usage import UsageCounter, metrics_of
from outrider.runtime.serving.http.responses import JSON, answer, answer_error, json_text
from outrider.runtime.serving.response_stream import Batch
from starlette.types import Send

MOST_INLINE = 256
"""Tokens of an answer that is put together on the event loop."""


class WholeSink:
    """Answers one HTTP request at its end."""

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
        self._headers = [JSON, *headers.items()]
        self._per_prompt = choices_per_prompt(asked)
        self._specs: dict[int, RequestSpec] = {}
        self._buffers: dict[tuple[int, int], CompletionBuffer] = {}
        # Of several completions the first alone is told its prompt's; the text of all begins with it.
        self._echoed: dict[int, Logprobs] = {}
        self._usage = UsageCounter()

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that a prompt is in the queue."""
        self._specs[prompt] = spec
        self._usage.begin(prompt, spec.num_prompt_tokens)

    async def write(self, prompt: int, batch: Batch) -> None:
        """Keep what of a batch is asked for."""
        asked = self._asked
        found = self._buffers.setdefault((prompt, batch.index), CompletionBuffer())
        found.texts.append(batch.text)
        found.add_parts(batch)
        if asked.has_logprobs:
            self._add_logprobs(found, prompt, batch)
        if asked.has_token_ids:
            found.token_ids += [one.token for one in batch.tokens]
        if asked.has_provenance:
            found.provenance += provenance_of(batch.tokens)
        if asked.has_trace:
            found.steps += batch.steps
        self._usage.add(batch)
        if isinstance(batch.end, Finished):
            found.texts.append(batch.end.text)
            found.end = batch.end
            self._usage.finish(prompt, batch.end)

    def _add_logprobs(self, found: CompletionBuffer, prompt: int, batch: Batch) -> None:
        if prompt not in self._echoed:
            self._echoed[prompt] = Logprobs(self._header.token_text, is_chat=self._asked.is_chat)
        echoed = self._echoed[prompt]
        if not self._asked.is_chat:
            echoed.add(batch.prompt)
        # The prompt's come before all completions' tokens, in batches of their own where they are many.
        if found.logprobs is None and (batch.tokens or batch.end is not None):
            found.logprobs = echoed.copy()
        if found.logprobs is not None:
            found.logprobs.add(batch.tokens)

    async def ping(self) -> None:
        """Do nothing: a whole answer has one status, which is not known yet."""

    async def end(self) -> None:
        """Send the answer; a long one is put together beside the event loop."""
        is_long = self._usage.num_output > MOST_INLINE
        body = await asyncio.to_thread(self._body) if is_long else self._body()
        await answer(body, self._send, headers=self._headers)

    def _body(self) -> bytes:
        choices, metrics = list[str](), {"speculative_decoding": None}
        for (prompt, sample), found in sorted(self._buffers.items()):
            choices += self._choices(prompt, sample, found)
        if len(choices) == 1 and (end := found.end) is not None and not end.beams:
            metrics = metrics_of(end.report, found.steps if self._asked.has_trace else None)
        header = {
            "id": self._header.id,
            "object": "chat.completion" if self._asked.is_chat else "text_completion",
            "created": self._header.created_s,
            "model": self._header.model,
        }
        tail = {"usage": self._usage.usage(), "metrics": metrics}
        return _object(header, f'"choices":[{",".join(choices)}]', tail).encode()

    async def fail(self, error: ServingError) -> None:
        """Send an error as the answer."""
        await answer_error(error, self._send, self._headers[1:])

    def _choices(self, prompt: int, sample: int, found: CompletionBuffer) -> list[str]:
        """Return the JSON of a completion, or of all that a search found."""
        asked, first, end = self._asked, prompt * self._per_prompt, found.end
        assert end is not None
        more: dict[str, Any]
        if end.beams:
            choices = []
            for place, beam in enumerate(end.beams):
                more = {"finish_reason": REASONS[beam.reason], "stop_reason": beam.stop}
                if asked.has_token_ids:
                    more["token_ids"] = [*beam.tokens]
                choices.append(self._choice(first + place, beam.text, "null", more))
            return choices
        reason = reason_of(REASONS[end.reason], has_calls=bool(found.calls), stop=end.stop)
        more = {"finish_reason": reason, "stop_reason": end.stop}
        if asked.has_token_ids:
            more["token_ids"] = found.token_ids
        if asked.has_trace or asked.has_provenance:
            more["outrider"] = self._outrider(prompt, sample, found, end)
        logprobs = "null" if found.logprobs is None else found.logprobs.json()
        parts: dict[str, Any] = {}
        if reasoning := "".join(found.reasoning):
            parts["reasoning_content"] = reasoning
        if found.calls:
            parts["tool_calls"] = found.calls
        return [self._choice(first + sample, "".join(found.texts), logprobs, more, parts)]

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: str,
        more: Mapping[str, Any],
        parts: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        content = None if parts.get("tool_calls") and not text else text
        message = {"role": "assistant", "content": content, "refusal": None, **parts}
        said = {"message": message} if self._asked.is_chat else {"text": text}
        return _object({"index": index, **said}, f'"logprobs":{logprobs}', more)

    def _outrider(
        self, prompt: int, sample: int, found: CompletionBuffer, end: Finished
    ) -> dict[str, Any]:
        seed = sample_seed(self._specs[prompt].seed, sample)
        value: dict[str, Any] = {"speculation": report_of(end, seed)}
        if self._asked.has_trace:
            value["steps"] = steps_of(found.steps, self._header.token_text)
        if self._asked.has_provenance:
            value["tokens"] = found.provenance
        return value


def _object(header: Mapping[str, Any], member: str, tail: Mapping[str, Any]) -> str:
    """Return the JSON of an object with a member that is JSON already; ``header`` and ``tail`` have some each."""
    return f"{json_text(header)[:-1]},{member},{json_text(tail)[1:]}"
