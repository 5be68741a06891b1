"""One step of all live requests: plan -> run -> judge -> commit.

The only code that meets both the target and the drafters. Whatever a drafter does, its request goes
on; whatever the target does wrong ends the requests it was doing it for, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.base import Engine, EngineError, Span
from engines.laws import Sampler, SamplingRow, Verdict
from runtime.core.params import Progressed
from runtime.core.request import Ending, Request
from runtime.core.scheduler import Prefill, StepLimits, StepPlan, decode_spans, plan_step
from runtime.drafters.base import Draft, Drafter, DraftRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step runs on.

    Attributes:
        drafters: by registry name.
    """

    target: Engine
    sampler: Sampler
    drafters: Mapping[str, Drafter]
    limits: StepLimits


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        progressed: requests that emitted, and their ending if that was it.
        failed: requests the engine could not serve, each with the error; None means its logits
            were not finite.
        degraded: the draft model's error, when it failed in this step.
    """

    progressed: list[tuple[Request, Progressed, Ending | None]] = field(default_factory=list)
    failed: list[tuple[Request, EngineError | None]] = field(default_factory=list)
    degraded: EngineError | None = None


def run_step(parts: StepParts, live: Sequence[Request]) -> StepResult:
    """Run one step.

    Args:
        parts: what to run on.
        live: at least one request, request i holding slot i.

    Returns:
        What happened; requests that ended keep their slot until the caller frees it.
    """
    result = StepResult()
    plan = plan_step(live, parts.limits)
    if plan.prefill is not None and not _prefill(parts, plan.prefill, live, result):
        return result
    if not plan.has_decode:
        return result
    drafts = _draft(parts, plan, live, result)
    fed = [_fed(request, draft) for request, draft in zip(live, drafts, strict=True)]
    rows = [
        _sampling_row(request, draft)
        for request, draft in zip(live, drafts, strict=True)
        if draft is not None
    ]
    try:
        spans = decode_spans([request.num_computed for request in live], fed)
        verdicts = parts.sampler.judge(parts.target.extend(spans), rows)
    except EngineError as error:
        result.failed.extend((request, error) for request in live)
        return result
    for row, verdict in zip(rows, verdicts, strict=True):
        draft = drafts[row.slot]
        assert draft is not None
        _commit(live[row.slot], draft, verdict, result)
    return result


def _prefill(
    parts: StepParts, prefill: Prefill, live: Sequence[Request], result: StepResult
) -> bool:
    request = live[prefill.slot]
    start, end = request.num_computed, request.num_computed + prefill.length
    tokens = tuple(request.history[start:end].tolist())
    try:
        parts.target.extend([Span(slot=prefill.slot, start=start, tokens=tokens, num_logits=0)])
    except EngineError as error:
        result.failed.append((request, error))
        return False
    request.commit_prefill(end)
    return True


def _draft(
    parts: StepParts, plan: StepPlan, live: Sequence[Request], result: StepResult
) -> list[Draft | None]:
    """A draft, possibly empty, per decoding row; None for the others."""
    drafts = [None if gamma is None else Draft(tokens=()) for gamma in plan.gammas]
    chosen: dict[str, list[int]] = {}
    for slot, gamma in enumerate(plan.gammas):
        if gamma:
            chosen.setdefault(live[slot].speculation.drafter, []).append(slot)
    if not chosen:
        return drafts
    rows = [
        DraftRow(
            sampling=_sampling_row(request, Draft(tokens=())),
            gamma=gamma or 0,
            num_computed=request.draft_computed,
        )
        for request, gamma in zip(live, plan.gammas, strict=True)
    ]
    for name, slots in chosen.items():
        try:
            proposed = parts.drafters[name].propose(rows, slots)
        except EngineError as error:
            result.degraded = error
            _degrade(live, slots)
            continue
        for slot, draft in zip(slots, proposed, strict=True):
            drafts[slot] = draft
    return drafts


def _degrade(live: Sequence[Request], slots: Sequence[int]) -> None:
    """Rows the draft model failed for go on plainly; its caches of all live rows are lost."""
    for request in live:
        request.commit_draft_cache(0)
    for slot in slots:
        live[slot].degrade()


def _fed(request: Request, draft: Draft | None) -> tuple[int, ...] | None:
    """The last committed token, whose keys are missing, and the draft."""
    return None if draft is None else (int(request.history[-1]), *draft.tokens)


def _sampling_row(request: Request, draft: Draft) -> SamplingRow:
    assert request.slot is not None
    spec = request.spec
    return SamplingRow(
        index=request.slot,
        slot=request.slot,
        law=spec.law,
        mode=spec.speculation.mode,
        lenience=spec.speculation.lenience,
        seed=spec.seed,
        history=request.history,
        num_prompt=request.num_prompt,
        draft_tokens=draft.tokens,
        is_sampled_draft=draft.is_sampled,
        num_logprobs=spec.num_logprobs,
    )


def _commit(request: Request, draft: Draft, verdict: Verdict, result: StepResult) -> None:
    if verdict.next_token is None:
        result.failed.append((request, None))
        return
    progressed, ending = request.commit(draft.tokens, verdict)
    if draft.num_computed is not None:
        # Drafts that were rejected, or fed by nobody, leave the valid prefix of the draft's cache.
        request.commit_draft_cache(draft.num_computed)
    result.progressed.append((request, progressed, ending))
