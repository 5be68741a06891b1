"""Between the messages of ``outrider.v1`` and the runtime's own values; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from outrider.v1 import inference_pb2 as wire

from engines.laws import ExactnessMode, SamplingLaw
from runtime.core.errors import MalformedRequest, RequestError
from runtime.core.options import ALL_VALUES
from runtime.core.params import (
    BeamAnswer,
    BeamParams,
    EmittedToken,
    Finished,
    FinishReason,
    Provenance,
    SpeculationParams,
    SpeculationReport,
    StepTrace,
)
from runtime.core.validate import GenerateFields

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
}


def parse(kind: type[M], data: bytes) -> M:
    """A message from its bytes.

    Raises:
        MalformedRequest: they are not one.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedRequest from error


def fields_of(request: wire.GenerateRequest) -> GenerateFields:
    """The request's values with defaults filled in, unchecked.

    Raises:
        RequestError: the exactness mode is not one that this version knows.
    """
    prompt = request.WhichOneof("prompt")
    beams = _beams(request)
    return GenerateFields(
        text=request.text if prompt == "text" else None,
        tokens=tuple(request.tokens.ids) if prompt == "tokens" else None,
        request_id=request.request_id,
        model=request.model,
        # A beam search draws nothing: what is left out is no wish to draw.
        law=_law(request.sampling, 1.0 if beams is None else 0.0),
        bad_words=tuple(request.sampling.bad_words),
        seed=_optional(request.sampling, "seed", None),
        max_tokens=_optional(request, "max_tokens", None),
        stop_strings=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        num_logprobs=_optional(request, "logprobs", None),
        skip_special_tokens=_optional(request, "skip_special_tokens", True),
        speculation=_speculation(request.speculation),
        beams=beams,
        options=_options(request),
    )


def add_tokens(
    response: wire.GenerateResponse, tokens: Sequence[EmittedToken], has_provenance: bool
) -> None:
    """Append tokens of the answer; made in their place, which takes half the time of copies."""
    add = response.tokens.add
    for token in tokens:
        message = add(id=token.token)
        if has_provenance:
            message.provenance = PROVENANCES[token.provenance]
        if token.logprobs is not None:
            message.logprob = token.logprobs.logprob
            for i, value in token.logprobs.top:
                message.top.add(id=i, logprob=value)


def step_of(step: StepTrace, drafted_text: list[str], next_text: str) -> wire.Step:
    """One pass of the target."""
    return wire.Step(
        drafted=step.draft_tokens,
        num_accepted=step.num_accepted,
        next_token=step.next_token,
        drafted_text=drafted_text,
        next_text=next_text,
    )


def finish_of(end: Finished, seed: int, request_id: str) -> wire.Finish:
    """The last response's account of the completion."""
    return wire.Finish(
        reason=REASONS[end.reason],
        stop_string=end.stop if isinstance(end.stop, str) else None,
        stop_token=end.stop if isinstance(end.stop, int) else None,
        usage=wire.Usage(prompt_tokens=end.num_prompt, output_tokens=end.num_output),
        speculation=_report(end.report),
        seed=seed,
        request_id=request_id,
        beams=[_beam(answer) for answer in end.beams],
    )


def _beams(request: wire.GenerateRequest) -> BeamParams | None:
    num_beams = _optional(request, "num_beams", 1)
    if num_beams == 1:
        return None
    return BeamParams(
        num_beams=num_beams,
        num_results=_optional(request, "n", 1),
        length_penalty=_optional(request, "length_penalty", 1.0),
        stops_early=request.early_stopping,
        is_exhaustive=request.exhaustive_search,
        width=_optional(request.speculation, "beam_width", 0),
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


def _law(sampling: wire.Sampling, default_temperature: float) -> SamplingLaw:
    return SamplingLaw(
        temperature=_optional(sampling, "temperature", default_temperature),
        top_k=sampling.top_k,
        top_p=_optional(sampling, "top_p", 1.0),
        min_p=sampling.min_p,
        repetition_penalty=_optional(sampling, "repetition_penalty", 1.0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        min_tokens=sampling.min_tokens,
    )


def _speculation(speculation: wire.Speculation) -> SpeculationParams:
    if speculation.mode not in MODES:
        raise RequestError("speculation.mode", "must be a known mode")
    return SpeculationParams(
        is_enabled=_optional(speculation, "enabled", True),
        drafter=speculation.drafter or None,
        gamma=_optional(speculation, "gamma", None),
        is_adaptive=_optional(speculation, "adaptive", None),
        mode=MODES[speculation.mode],
        lenience=_optional(speculation, "lenience", 1.0),
        verifies_block=_optional(speculation, "block_verification", None),
        phrase_length=_optional(speculation, "phrase_length", None),
        num_phrases=_optional(speculation, "num_phrases", None),
        window=_optional(speculation, "window", None),
        branching=tuple(speculation.branching),
        reference=speculation.reference,
    )


def _report(report: SpeculationReport) -> wire.SpeculationReport:
    return wire.SpeculationReport(
        is_on=report.is_on,
        off_reason=report.off_reason or "",
        drafter=report.drafter,
        mode=WIRE_MODES[report.mode],
        lenience=report.lenience,
        num_steps=report.num_steps,
        num_drafted=report.num_drafted,
        num_accepted=report.num_accepted,
        alpha_hat=report.alpha_hat,
        draft_utilization=report.draft_utilization,
        tokens_per_step=report.tokens_per_step,
        accepted_by_position=report.accepted_by_position,
        drafted_by_position=report.drafted_by_position,
        num_fallbacks=report.num_fallbacks,
        num_off=report.num_off,
        block_verification=report.verifies_block,
        is_exact=report.mode is not ExactnessMode.LENIENT,
    )


def _options(request: wire.GenerateRequest) -> dict[str, object]:
    """Those of ``ALL_VALUES`` that were given, by name."""
    given = {field.name: value for field, value in request.ListFields()}
    if nested := given.get("speculation"):
        given |= {f"speculation.{field.name}": value for field, value in nested.ListFields()}
    return {path: given[path] for path in ALL_VALUES if path in given}


def _optional(message: Message, name: str, default: object) -> Any:
    """Value of a field, or the default where presence says that it was left out."""
    if _has_presence(message.DESCRIPTOR, name) and not message.HasField(name):
        return default
    return getattr(message, name)


@cache
def _has_presence(kind: Descriptor, name: str) -> bool:
    """Whether a field says that it was left out; a descriptor is slow to ask."""
    return bool(kind.fields_by_name[name].has_presence)
