"""Answers as plain values, in vLLM's shapes: what ``complete`` of the clients and ``LLM.generate`` return."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import grpc

from outrider.errors import ServerFailed
from outrider.v1 import inference_pb2 as wire

# vLLM's words; ``stop_reason`` says which stop it was.
_REASONS = {
    wire.FINISH_REASON_STOP_TOKEN: "stop",
    wire.FINISH_REASON_STOP_STRING: "stop",
    wire.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of tokens; ``cached_tokens`` are those of the prompt that were not computed again."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """Acceptance figures of one answer: the message ``SpeculationReport``.

    Attributes:
        off_reason: why speculation was off or degraded for (part of) the answer; empty when it was on throughout.
        mode: "max_accept", "seed_stable" or "lenient".
        alpha_hat: accepted / trials reached; None without trials.
        draft_utilization: accepted / drafted; None without drafts.
        tokens_per_step: mean tokens per pass of the target; None without passes.
        accepted_by_position: entry i counts passes whose draft token i was accepted.
        drafted_by_position: entry i counts passes that drafted at least i + 1 tokens.
    """

    is_on: bool
    off_reason: str
    drafter: str
    mode: str
    lenience: float
    is_exact: bool
    block_verification: bool
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_forced: int
    num_off: int
    num_fallbacks: int
    alpha_hat: float | None
    draft_utilization: float | None
    tokens_per_step: float | None
    accepted_by_position: list[int]
    drafted_by_position: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass of the target, where ``return_trace`` was asked: the message ``Step``."""

    drafted: list[int]
    num_accepted: int
    next_token: int | None
    drafted_text: list[str]
    next_text: str
    forced: list[int]
    forced_text: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        finish_reason: "stop" or "length".
        stop_reason: the stop string or the stop token that ended it; None where its length did.
        logprobs: per token, natural logarithms by token id: the token's own, and the likeliest ones' where ``logprobs``
            was above 0; None where none were asked.
        cumulative_logprob: sum of the tokens' own; None where none were asked.
        score: what a beam search ranked it by; None without one.
        provenance: per token "accepted", "recovered", "bonus" or "forced", where ``return_provenance`` was asked.
        seed: that was used.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    provenance: list[str] | None = None
    steps: list[Step] | None = None
    speculation: SpeculationReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: ``outputs`` has its completions, ``text`` the first one's.

    Attributes:
        prompt: its text; None where it came as token ids or as messages.
        prompt_token_ids: None where they are not known here: they came as text, and no log-probabilities were asked.
        prompt_logprobs: per token of the prompt as ``CompletionOutput.logprobs``, None for the first; None where none
            were asked.
        usage: of all completions together.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Pieces:
    """What has come of one completion."""

    texts: list[str] = field(default_factory=list)
    tokens: list[wire.Token] = field(default_factory=list)
    steps: list[wire.Step] = field(default_factory=list)
    finish: wire.Finish = field(default_factory=wire.Finish)
    has_ended: bool = False


class OutputBuilder:
    """Puts the messages of a stream together: ``add`` each, then ``output``."""

    def __init__(self, request: wire.GenerateRequest) -> None:
        self._request = request
        self._prompt: list[wire.Token] = []
        self._pieces: dict[int, _Pieces] = {}

    def add(self, response: wire.GenerateResponse) -> None:
        """Take the next message."""
        pieces = self._pieces.setdefault(response.index, _Pieces())
        pieces.texts.append(response.text)
        pieces.tokens.extend(response.tokens)
        pieces.steps.extend(response.steps)
        self._prompt.extend(response.prompt)
        if response.HasField("finish"):
            pieces.finish, pieces.has_ended = response.finish, True

    def output(self) -> RequestOutput:
        """Return the answer; the stream has ended.

        Raises:
            ServerFailed: a completion, or all of it, has no end.
        """
        request, pieces = self._request, sorted(self._pieces.items())
        if not pieces or not all(one.has_ended for _, one in pieces):
            raise ServerFailed(grpc.StatusCode.DATA_LOSS, "the stream ended before the answer did")
        ids = [token.id for token in self._prompt] or list(request.tokens.ids)
        usages = [one.finish.usage for _, one in pieces]
        return RequestOutput(
            request_id=pieces[0][1].finish.request_id if pieces else request.request_id,
            prompt=request.text if request.WhichOneof("prompt") == "text" else None,
            prompt_token_ids=ids or None,
            prompt_logprobs=[_logprobs(one) for one in self._prompt] or None,
            outputs=[
                output for index, one in pieces for output in _outputs(index, one, self._request)
            ],
            usage=Usage(
                prompt_tokens=max((one.prompt_tokens for one in usages), default=0),
                output_tokens=sum(one.output_tokens for one in usages),
                cached_tokens=max((one.cached_tokens for one in usages), default=0),
            ),
        )


def _outputs(index: int, pieces: _Pieces, request: wire.GenerateRequest) -> list[CompletionOutput]:
    """Return one completion, or those that a beam search found."""
    finish = pieces.finish
    report = _report(finish.speculation) if finish.HasField("speculation") else None
    if finish.beams:
        return [
            CompletionOutput(
                index=rank,
                text=beam.text,
                token_ids=list(beam.token_ids),
                finish_reason=_REASONS.get(beam.reason),
                stop_reason=_optional(beam, "stop_token"),
                seed=finish.seed,
                cumulative_logprob=beam.logprob,
                score=beam.score,
                speculation=report,
            )
            for rank, beam in enumerate(finish.beams)
        ]
    stop = finish.WhichOneof("stop")
    logprobs = [one for token in pieces.tokens if (one := _logprobs(token)) is not None]
    has_logprobs = request.HasField("logprobs")
    return [
        CompletionOutput(
            index=index,
            text="".join(pieces.texts),
            token_ids=[token.id for token in pieces.tokens],
            finish_reason=_REASONS.get(finish.reason),
            stop_reason=None if stop is None else getattr(finish, stop),
            seed=finish.seed,
            logprobs=logprobs if has_logprobs else None,
            cumulative_logprob=(
                sum(token.logprob for token in pieces.tokens) if has_logprobs else None
            ),
            provenance=(
                [_name(wire.Provenance, "PROVENANCE_", one.provenance) for one in pieces.tokens]
                if request.return_provenance
                else None
            ),
            steps=[_step(one) for one in pieces.steps] if request.return_trace else None,
            speculation=report,
        )
    ]


def _logprobs(token: wire.Token) -> dict[int, float] | None:
    if not token.HasField("logprob"):
        return None
    return {token.id: token.logprob} | {one.id: one.logprob for one in token.top}


def _report(report: wire.SpeculationReport) -> SpeculationReport:
    mode = _name(wire.ExactnessMode, "EXACTNESS_MODE_", report.mode)
    return SpeculationReport(**_values(report, SpeculationReport) | {"mode": mode})


def _step(step: wire.Step) -> Step:
    return Step(**_values(step, Step))


def _values(message: Any, kind: type) -> dict[str, Any]:
    """Return the fields of a message that a dataclass has, by name: lists, and None for what is absent."""
    found = {}
    for one in fields(kind):
        descriptor = message.DESCRIPTOR.fields_by_name[one.name]
        if descriptor.has_presence:
            found[one.name] = _optional(message, one.name)
        else:
            value = getattr(message, one.name)
            found[one.name] = value if isinstance(value, int | float | str) else list(value)
    return found


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _name(enum: Any, prefix: str, number: int) -> str:
    """Return the short name of a value; the number as text where only newer servers know it."""
    value = enum.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix).lower()
