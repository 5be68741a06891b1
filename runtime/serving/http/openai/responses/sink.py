"""The sink of ``/v1/responses``: one response as a JSON object, or as events that end with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.events import Finished, FinishReason
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.http.openai.event_sender import EventSender
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.prompt_request import ResponseHeader
from outrider.runtime.serving.http.openai.responses.output_items import Event, OutputItems
from outrider.runtime.serving.http.openai.usage import UsageCounter
from outrider.runtime.serving.http.responses import JSON, answer, answer_error, json_bytes
from outrider.runtime.serving.response_stream import Batch
from starlette.types import Send


class ResponseSink:
    """Answers one request of ``/v1/responses``."""

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
        self._items = OutputItems(header.id.removeprefix("resp_"))
        self._usage = UsageCounter()
        self._end: Finished | None = None
        self._num_events = 0

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """Note that the prompt is in the queue."""
        self._usage.begin(prompt, spec.num_prompt_tokens)

    async def write(self, prompt: int, batch: Batch) -> None:
        """Send the events of a batch, or keep what it says."""
        self._usage.add(batch)
        text = batch.text
        if isinstance(batch.end, Finished):
            self._end, text = batch.end, text + batch.end.text
            self._usage.finish(prompt, batch.end)
        await self._tell(self._items.add(batch, text))

    async def ping(self) -> None:
        """Send a comment, where nothing has been sent."""
        if self._asked.streams and not self._num_events:
            await self._sender.ping()

    async def end(self) -> None:
        """Send the response."""
        assert self._end is not None
        is_cut = self._end.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        await self._tell(self._items.end(status))
        response = self._response(status)
        if self._asked.streams:
            await self._tell([{"type": f"response.{status}", "response": response}], is_last=True)
        else:
            await answer(json_bytes(response), self._send, headers=[JSON, *self._headers.items()])

    async def fail(self, error: ServingError) -> None:
        """Send an error as the answer, or as the last event of one that has begun."""
        if not await self._sender.start():
            await answer_error(error, self._send, [*self._headers.items()])
            return
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": str(error)}
        await self._tell([{"type": "response.failed", "response": failed}], is_last=True)

    async def _tell(self, events: list[Event], *, is_last: bool = False) -> None:
        """Send events, behind those that a stream begins with."""
        if not self._asked.streams or not events:
            return
        if not self._num_events:
            begun = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            events = [*({"type": kind, "response": begun} for kind in kinds), *events]
        texts = []
        for event in events:
            data = json_bytes({**event, "sequence_number": self._num_events})
            texts.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data))
            self._num_events += 1
        await self._sender.send(b"".join(texts), is_last=is_last)

    def _response(self, status: str) -> dict[str, Any]:
        is_over = status in ("completed", "incomplete")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = self._asked.repeated
        return {
            "id": self._header.id,
            "object": "response",
            "created_at": self._header.created_s,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": self._header.model,
            "output": [] if status == "in_progress" else self._items.items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            **repeated,
            "usage": self._usage.of_response() if is_over else None,
        }
