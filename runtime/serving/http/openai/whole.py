"""The sink of a whole answer: gathers what comes, and sends it when everything has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.events import EmittedToken, Finished, PromptToken, StepTrace
from outrider.runtime.core.params import RequestSpec, sample_seed
from outrider.runtime.serving.http.answers import JSON, answer, answer_error, json_bytes
from outrider.runtime.serving.http.openai.call import Head, choices_per_prompt
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.shapes import (
    REASONS,
    chat_logprobs,
    completion_logprobs,
    provenance_of,
    report_of,
    steps_of,
)
from outrider.runtime.serving.http.openai.usage import Tally, metrics_of
from outrider.runtime.serving.outbox import Batch
from starlette.types import Send


@dataclass(slots=True)
class _Gathered:
    """What has come of one completion."""

    texts: list[str] = field(default_factory=list)
    prompt: list[PromptToken] = field(default_factory=list)
    tokens: list[EmittedToken] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    end: Finished | None = None


class WholeSink:
    """Answers one HTTP request at its end."""

    def __init__(
        self, asked: CompletionRequest, head: Head, send: Send, headers: Mapping[bytes, bytes]
    ) -> None:
        self._asked = asked
        self._head = head
        self._send = send
        self._headers = [JSON, *headers.items()]
        self._per_prompt = choices_per_prompt(asked)
        self._specs: dict[int, RequestSpec] = {}
        self._gathered: dict[tuple[int, int], _Gathered] = {}
        self._tally = Tally()

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that a prompt is in the queue."""
        self._specs[prompt] = spec
        self._tally.begin(prompt, spec.num_prompt_tokens)

    async def write(self, prompt: int, batch: Batch) -> None:
        """Keep a batch."""
        found = self._gathered.setdefault((prompt, batch.index), _Gathered())
        found.texts.append(batch.text)
        found.prompt += batch.prompt
        found.tokens += batch.tokens
        found.steps += batch.steps
        self._tally.num_output += len(batch.tokens)
        if isinstance(batch.end, Finished):
            found.texts.append(batch.end.text)
            found.end = batch.end
            self._tally.finish(prompt, batch.end)

    async def ping(self) -> None:
        """Do nothing: a whole answer has one status, which is not known yet."""

    async def end(self) -> None:
        """Send the answer."""
        choices, metrics = [], {"speculative_decoding": None}
        for (prompt, sample), found in sorted(self._gathered.items()):
            choices += self._choices(prompt, sample, found)
        if len(choices) == 1 and (end := found.end) is not None and not end.beams:
            metrics = metrics_of(end.report, found.steps if self._asked.has_trace else None)
        head, is_chat = self._head, self._asked.is_chat
        value = {
            "id": head.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
            "choices": choices,
            "usage": self._tally.usage(),
            "metrics": metrics,
        }
        await answer(json_bytes(value), self._send, headers=self._headers)

    async def fail(self, error: ServingError) -> None:
        """Send an error as the answer."""
        await answer_error(error, self._send, self._headers[1:])

    def _choices(self, prompt: int, sample: int, found: _Gathered) -> list[dict[str, Any]]:
        first, end = prompt * self._per_prompt, found.end
        assert end is not None
        if end.beams:
            return [
                self._choice(first + place, beam.text, REASONS[beam.reason], beam.stop)
                | ({"token_ids": [*beam.tokens]} if self._asked.has_token_ids else {})
                for place, beam in enumerate(end.beams)
            ]
        text = "".join(found.texts)
        choice = self._choice(first + sample, text, REASONS[end.reason], end.stop)
        if self._asked.has_logprobs:
            choice["logprobs"] = self._logprobs(prompt, found)
        if self._asked.has_token_ids:
            choice["token_ids"] = [one.token for one in found.tokens]
        if self._asked.has_trace or self._asked.has_provenance:
            choice["outrider"] = self._outrider(prompt, sample, found, end)
        return [choice]

    def _choice(self, index: int, text: str, reason: str, stop: str | int | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if self._asked.is_chat else {"text": text}
        more = {"logprobs": None, "finish_reason": reason, "stop_reason": stop}
        return {"index": index, **said, **more}

    def _logprobs(self, prompt: int, found: _Gathered) -> dict[str, Any]:
        spelling = self._head.spelling
        if self._asked.is_chat:
            return chat_logprobs(found.tokens, spelling)
        value: dict[str, Any]
        # Of several completions the first alone is told the prompt's; the text of all begins with it.
        echoed = self._gathered[prompt, 0].prompt
        value, _ = completion_logprobs([*echoed, *found.tokens], spelling, 0)
        return value

    def _outrider(
        self, prompt: int, sample: int, found: _Gathered, end: Finished
    ) -> dict[str, Any]:
        seed = sample_seed(self._specs[prompt].seed, sample)
        value: dict[str, Any] = {"speculation": report_of(end, seed)}
        if self._asked.has_trace:
            value["steps"] = steps_of(found.steps, self._head.spelling)
        if self._asked.has_provenance:
            value["tokens"] = provenance_of(found.tokens)
        return value
