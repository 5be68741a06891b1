"""What has come of one completion of a whole answer.

Log-probabilities are made JSON as tokens come: a long answer's together would take the event loop a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.runtime.core.events import Finished, StepTrace
from outrider.runtime.serving.http.openai.response_json import (
    TextPlaces,
    Tokens,
    call_json,
    chat_logprobs,
    completion_logprobs,
)
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.http.responses import json_text
from outrider.runtime.serving.response_stream import Batch


class Logprobs:
    """Log-probabilities as JSON, of a completion or of the prompt that it begins with.

    Args:
        token_text: of the tokens.
        is_chat: which of OpenAI's shapes they have.
    """

    def __init__(self, token_text: TokenText, *, is_chat: bool) -> None:
        self._token_text = token_text
        self._is_chat = is_chat
        self._places = TextPlaces()
        # By name: the elements of a list, some in each text.
        self._lists: dict[str, list[str]] = {}
        self.add(())

    def add(self, tokens: Tokens) -> None:
        """Add what has come."""
        if self._is_chat:
            found = {"content": chat_logprobs(tokens, self._token_text)["content"]}
        else:
            found = completion_logprobs(tokens, self._token_text, self._places)
        for name, values in found.items():
            texts = self._lists.setdefault(name, [])
            if values:
                texts.append(json_text(values)[1:-1])

    def copy(self) -> Logprobs:
        """Return another one that begins with what this one has."""
        copied = Logprobs(self._token_text, is_chat=self._is_chat)
        copied._places = self._places.copy()
        copied._lists = {name: [*texts] for name, texts in self._lists.items()}
        return copied

    def json(self) -> str:
        """Return the object of all that was added."""
        lists = [f'"{name}":[{",".join(texts)}]' for name, texts in self._lists.items()]
        if self._is_chat:
            lists.append('"refusal":null')
        return f"{{{','.join(lists)}}}"


@dataclass(slots=True)
class CompletionBuffer:
    """One completion; of what is not asked for, nothing.

    Attributes:
        texts: whose joined text is the completion's; likewise ``reasoning``.
        calls: as JSON values.
        provenance: where its tokens came from, as JSON values.
        logprobs: None where no token has come.
    """

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    provenance: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    logprobs: Logprobs | None = None
    end: Finished | None = None

    def add_parts(self, batch: Batch) -> None:
        """Add what of a batch stands apart from its text."""
        self.reasoning.append(batch.reasoning)
        for piece in batch.calls:
            if piece.name:
                self.calls.append(call_json(piece))
            else:
                self.calls[-1]["function"]["arguments"] += piece.arguments
