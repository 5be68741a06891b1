"""Whole answers: what is made JSON as tokens come, and what is left for the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from outrider import build_request
from outrider.engines.sampling.base import TokenLogprobs
from outrider.runtime.core.events import (
    EmittedToken,
    Finished,
    FinishReason,
    PromptToken,
    Provenance,
)
from outrider.runtime.core.stats import SpeculationStats
from outrider.runtime.serving.http.openai import whole
from outrider.runtime.serving.http.openai.fields import CompletionRequest
from outrider.runtime.serving.http.openai.prompt_request import ResponseHeader
from outrider.runtime.serving.http.openai.response_json import (
    TextPlaces,
    chat_logprobs,
    completion_logprobs,
)
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.response_stream import Batch

from tests.runtime.conftest import LetterCodec
from tests.runtime.markov import spec

NUM_BATCHES, PER_BATCH = 50, 4
TOKEN_TEXT = TokenText(LetterCodec())
REPORT = SpeculationStats(max_gamma=0).report(
    drafter="none", mode=None, lenience=1.0, off_reason=None
)
END = Finished(
    reason=FinishReason.LENGTH, stop=None, text="", num_prompt=1, num_output=1, report=REPORT
)


def logprobs_of(token: int) -> TokenLogprobs:
    top = tuple((i, -0.5 - i) for i in range(20))
    return TokenLogprobs(logprob=-float("inf") if token == 3 else -0.25, top=top)


def tokens_of(sample: int, part: int) -> tuple[EmittedToken, ...]:
    ids = ((sample + part * PER_BATCH + i) % 26 for i in range(PER_BATCH))
    return tuple(
        EmittedToken(token=i, provenance=Provenance.BONUS, logprobs=logprobs_of(i)) for i in ids
    )


PROMPT = tuple(PromptToken(token=i, logprobs=logprobs_of(i) if i else None) for i in range(9))


def batch(index: int, part: int, prompt: tuple[PromptToken, ...] = ()) -> Batch:
    end = END if part == NUM_BATCHES - 1 else None
    tokens = tokens_of(index, part)
    return Batch(tokens=tokens, text="", steps=(), end=end, index=index, prompt=prompt)


def shown(tokens: Sequence[EmittedToken | PromptToken], *, is_chat: bool) -> Any:
    if is_chat:
        return chat_logprobs([one for one in tokens if isinstance(one, EmittedToken)], TOKEN_TEXT)
    return completion_logprobs(tokens, TOKEN_TEXT, TextPlaces())


@pytest.mark.parametrize("is_chat", [False, True])
async def test_log_probabilities_are_made_json_as_tokens_come(monkeypatch, is_chat):
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    asked = CompletionRequest(
        requests=(build_request("a", n=2),), is_chat=is_chat, has_logprobs=True
    )
    header = ResponseHeader(id="x", created_s=1, model="letters", token_text=TOKEN_TEXT)
    sink = whole.WholeSink(asked, header, send, {})
    sink.begin(0, spec("x"))
    # A long prompt comes in pieces, before its first token; the other completion begins later.
    await sink.write(0, Batch(tokens=(), text="", steps=(), end=None, prompt=PROMPT[:4]))
    await sink.write(0, batch(0, 0, PROMPT[4:]))
    for part in range(NUM_BATCHES):
        if part:
            await sink.write(0, batch(0, part))
        await sink.write(0, batch(1, part))

    made_at_end: list[int] = []
    json_text = whole.json_text

    def noting(value: object) -> str:
        text = json_text(value)
        made_at_end.append(len(text))
        return text

    monkeypatch.setattr(whole, "json_text", noting)
    await sink.end()
    assert max(made_at_end) < 500 < len(b"".join(sent)) // 100
    choices = json.loads(b"".join(sent), parse_constant=pytest.fail)["choices"]
    for index, choice in enumerate(choices):
        tokens = [token for part in range(NUM_BATCHES) for token in tokens_of(index, part)]
        assert choice["logprobs"] == shown([*PROMPT, *tokens], is_chat=is_chat)
