"""Parts of answers as JSON values: log-probabilities in both of OpenAI's shapes, passes of the target, ends."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from outrider.engines.sampling.base import TokenLogprobs
from outrider.runtime.core.events import (
    EmittedToken,
    Finished,
    FinishReason,
    PromptToken,
    StepTrace,
)
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.response_stream import CallPiece

REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
_LEAST = -9999.0
"""JSON has no infinity; vLLM's value for what cannot occur."""

# Of UTF-8: the bits that say which bytes follow the first of a character.
_KIND, _FOLLOWING = 0b1100_0000, 0b1000_0000

Tokens = Sequence[EmittedToken | PromptToken]


class TextPlaces:
    """Where the tokens of one completion begin in its text, in characters; those of one character all where it does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, parts: bytes) -> int:
        """Return where the next token begins, of these bytes."""
        is_within, _ = self._decoder.getstate()
        begins = bool(parts) and parts[0] & _KIND != _FOLLOWING
        # A character that its bytes leave unfinished is one of its own in the text.
        place = self._num_characters + bool(is_within and begins)
        self._num_characters += len(self._decoder.decode(parts))
        return place

    def copy(self) -> TextPlaces:
        """Return another one that has come as far."""
        copied = TextPlaces()
        copied._decoder.setstate(self._decoder.getstate())
        copied._num_characters = self._num_characters
        return copied


def completion_logprobs(tokens: Tokens, token_text: TokenText, places: TextPlaces) -> Any:
    """Return the log-probabilities of a completion's next tokens, which take their places.

    The token itself is among the likeliest, with the same
    number, so that it can be seen whether it is the first of them. Of several with one text, the likeliest counts.
    """
    return {
        "tokens": [token_text.text(one.token) for one in tokens],
        "token_logprobs": [_own(one.logprobs) for one in tokens],
        "top_logprobs": [_top(one.token, one.logprobs, token_text) for one in tokens],
        "text_offset": [places.next(bytes(token_text.bytes_of(one.token))) for one in tokens],
    }


def chat_logprobs(tokens: Tokens, token_text: TokenText) -> dict[str, Any]:
    """Return the log-probabilities of a message's tokens."""
    content = []
    for one in tokens:
        if (logprobs := one.logprobs) is None:
            continue
        entry = _entry(one.token, logprobs.logprob, token_text)
        entry["top_logprobs"] = [_entry(i, value, token_text) for i, value in logprobs.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def call_json(piece: CallPiece) -> dict[str, Any]:
    """Return the first piece of a call; whole answers add the others' arguments."""
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.id, "type": "function", "function": function}


def call_delta(piece: CallPiece) -> dict[str, Any]:
    """Return a piece of a call as a stream has it."""
    if piece.name:
        return {"index": piece.index, **call_json(piece)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def reason_of(reason: str, *, has_calls: bool, stop: str | int | None) -> str:
    """Return why a completion ended, of ``REASONS``, where it may have called tools; a stop string may cut a call."""
    is_called = has_calls and reason == "stop" and not isinstance(stop, str)
    return "tool_calls" if is_called else reason


def steps_of(steps: Sequence[StepTrace], token_text: TokenText) -> list[dict[str, Any]]:
    """Return passes of the target: what was drafted, and how it was judged."""
    text = token_text.text
    return [
        {
            "gamma": len(step.draft_tokens),
            "drafted_text": [text(token) for token in step.draft_tokens],
            "num_accepted": step.num_accepted,
            "next_text": "" if step.next_token is None else text(step.next_token),
            "forced_text": [text(token) for token in step.forced],
            "is_prompt": step.is_prompt,
        }
        for step in steps
    ]


def provenance_of(tokens: Sequence[EmittedToken]) -> list[dict[str, Any]]:
    """Return where tokens came from."""
    return [{"id": one.token, "provenance": one.provenance} for one in tokens]


def report_of(end: Finished, seed: int) -> dict[str, Any]:
    """Return a completion's figures; names as in ``outrider.v1.SpeculationReport``."""
    report = end.report
    return {
        "seed": seed,
        "drafter": report.drafter,
        "mode": report.mode,
        "is_on": report.is_on,
        "off_reason": report.off_reason,
        "num_steps": report.num_steps,
        "num_drafted": report.num_drafted,
        "num_accepted": report.num_accepted,
        "num_forced": report.num_forced,
        "alpha_hat": report.alpha_hat,
        "draft_utilization": report.draft_utilization,
        "tokens_per_step": report.tokens_per_step,
    }


def _own(logprobs: TokenLogprobs | None) -> float | None:
    return None if logprobs is None else max(logprobs.logprob, _LEAST)


def _top(
    token: int, logprobs: TokenLogprobs | None, token_text: TokenText
) -> dict[str, float] | None:
    if logprobs is None:
        return None
    found: dict[str, float] = {}
    for index, value in (*logprobs.top, (token, logprobs.logprob)):
        found.setdefault(token_text.text(index), max(value, _LEAST))
    return found


def _entry(token: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    return {
        "token": token_text.text(token),
        "logprob": max(logprob, _LEAST),
        "bytes": token_text.bytes_of(token),
    }
