"""Converts messages of ``outrider.v1`` to the runtime's values and back; makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError, Message
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import MalformedRequest, RequestError, UnsupportedOption
from outrider.runtime.core.events import (
    BeamAnswer,
    EmittedToken,
    Finished,
    FinishReason,
    PromptToken,
    Provenance,
    SpeculationDisabledReason,
    SpeculationReport,
    StepTrace,
)
from outrider.runtime.serving.requests.spec import MODES
from outrider.v1 import inference_pb2 as wire

M = TypeVar("M", bound=Message)

WIRE_MODES = {mode: number for number, mode in MODES.items()}
REASONS = {
    FinishReason.STOP_TOKEN: wire.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: wire.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
}
PROVENANCES = {
    Provenance.ACCEPTED: wire.PROVENANCE_ACCEPTED,
    Provenance.RECOVERED: wire.PROVENANCE_RECOVERED,
    Provenance.BONUS: wire.PROVENANCE_BONUS,
    Provenance.FORCED: wire.PROVENANCE_FORCED,
}
OFF_REASONS = {
    None: wire.OFF_REASON_UNSPECIFIED,
    SpeculationDisabledReason.DISABLED: wire.OFF_REASON_DISABLED,
    SpeculationDisabledReason.NO_DRAFT: wire.OFF_REASON_NO_DRAFT,
    SpeculationDisabledReason.DEGRADED: wire.OFF_REASON_DEGRADED,
    SpeculationDisabledReason.DRAFTER_PAUSED: wire.OFF_REASON_DRAFTER_PAUSED,
    SpeculationDisabledReason.NO_EXPECTED_GAIN: wire.OFF_REASON_NO_EXPECTED_GAIN,
}
MOST_FIELDS = 1 << 14
"""Of a message and those within, a packed list being one. The parser keeps the interpreter, and takes a hundred bytes
of memory for an empty message of two: .5 s for 4 MiB."""
UNCOUNTED = 1 << 16
"""Bytes of a message whose fields are not counted before it is parsed."""
_VARINT, _TEXT = 0, 2
_FIXED = {1: 8, 5: 4}
"""Bytes of a field by its wire type."""
_FIGURES = (
    "is_on", "drafter", "lenience", "num_steps", "num_drafted", "num_accepted", "alpha_hat", "draft_utilization",
    "tokens_per_step", "accepted_by_position", "drafted_by_position", "num_fallbacks", "num_off", "num_forced",
)  # fmt: skip


def parse(kind: type[M], data: bytes) -> M:
    """Return the message of these bytes.

    Raises:
        MalformedRequest: they are no such message, or one of too many fields.
    """
    if len(data) > UNCOUNTED:
        _check_fields(kind, data)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedRequest from error


def _check_fields(kind: type[Message], data: bytes) -> None:
    """Refuse a message of more than ``MOST_FIELDS`` at any depth; what is no message is the parser's to refuse.

    Source: the encoding of protocol buffers; of a group, which is none of ours, the fields count as those around it.
    """
    num_fields, open_ones = 0, [(0, len(data), kind.DESCRIPTOR)]
    try:
        while open_ones:
            at, end, descriptor = open_ones.pop()
            while at < end:
                num_fields += 1
                if num_fields > MOST_FIELDS:
                    raise MalformedRequest(f"a message must have at most {MOST_FIELDS} fields")
                tag, at = _varint(data, at)
                if tag & 7 == _VARINT:
                    _, at = _varint(data, at)
                elif tag & 7 == _TEXT:
                    size, at = _varint(data, at)
                    field = descriptor.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        open_ones.append((at, min(at + size, end), field.message_type))
                    at += size
                else:
                    at += _FIXED.get(tag & 7, 0)
    except IndexError:
        pass


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it.

    Raises:
        IndexError: it has no end.
    """
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise IndexError


def check_tokenize(request: wire.TokenizeRequest, *, has_encoder: bool, max_messages: int) -> None:
    """Refuse options that a text to tokenise, or a chat, cannot have.

    Raises:
        RequestError: naming the field.
    """
    if request.HasField("chat"):
        check_count("chat.messages", request.chat.messages, max_messages)
        for field, _ in request.ListFields():
            if field.name != "chat":
                raise RequestError(field.name, "must be left out with chat")
        return
    for name in ("target", "source_language"):
        if getattr(request, name) and not has_encoder:
            raise UnsupportedOption(name, "needs a model with an encoder; leave it out")
    adds_special = request.add_special_tokens
    if request.target and adds_special:
        raise RequestError("add_special_tokens", "must be false or left out with target")
    has_template = not request.target and (
        adds_special or not request.HasField("add_special_tokens")
    )
    if request.source_language and not has_template:
        raise RequestError("source_language", "needs a source with its special tokens")


def add_tokens(
    field: RepeatedCompositeFieldContainer[wire.Token],
    tokens: Sequence[EmittedToken | PromptToken],
    has_provenance: bool,
) -> None:
    """Append tokens to a field of a response, built in place: half the time of copies."""
    add = field.add
    for token in tokens:
        message = add(id=token.token)
        if has_provenance:
            assert isinstance(token, EmittedToken)
            message.provenance = PROVENANCES[token.provenance]
        if token.logprobs is not None:
            message.logprob = token.logprobs.logprob
            for i, value in token.logprobs.top:
                message.top.add(id=i, logprob=value)


def step_of(step: StepTrace, text_of: Callable[[int], str]) -> wire.Step:
    """Return the message of one pass of the target; ``text_of`` shows a token."""
    return wire.Step(
        drafted=step.draft_tokens,
        num_accepted=step.num_accepted,
        next_token=step.next_token,
        drafted_text=map(text_of, step.draft_tokens),
        next_text="" if step.next_token is None else text_of(step.next_token),
        forced=step.forced,
        forced_text=map(text_of, step.forced),
    )


def finish_of(end: Finished, seed: int, request_id: str) -> wire.Finish:
    """Return the summary of a completion for its last response."""
    return wire.Finish(
        reason=REASONS[end.reason],
        stop_string=end.stop if isinstance(end.stop, str) else None,
        stop_token=end.stop if isinstance(end.stop, int) else None,
        usage=wire.Usage(
            prompt_tokens=end.num_prompt,
            output_tokens=end.num_output,
            cached_tokens=end.num_cached,
        ),
        speculation=report_of(end.report),
        seed=seed,
        request_id=request_id,
        beams=[_beam(answer) for answer in end.beams],
    )


def _beam(answer: BeamAnswer) -> wire.Beam:
    return wire.Beam(
        text=answer.text,
        token_ids=answer.tokens,
        logprob=answer.log_prob,
        score=answer.score,
        reason=REASONS[answer.reason],
        stop_token=answer.stop,
    )


def report_of(report: SpeculationReport) -> wire.SpeculationReport:
    """Return the acceptance figures of a completion; a client of 0.2 or before reads its reason from the string."""
    return wire.SpeculationReport(
        off_reason=report.off_reason or "",
        off_reason_code=OFF_REASONS[report.off_reason],
        mode=WIRE_MODES[report.mode],
        **{name: getattr(report, name) for name in _FIGURES},
        block_verification=report.verifies_block,
        is_exact=report.mode is not ExactnessMode.LENIENT,
    )
