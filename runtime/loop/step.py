"""One step of all live requests: plan -> draft -> run -> judge -> commit.

Whatever a drafter does, its request goes on. Where a call of the target or of the sampler raises, parts of its rows are
tried again, down to single ones (``runtime.loop.verification``). A request that fails alone twice ends: quarantined
where the engine served others in the same step. The others go on with the tokens they would have had.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import Engine
from outrider.engines.sampling.base import Verdict
from outrider.runtime.core.errors import ConstraintConflict
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import plan_step
from outrider.runtime.core.tree import num_leading, tried_chain
from outrider.runtime.drafters.base import Draft
from outrider.runtime.loop.device_step import HOST_STEP, take_round
from outrider.runtime.loop.drafting import NO_DRAFT, Proposals, propose, report_outcomes
from outrider.runtime.loop.prefill import NOTHING_FED, NOTHING_READ
from outrider.runtime.loop.result import Failure, Progress, StepResult
from outrider.runtime.loop.step_context import StepContext
from outrider.runtime.loop.verification import Verified, recover, verify


def run_step(parts: StepContext, live: Sequence[Request]) -> StepResult:
    """Run one step and return what it did; requests that ended keep their slot until the caller frees it.

    ``live`` has at least one request, request i holding slot i.
    """
    has_fed = parts.rounds is not None and parts.prompts.take_fed()
    plan = plan_step(live, parts.limits, has_fed=has_fed)
    read = parts.sources.read(live, plan.read) if plan.read else NOTHING_READ
    fed = NOTHING_FED if plan.prefill is None else parts.prompts.feed(live, plan.prefill)
    caps = plan.gammas if plan.prefill is None and not plan.read else _ready(live, plan.gammas)
    if caps.count(None) == len(caps):
        done = Verified(proposals=Proposals(drafts=[None] * len(live)))
    else:
        gamma_controller = parts.gamma_controller
        gammas = caps if gamma_controller is None else gamma_controller.choose(live, caps)
        done = _draft_and_verify(parts, live, gammas)
    # First tokens belong to the step: where it failed, their prompts are fed again (P3 of ``runtime.loop.prefill``).
    first_verdicts = () if done.was_recovered else fed.first_verdicts
    verdicts = [*first_verdicts, *done.verdicts]
    progressed, failed = _commit(parts.target, live, done.proposals.drafts, verdicts)
    if done.proposals.observers or parts.gamma_controller is not None:
        _report_outcomes(parts, live, done, has_failed=bool(failed))
    return StepResult(
        progressed=progressed,
        failed=failed,
        alone=[*read.failed, *fed.failed, *done.failed],
        # A read says of the engine that it reads, not that it extends.
        is_sound=bool(done.verdicts) or fed.num_fed > 0 or (bool(read.failed) and bool(read.reads)),
        called=done.proposals.called,
        host_fallback_reason=done.host_fallback_reason,
        reads=read.reads,
    )


def _ready(live: Sequence[Request], gammas: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the gammas with None for rows whose reading has failed, or that of the row they wait for."""
    return tuple(
        gamma if request.state is State.DECODING else None
        for request, gamma in zip(live, gammas, strict=True)
    )


def _draft_and_verify(
    parts: StepContext, live: Sequence[Request], gammas: Sequence[int | None]
) -> Verified:
    """Draft for the rows that decode, run the target on the drafts and judge them: on a device as far as it can."""
    drafted: Proposals | None = None
    rounds = parts.rounds
    try:
        taken = HOST_STEP if rounds is None else take_round(parts, rounds, live, gammas)
        drafted = taken.proposals or propose(parts.drafters, live, gammas, parts.rules)
        verdicts = taken.verdicts
        if verdicts is None:
            verdicts = verify(parts, live, gammas, drafted, range(len(live)))
        if rounds is not None:
            parts.prompts.commit_ahead()
    except Exception as error:  # the target's, the sampler's, or a bug: found out row by row
        return recover(parts, live, gammas, drafted, error)
    return Verified(
        proposals=drafted, verdicts=verdicts, host_fallback_reason=taken.host_fallback_reason
    )


def _report_outcomes(
    parts: StepContext, live: Sequence[Request], done: Verified, *, has_failed: bool
) -> None:
    """Report what became of drafts to the drafters, and to the choice of gamma unless the step failed."""
    judged = done.verdicts
    if has_failed:
        judged = [one for one in judged if one[1].next_token is not None]
    if done.proposals.observers:
        report_outcomes(parts.drafters, live, done.proposals, judged)
    if parts.gamma_controller is not None and done.verdicts and not done.was_recovered:
        parts.gamma_controller.observe(live, done.proposals.drafts, judged)


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
                num_known = request.sequence.num_known
                num_computed = min(num_computed, num_known + num_leading(verdict.path))
        try:
            if draft.parents is not None:
                num_pending = request.sequence.num_pending
                path = [num_pending + node for node in verdict.path]
                target.keep_path(slot, (*range(num_pending + 1), *path))
                if (num_exact := num_leading(verdict.path)) < len(verdict.path):
                    request.note_path(num_exact)
            progress, ending = request.commit(
                tokens, verdict, num_drafted=len(draft.tokens), draft_computed=num_computed
            )
        except Exception as error:  # the target's, or a bug in what turns tokens into text
            failed.append((request, error))
            continue
        progressed.append((request, progress, ending))
    return progressed, failed
