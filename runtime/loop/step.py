"""One step of all live requests: plan -> draft -> run -> judge -> commit.

The only code that meets both the target and the drafters. Whatever a drafter does, its request goes on. Where a call
of the target or of the sampler raises, parts of its rows are tried again, down to single ones. Who fails alone twice
ends: quarantined where the engine served others in the same step. The others go on with the tokens they would have had.
A failed call loses the caches of its rows: those that decode are fed again first, those still prefilling start over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from outrider.engines.base import Engine, Span
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.tree_judge import judge as judge_trees
from outrider.runtime.core.bisect_failures import bisect_failures
from outrider.runtime.core.errors import ConstraintConflict
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import plan_step
from outrider.runtime.core.tree import num_leading, tried_chain
from outrider.runtime.drafters.base import Draft
from outrider.runtime.loop.device_step import HOST_STEP, take_round
from outrider.runtime.loop.drafting import NO_DRAFT, Proposals, propose, row_to_judge, tell
from outrider.runtime.loop.prefill import NOTHING_FED, NOTHING_READ
from outrider.runtime.loop.result import Failure, Progress, StepResult
from outrider.runtime.loop.step_context import StepContext

logger = logging.getLogger(__name__)

STEP_FAILED = "the step failed; its rows were tried again"


def run_step(parts: StepContext, live: Sequence[Request]) -> StepResult:
    """Run one step and return what it did; requests that ended keep their slot until the caller frees it.

    ``live`` has at least one request, request i holding slot i.
    """
    rounds, gamma_controller, prompts = parts.rounds, parts.gamma_controller, parts.prompts
    plan = plan_step(live, parts.limits, has_fed=rounds is not None and prompts.take_fed())
    read = parts.sources.read(live, plan.read) if plan.read else NOTHING_READ
    fed = NOTHING_FED if plan.prefill is None else prompts.feed(live, plan.prefill)
    alone: Sequence[Failure] = [*read.failed, *fed.failed]
    # A read says of the engine that it reads, not that it extends.
    is_sound = fed.num_fed > 0 or (bool(read.failed) and bool(read.reads))
    caps = plan.gammas if plan.prefill is None and not plan.read else _ready(live, plan.gammas)
    if caps.count(None) == len(caps):
        progressed, failed = _commit(parts.target, live, [None] * len(live), fed.first_verdicts)
        return StepResult(
            progressed=progressed, failed=failed, alone=alone, is_sound=is_sound, reads=read.reads
        )

    gammas = caps if gamma_controller is None else gamma_controller.choose(live, caps)
    drafted: Proposals | None = None
    first_verdicts = fed.first_verdicts
    try:
        taken = HOST_STEP if rounds is None else take_round(parts, rounds, live, gammas)
        drafted = taken.proposals or propose(parts.drafters, live, gammas, parts.rules)
        reason, verdicts = taken.host_fallback_reason, taken.verdicts
        if verdicts is None:
            verdicts = _verify(parts, live, gammas, drafted, range(len(live)))
        if rounds is not None:
            prompts.commit_ahead()
    except Exception as error:  # the target's, the sampler's, or a bug: found out row by row
        logger.warning("a step of %d rows failed; trying parts of it", len(live), exc_info=error)
        _lose_prompts(live, gammas)
        drafted = drafted or _drafted_anew(parts, live, gammas)
        verdicts, failed = _verify_in_halves(parts, live, gammas, drafted)
        alone = [*alone, *failed]
        # First tokens belong to the step that failed: their prompts are fed again (P3 of ``runtime.loop.prefill``).
        reason, first_verdicts, gamma_controller = STEP_FAILED, (), None

    progressed, failed = _commit(parts.target, live, drafted.drafts, [*first_verdicts, *verdicts])
    judged = [one for one in verdicts if one[1].next_token is not None] if failed else verdicts
    if drafted.observers:
        tell(parts.drafters, live, drafted, judged)
    if gamma_controller is not None:
        gamma_controller.observe(live, drafted.drafts, judged)
    return StepResult(
        progressed=progressed,
        failed=failed,
        alone=alone,
        is_sound=bool(verdicts) or is_sound,
        asked=drafted.asked,
        host_fallback_reason=reason,
        reads=read.reads,
    )


def _ready(live: Sequence[Request], gammas: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the gammas with None for rows whose reading has failed, or that of the row they wait for."""
    return tuple(
        gamma if request.state is State.DECODING else None
        for request, gamma in zip(live, gammas, strict=True)
    )


def _verify(
    parts: StepContext,
    live: Sequence[Request],
    gammas: Sequence[int | None],
    drafted: Proposals,
    slots: range,
) -> list[tuple[int, Verdict]]:
    """Return the verdicts by slot on what these slots drafted.

    Raises:
        EngineError: the target or the sampler failed; the caches of these slots are undefined.
    """
    spans: list[Span] = []
    rows: list[SamplingRow] = []
    num_spans = 0
    for index, slot in enumerate(slots):
        request, draft = live[slot], drafted.drafts[slot]
        # The last committed token, whose keys are missing, and the draft.
        tokens = () if draft is None else (request.last_token, *draft.tokens)
        span = Span(
            slot=slot,
            start=request.num_computed,
            tokens=tokens,
            num_logits=len(tokens),
            parents=None if draft is None else draft.parents,
        )
        spans.append(behind_forced(span, request) if request.num_pending and tokens else span)
        if draft is not None:
            num_spans = index + 1
            name = request.speculation.drafter
            wanted = drafted.num_choices.get(name, 0) if gammas[slot] else 0
            row = row_to_judge(request, draft, num_choices=wanted)
            rows.append(row if index == slot else replace(row, index=index))
    sampler = parts.sampler
    logits = parts.target.extend(spans[:num_spans])
    has_trees = drafted.has_trees
    verdicts = judge_trees(sampler, logits, rows) if has_trees else sampler.judge(logits, rows)
    return [(row.slot, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


def behind_forced(span: Span, request: Request) -> Span:
    """Return a span whose draft stands behind the tokens that the form forced since the last judged one."""
    num_pending = request.num_pending
    before = request.tokens[request.num_computed : request.num_known - 1].tolist()
    parents = span.parents
    if parents is not None:
        parents = (*range(num_pending), *(num_pending + parent for parent in parents))
    return replace(span, tokens=(*before, *span.tokens), parents=parents)


def _verify_in_halves(
    parts: StepContext, live: Sequence[Request], gammas: Sequence[int | None], drafted: Proposals
) -> tuple[list[tuple[int, Verdict]], list[Failure]]:
    """Verify parts of what failed together, on the host.

    A draw depends on its request's own tokens and noise alone, so a verdict is that of an undisturbed step.

    Returns:
        Verdicts by slot, and the requests for which the engine failed although no other took part.
    """

    def attempt(slots: Sequence[int]) -> list[tuple[int, Verdict]]:
        # The call that failed left their caches undefined.
        for slot in slots:
            parts.prompts.feed_again(live[slot])
        return _verify(parts, live, gammas, drafted, range(slots[0], slots[-1] + 1))

    decoding = [slot for slot, gamma in enumerate(gammas) if gamma is not None]
    done, failed = bisect_failures(decoding, attempt)
    return [one for verdicts in done for one in verdicts], [
        (live[slot], error) for slot, error in failed
    ]


def _drafted_anew(
    parts: StepContext, live: Sequence[Request], gammas: Sequence[int | None]
) -> Proposals:
    """Return drafts made on the host after a round failed on the device, which lost the draft model's caches too."""
    for request in live:
        request.lose_draft_cache()
    return propose(parts.drafters, live, gammas, parts.rules)


def _lose_prompts(live: Sequence[Request], gammas: Sequence[int | None]) -> None:
    """Have the rows that do not decode read their prompts again: they were padding in a call that failed."""
    for request, gamma in zip(live, gammas, strict=True):
        if gamma is None:
            request.lose_cache()


def _commit(
    target: Engine,
    live: Sequence[Request],
    drafts: Sequence[Draft | None],
    verdicts: Sequence[tuple[int, Verdict]],
) -> tuple[list[Progress], list[Failure]]:
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
    failed: list[Failure] = []
    for slot, verdict in verdicts:
        request, draft = live[slot], drafts[slot] or NO_DRAFT
        tokens, num_computed = draft.tokens, draft.num_computed
        if verdict.next_token is None:
            failed.append((request, ConstraintConflict() if verdict.has_conflict else None))
            continue
        if draft.parents is not None:
            tokens = tried_chain(draft.tokens, draft.parents, verdict.path)
            if num_computed is not None:
                # Of a tree the draft's cache holds the leading chain, which the kept path may leave.
                num_computed = min(num_computed, request.num_known + num_leading(verdict.path))
        try:
            if draft.parents is not None:
                num_pending = request.num_pending
                path = [num_pending + node for node in verdict.path]
                target.keep_path(slot, (*range(num_pending + 1), *path))
                if (num_exact := num_leading(verdict.path)) < len(verdict.path):
                    request.note_path(num_exact)
            told, ending = request.commit(
                tokens, verdict, num_drafted=len(draft.tokens), draft_computed=num_computed
            )
        except Exception as error:  # the target's, or a bug in what turns tokens into text
            failed.append((request, error))
            continue
        progressed.append((request, told, ending))
    return progressed, failed
