"""One step of all live requests: plan -> draft -> run -> judge -> commit.

The only code that meets both the target and the drafters. Whatever a drafter does, its request goes
on; whatever the target does wrong ends the requests it was doing it for, and nothing else: a
failed verification loses the caches of all live rows, but rows still prefilling start over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.engines.base import Engine, EngineError, FloatArray, Span
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.tree_judge import judge as judge_trees
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import plan_step
from outrider.runtime.core.tree import num_leading, tried_chain
from outrider.runtime.drafters.base import Draft
from outrider.runtime.loop.device_step import HOST_STEP, take_round
from outrider.runtime.loop.drafting import NO_DRAFT, Proposals, propose, row_to_judge, tell
from outrider.runtime.loop.parts import StepParts
from outrider.runtime.loop.prefill import NOTHING_FED
from outrider.runtime.loop.result import Progress, StepResult


def run_step(parts: StepParts, live: Sequence[Request]) -> StepResult:
    """Run one step and return what it did; requests that ended keep their slot until the caller frees it.

    ``live`` has at least one request, request i holding slot i.
    """
    rounds, steering, prompts = parts.rounds, parts.steering, parts.prompts
    plan = plan_step(live, parts.limits, has_fed=rounds is not None and prompts.take_fed())
    fed = NOTHING_FED if plan.prefill is None else prompts.feed(live, plan.prefill)
    if fed.failed or not plan.has_decode:
        progressed, failed = _commit(parts.target, live, [None] * len(live), fed.first_verdicts)
        return StepResult(progressed=progressed, failed=[*fed.failed, *failed])

    gammas = plan.gammas if steering is None else steering.choose(live, plan.gammas)
    asked: Mapping[str, Exception | None] = {}
    reason: str | None = None
    try:
        taken = HOST_STEP if rounds is None else take_round(parts, rounds, live, gammas)
        drafted = taken.proposals or propose(parts.drafters, live, gammas, parts.rules)
        asked, reason, verdicts = drafted.asked, taken.host_fallback_reason, taken.verdicts
        if verdicts is None:
            spans, rows = _to_verify(live, gammas, drafted)
            logits = parts.target.extend(spans)
            verdicts = _judge(parts, logits, rows, drafted)
    except EngineError as error:
        # First tokens belong to the step that failed: their prompts are fed again (P3 of ``runtime.loop.prefill``).
        failed = _fail(live, gammas, error)
        return StepResult(failed=failed, asked=asked, host_fallback_reason=reason)

    ahead = [] if rounds is None else prompts.commit_ahead()
    progressed, failed = _commit(
        parts.target, live, drafted.drafts, [*fed.first_verdicts, *verdicts]
    )
    judged = [one for one in verdicts if one[1].next_token is not None] if failed else verdicts
    if drafted.learners:
        tell(parts.drafters, live, drafted, judged)
    if steering is not None:
        steering.observe(live, drafted.drafts, judged)
    return StepResult(
        progressed=progressed, failed=[*ahead, *failed], asked=asked, host_fallback_reason=reason
    )


def _to_verify(
    live: Sequence[Request], gammas: Sequence[int | None], drafted: Proposals
) -> tuple[list[Span], list[SamplingRow]]:
    """Return what to feed, up to the last row that takes part, and what to judge of the logits."""
    spans: list[Span] = []
    rows: list[SamplingRow] = []
    num_spans = 0
    for slot, draft in enumerate(drafted.drafts):
        request = live[slot]
        # The last committed token, whose keys are missing, and the draft.
        tokens = () if draft is None else (request.last_token, *draft.tokens)
        spans.append(
            Span(
                slot=slot,
                start=request.num_computed,
                tokens=tokens,
                num_logits=len(tokens),
                parents=None if draft is None else draft.parents,
            )
        )
        if draft is not None:
            num_spans = slot + 1
            name = request.speculation.drafter
            wanted = drafted.num_choices.get(name, 0) if gammas[slot] else 0
            rows.append(row_to_judge(request, draft, num_choices=wanted))
    return spans[:num_spans], rows


def _judge(
    parts: StepParts, logits: FloatArray, rows: Sequence[SamplingRow], drafted: Proposals
) -> list[tuple[int, Verdict]]:
    """Return the verdicts by slot; logits [B, R, V] float32 of the target."""
    sampler = parts.sampler
    has_trees = drafted.has_trees
    verdicts = judge_trees(sampler, logits, rows) if has_trees else sampler.judge(logits, rows)
    return [(row.slot, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


def _commit(
    target: Engine,
    live: Sequence[Request],
    drafts: Sequence[Draft | None],
    verdicts: Sequence[tuple[int, Verdict]],
) -> tuple[list[Progress], list[tuple[Request, EngineError | None]]]:
    """Move requests over what was verified.

    Args:
        target: holds the trees that were verified.
        live: request i holds slot i.
        drafts: per slot; None for rows whose first token came with their prompt.
        verdicts: by slot.

    Returns:
        What to tell of each request, and requests that cannot go on with the error; None: not finite.
    """
    progressed: list[Progress] = []
    failed: list[tuple[Request, EngineError | None]] = []
    for slot, verdict in verdicts:
        request, draft = live[slot], drafts[slot] or NO_DRAFT
        tokens, num_computed = draft.tokens, draft.num_computed
        if verdict.next_token is None:
            failed.append((request, None))
            continue
        if draft.parents is not None:
            try:
                target.keep_path(slot, (0, *verdict.path))
            except EngineError as error:
                failed.append((request, error))
                continue
            tokens = tried_chain(draft.tokens, draft.parents, verdict.path)
            if num_computed is not None:
                # Of a tree the draft's cache holds the leading chain, which the kept path may leave.
                num_computed = min(num_computed, request.num_known + num_leading(verdict.path))
        told, ending = request.commit(
            tokens, verdict, num_drafted=len(draft.tokens), draft_computed=num_computed
        )
        progressed.append((request, told, ending))
    return progressed, failed


def _fail(
    live: Sequence[Request], gammas: Sequence[int | None], error: EngineError
) -> list[tuple[Request, EngineError | None]]:
    """Return the rows that were verified, to be ended; the others lost their cache only, and prefill again."""
    failed: list[tuple[Request, EngineError | None]] = []
    for request, gamma in zip(live, gammas, strict=True):
        if gamma is None:
            request.lose_cache()
        else:
            failed.append((request, error))
    return failed
