"""What a response consists of: messages, reasoning and calls, each with the events that say how it comes."""

from __future__ import annotations

from typing import Any

from outrider.runtime.serving.response_stream import Batch

Event = dict[str, Any]
# Of an item with text: what its id begins with, the type of its part, and fields of that part beside the text.
_TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("msg", "output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("rs", "reasoning_text", {}),
}


class OutputItems:
    """Puts the output of a response together.

    Args:
        name: of the response, which ids of items end with.

    Attributes:
        items: as JSON values; the last one may be in progress.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.items: list[dict[str, Any]] = []

    def add(self, batch: Batch, text: str) -> list[Event]:
        """Return the events of a batch whose content is ``text``."""
        events = []
        for kind, delta in (("reasoning", batch.reasoning), ("message", text)):
            if delta:
                events += self._add_text(kind, delta)
        for piece in batch.calls:
            if piece.name:
                events += self._open(
                    "function_call", "fc", call_id=piece.id, name=piece.name, arguments=""
                )
            else:
                self.items[-1]["arguments"] += piece.arguments
                event = "response.function_call_arguments.delta"
                events.append(self._event(event, delta=piece.arguments))
        return events

    def end(self, status: str) -> list[Event]:
        """Return the events at the end; an output without items gets an empty message."""
        events = [] if self.items else self._add_text("message", "")
        return events + self._close(status)

    def _add_text(self, kind: str, delta: str) -> list[Event]:
        prefix, part_type, more = _TEXTS[kind]
        events = []
        item = self.items[-1] if self.items else {}
        if item.get("type") != kind:
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self._open(kind, prefix, **fields, content=[])
            item = self.items[-1]
            part = {"type": part_type, "text": "", **more}
            events.append(self._event("response.content_part.added", content_index=0, part=part))
            item["content"].append({**part})
        item["content"][0]["text"] += delta
        event = f"response.{part_type}.delta"
        return [*events, self._text_event(event, delta=delta)]

    def _open(self, kind: str, prefix: str, **fields: Any) -> list[Event]:
        """Begin an item, behind the end of the one before."""
        events = self._close("completed") if self.items else []
        item_id = f"{prefix}_{len(self.items)}_{self._name}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        added = {**item, "content": []} if "content" in item else {**item}
        return [*events, {**self._place("response.output_item.added"), "item": added}]

    def _close(self, status: str) -> list[Event]:
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], "response.function_call_arguments.done"
            events = [self._event(name, arguments=arguments, name=item["name"])]
        else:
            part = item["content"][0]
            events = [
                self._text_event(f"response.{part['type']}.done", text=part["text"]),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, {**self._place("response.output_item.done"), "item": item}]

    def _text_event(self, kind: str, **fields: Any) -> Event:
        logprobs: dict[str, Any] = {"logprobs": []} if self.items[-1]["type"] == "message" else {}
        return self._event(kind, content_index=0, **fields, **logprobs)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {**self._place(kind), "item_id": self.items[-1]["id"], **fields}

    def _place(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1}
