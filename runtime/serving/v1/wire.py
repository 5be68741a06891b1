"""Converts messages of ``outrider.v1`` to the runtime's values and back; makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError, Message
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.options import check_count
from outrider.runtime.core.checks.validate import check_prefix_size, check_prompt_size
from outrider.runtime.core.drafting import MAX_BRANCHING
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
from outrider.runtime.core.params import ChatMessage, ChatParams
from outrider.runtime.serving.generation_defaults import RequestDefaults
from outrider.runtime.serving.v1.fields import Given, generate_fields
from outrider.v1 import inference_pb2 as wire

M = TypeVar("M", bound=Message)

MODES = {
    wire.EXACTNESS_MODE_UNSPECIFIED: ExactnessMode.MAX_ACCEPT,
    wire.EXACTNESS_MODE_MAX_ACCEPT: ExactnessMode.MAX_ACCEPT,
    wire.EXACTNESS_MODE_SEED_STABLE: ExactnessMode.SEED_STABLE,
    wire.EXACTNESS_MODE_LENIENT: ExactnessMode.LENIENT,
}
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
_FIGURES = (
    "is_on", "drafter", "lenience", "num_steps", "num_drafted", "num_accepted", "alpha_hat", "draft_utilization",
    "tokens_per_step", "accepted_by_position", "drafted_by_position", "num_fallbacks", "num_off", "num_forced",
)  # fmt: skip


def parse(kind: type[M], data: bytes) -> M:
    """Return the message of these bytes.

    Raises:
        MalformedRequest: they are no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedRequest from error


def check_counts(request: wire.GenerateRequest, limits: RequestLimits, model: ServedModel) -> None:
    """Refuse lists that are too long, before they are turned into values: that takes .15 s of the loop for 4 MiB.

    Raises:
        RequestError: a list has too many entries; names it.
        ContextTooLong: a prompt or an answer prefix of tokens is too long.
    """
    sampling = request.sampling
    check_count("stop", request.stop, limits.max_stop_strings)
    check_count("stop_token_ids", request.stop_token_ids, limits.max_stop_token_ids)
    check_count("sampling.bad_words", sampling.bad_words, limits.max_bad_words)
    check_count("sampling.logit_bias", sampling.logit_bias, limits.max_logit_bias)
    name = "sampling.allowed_token_ids"
    check_count(name, sampling.allowed_token_ids, limits.max_allowed_token_ids)
    check_count("speculation.branching", request.speculation.branching, MAX_BRANCHING)
    check_count("chat.messages", request.chat.messages, limits.max_messages)
    check_prefix_size("answer_prefix_tokens.ids", len(request.answer_prefix_tokens.ids), 1, model)
    check_prompt_size(len(request.tokens.ids), model)


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


def fields_of(request: wire.GenerateRequest, defaults: RequestDefaults) -> GenerateFields:
    """Return the request's values with defaults filled in, unchecked.

    Raises:
        RequestError: this version does not know the exactness mode, or two forms are asked for.
    """
    fields = _given(request)
    for name in ("tokens", "answer_prefix_tokens"):
        if name in fields:
            fields[name] = tuple(fields[name].ids)
    if "chat" in fields:
        fields["chat"] = chat_of(request.chat)
    speculation = _given(request.speculation)
    if "mode" in speculation:
        if speculation["mode"] not in MODES:
            raise RequestError("speculation.mode", "must be a known mode")
        speculation["mode"] = MODES[speculation["mode"]]
    given = Given(fields=fields, sampling=_given(request.sampling), speculation=speculation)
    return generate_fields(given, defaults)


def chat_of(chat: wire.Chat) -> ChatParams:
    """Return a conversation as it was sent."""
    has_wish = chat.HasField("add_generation_prompt")
    return ChatParams(
        messages=tuple(
            ChatMessage(role=one.role, content=one.content, fields=one.fields_json)
            for one in chat.messages
        ),
        adds_generation_prompt=chat.add_generation_prompt if has_wish else None,
        continues_final=chat.continue_final_message,
        tools=chat.tools_json,
        arguments=chat.template_arguments_json,
        template=chat.template,
    )


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


def _given(message: Message) -> dict[str, Any]:
    """Return the values of the given fields by name; a field without presence is absent at its default.

    One call for all fields, because asking for each is slow.
    """
    return {field.name: value for field, value in message.ListFields()}


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
