"""What a completion has answered so far, and the tensors that show it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve.tensors import BYTES, UINT32, add_counts, add_texts
from outrider.runtime.core.events import BeamAnswer, EmittedToken, Finished, FinishReason
from outrider.runtime.serving.response_stream import Batch
from outrider.runtime.serving.tokenizer import TextCodec

TEXT_OUTPUT = "text_output"
LOGPROBS = "logprobs"
# JSON has no infinity; vLLM's value for what cannot occur.
_LEAST = -9999.0
# As vLLM calls them.
REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(slots=True, kw_only=True)
class Answer:
    """One completion, or what has come of it since the last message.

    Attributes:
        texts: whose joined text is the completion's.
        logprobs: JSON of each token's log-probabilities, where they are shown; made as tokens come, since a long
            answer's together would take the event loop seconds.
        reason: of vLLM's words; empty while the completion goes on.
        num_drafted: draft tokens, once the completion has ended.
        num_accepted: those of them that it has.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    reason: str = ""
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, batch: Batch, codec: TextCodec | None) -> None:
        """Add what has come; with log-probabilities where there is a codec to show them."""
        self.texts.append(batch.text)
        self.token_ids += [token.token for token in batch.tokens]
        if codec is not None:
            self.logprobs += [_logprobs(token, codec) for token in batch.tokens if token.logprobs]
        if isinstance(end := batch.end, Finished):
            self.texts.append(end.text)
            self.reason = REASONS[end.reason]
            self.num_drafted, self.num_accepted = end.report.num_drafted, end.report.num_accepted


def answer_of(beam: BeamAnswer, report: Answer, echo_prefix: str) -> Answer:
    """Return a completion that a beam search found, behind ``echo_prefix``, with the figures of the whole search."""
    return Answer(
        texts=[echo_prefix, beam.text],
        token_ids=[*beam.tokens],
        reason=REASONS[beam.reason],
        num_drafted=report.num_drafted,
        num_accepted=report.num_accepted,
    )


_TEXTS: Mapping[str, Callable[[Answer], str]] = {
    TEXT_OUTPUT: lambda answer: "".join(answer.texts),
    "finish_reason": lambda answer: answer.reason,
    LOGPROBS: lambda answer: f"[{', '.join(answer.logprobs)}]" if answer.logprobs else "null",
}
_COUNTS: Mapping[str, Callable[[Answer], Sequence[int]]] = {
    "token_ids": lambda answer: answer.token_ids,
    "num_output_tokens": lambda answer: [len(answer.token_ids)],
    "num_drafted_tokens": lambda answer: [answer.num_drafted],
    "num_accepted_tokens": lambda answer: [answer.num_accepted],
}
NUM_INPUT_TOKENS = "num_input_tokens"
OUTPUTS: Mapping[str, str] = {
    **dict.fromkeys(_TEXTS, BYTES),
    **dict.fromkeys(_COUNTS, UINT32),
    NUM_INPUT_TOKENS: UINT32,
}
"""Datatypes of the tensors that can be asked for, by name."""


def add_outputs(
    response: oip.ModelInferResponse,
    names: Sequence[str],
    answers: Sequence[Answer],
    num_input_tokens: int,
) -> None:
    """Add tensors that show some completions: of each an element, or of ``token_ids`` all one after another."""
    for name in names:
        if name in _TEXTS:
            add_texts(response, name, [_TEXTS[name](answer) for answer in answers])
        elif name in _COUNTS:
            counts = [count for answer in answers for count in _COUNTS[name](answer)]
            add_counts(response, name, counts)
        else:
            add_counts(response, name, [num_input_tokens])


def _logprobs(token: EmittedToken, codec: TextCodec) -> str:
    """Return a token and its alternatives by id, as Triton writes them."""
    assert token.logprobs is not None  # others are left out

    def entry(i: int, logprob: float) -> dict[str, object]:
        text = codec.decode((i,), skip_special_tokens=False)
        return {"logprob": max(logprob, _LEAST), "decoded_token": text}

    found = {token.token: entry(token.token, token.logprobs.logprob)}
    found |= {i: entry(i, logprob) for i, logprob in token.logprobs.top}
    return json.dumps(found)
