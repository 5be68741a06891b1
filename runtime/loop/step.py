"""One step of all live requests: plan -> run -> judge -> advance -> account.

The only code that meets both the target and the drafters. Whatever a drafter does, its request goes
on; whatever the target does wrong ends the requests it was doing it for, and nothing else: a
failed verification loses the caches of all live rows, but rows still prefilling start over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.engines.base import Engine, EngineError, Span
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.tree_judge import judge
from outrider.runtime.core.request import Advance, Request
from outrider.runtime.core.scheduler import decode_spans, next_gammas, plan_step
from outrider.runtime.core.tree import num_leading, tried_chain
from outrider.runtime.drafters.base import Draft
from outrider.runtime.loop.device_step import (
    DRAFT_FAILED,
    HOST_SERVES,
    host_fallback_reason,
    on_device,
)
from outrider.runtime.loop.drafting import (
    NO_DRAFT,
    Proposals,
    num_choices,
    propose,
    sampling_row,
    tell,
)
from outrider.runtime.loop.step_parts import StepParts, StepResult

MOST_IN_A_ROW = 16
"""Steps that are accounted for together at most."""


def never() -> bool:
    """Not."""
    return False


def run_step(
    parts: StepParts, live: Sequence[Request], *, may_go_on: Callable[[], bool] = never
) -> StepResult:
    """Run one step, or several in a row after which everything is accounted for at once.

    Args:
        parts: what to run on.
        live: at least one request, request i holding slot i.
        may_go_on: asked after each step that nobody has to be told of at once.

    Returns:
        What happened; requests that ended keep their slot until the caller frees it.
    """
    result = StepResult()
    plan = plan_step(live, parts.limits, has_fed=parts.prompts.take_fed())
    first_verdicts: Sequence[tuple[int, Verdict]] = ()
    if plan.prefill is not None:
        fed = parts.prompts.feed(live, plan.prefill)
        first_verdicts = fed.first_verdicts
        result.failed += fed.failed
        if result.failed:
            return result
    waits = parts.rounds is None and plan.prefill is None and all(row.may_wait for row in live)
    latest: list[tuple[Request, Advance]] = []
    if plan.has_decode and not _advance(parts, live, plan.gammas, result, latest):
        # First tokens belong to the step that failed: their prompts are fed again (P3 of ``runtime.loop.prefill``).
        return result
    advances = [*_advance_firsts(parts.target, live, first_verdicts, result), *latest]
    while waits and result.num_steps < MOST_IN_A_ROW and _goes_on(latest, result) and may_go_on():
        latest = []
        try:
            _advance(parts, live, next_gammas(live, parts.limits), result, latest)
        except Exception as error:  # whatever it is, the steps before it are told of first
            result.bug = error
        advances += latest
    for request, advance in advances:
        result.progressed.append((request, *request.account(advance)))
    return result


def _goes_on(latest: Sequence[tuple[Request, Advance]], result: StepResult) -> bool:
    """Whether nothing but tokens has come of the steps so far."""
    if result.bug is not None or result.failed or any(result.asked.values()):
        return False
    return not any(advance.is_over for _, advance in latest)


def _advance(
    parts: StepParts,
    live: Sequence[Request],
    caps: tuple[int | None, ...],
    result: StepResult,
    advances: list[tuple[Request, Advance]],
) -> bool:
    """Take one step; whether it did not fail.

    Args:
        parts: what to run on.
        live: request i holds slot i.
        caps: per slot, the most draft tokens it may take; None for rows that do not decode.
        result: of the step; grows.
        advances: grows by what decoding rows were moved over, which has to be accounted for.
    """
    steering = parts.steering
    gammas = caps if steering is None else steering.choose(live, caps)
    result.num_steps += 1
    try:
        proposals, verdicts = _verified(parts, live, gammas, result)
    except EngineError as error:
        _fail(live, gammas, error, result)
        return False
    result.failed += parts.prompts.commit_ahead()
    for slot, verdict in verdicts:
        draft = proposals.drafts[slot]
        assert draft is not None
        advance = _advanced(parts.target, live[slot], draft, verdict, result)
        if advance is not None:
            advances.append((live[slot], advance))
    judged = [(slot, verdict) for slot, verdict in verdicts if verdict.next_token is not None]
    tell(parts.drafters, live, proposals, judged)
    if steering is not None:
        steering.observe(live, proposals.drafts, judged)
    return True


def _verified(
    parts: StepParts, live: Sequence[Request], gammas: Sequence[int | None], result: StepResult
) -> tuple[Proposals, list[tuple[int, Verdict]]]:
    """Drafts of the decoding rows, and by slot their verdicts.

    Raises:
        EngineError: the target failed; the caches of all live rows are undefined.
    """
    if parts.rounds is None:
        reason = HOST_SERVES
    else:
        reason = host_fallback_reason(parts.rounds, parts.drafters, live, gammas, parts.rules)
        if not reason:
            outcome = on_device(
                parts.rounds,
                parts.drafters,
                live,
                gammas,
                replace(parts.rules, max_nodes=0),
                parts.meanwhile,
            )
            result.asked = outcome.proposals.asked
            if outcome.verdicts is not None:
                result.host_fallback_reason = ""
                return outcome.proposals, outcome.verdicts
            result.host_fallback_reason = DRAFT_FAILED
            return outcome.proposals, _on_host(parts, live, gammas, outcome.proposals)
    result.host_fallback_reason = reason
    proposals = propose(parts.drafters, live, gammas, parts.rules)
    result.asked = proposals.asked
    return proposals, _on_host(parts, live, gammas, proposals)


def _on_host(
    parts: StepParts,
    live: Sequence[Request],
    gammas: Sequence[int | None],
    proposals: Proposals,
) -> list[tuple[int, Verdict]]:
    """Verify drafts and judge them where the host sees the logits."""
    if not proposals.rows and all(draft is NO_DRAFT for draft in proposals.drafts):
        return _undrafted(parts, live)
    fed: list[tuple[int, ...] | None] = []
    rows: list[SamplingRow] = []
    trees: dict[int, tuple[int, ...]] = {}
    for slot, (request, draft) in enumerate(zip(live, proposals.drafts, strict=True)):
        if draft is None:
            fed.append(None)
            continue
        # The last committed token, whose keys are missing, and the draft.
        fed.append((request.last_token, *draft.tokens))
        if draft.parents is not None:
            trees[slot] = draft.parents
        # Who looks at texts alone wants to learn from no choices.
        wanted = num_choices(parts.drafters, request, gammas[slot]) if proposals.rows else 0
        rows.append(sampling_row(request, draft, num_choices=wanted))
    spans = decode_spans([request.num_computed for request in live], fed, trees=trees)
    verdicts = judge(parts.sampler, parts.target.extend(spans), rows)
    return [(row.slot, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


def _undrafted(parts: StepParts, live: Sequence[Request]) -> list[tuple[int, Verdict]]:
    """Decode one token of every row: nobody drafts, and all take part."""
    spans, rows = [], []
    for slot, request in enumerate(live):
        token = (request.last_token,)
        spans.append(Span(slot=slot, start=request.num_computed, tokens=token, num_logits=1))
        rows.append(request.undrafted)
    return list(enumerate(parts.sampler.judge(parts.target.extend(spans), rows)))


def _fail(
    live: Sequence[Request],
    gammas: Sequence[int | None],
    error: EngineError,
    result: StepResult,
) -> None:
    """End what was verified; rows that took no part lost their cache only, and prefill again."""
    for request, gamma in zip(live, gammas, strict=True):
        if gamma is None:
            request.lose_cache()
        else:
            result.failed.append((request, error))


def _advance_firsts(
    target: Engine,
    live: Sequence[Request],
    first_verdicts: Sequence[tuple[int, Verdict]],
    result: StepResult,
) -> list[tuple[Request, Advance]]:
    """Move requests over the first tokens that came with this step's chunk of prompt."""
    advances = []
    for slot, verdict in first_verdicts:
        advance = _advanced(target, live[slot], NO_DRAFT, verdict, result)
        if advance is not None:
            advances.append((live[slot], advance))
    return advances


def _advanced(
    target: Engine, request: Request, draft: Draft, verdict: Verdict, result: StepResult
) -> Advance | None:
    """Move a request over what was verified; None where it failed."""
    if verdict.next_token is None:
        result.failed.append((request, None))
        return None
    tokens, num_fed, computed = draft.tokens, request.num_known, draft.num_computed
    if draft.parents is not None:
        assert request.slot is not None
        try:
            target.keep_path(request.slot, (0, *verdict.path))
        except EngineError as error:
            result.failed.append((request, error))
            return None
        tokens = tried_chain(draft.tokens, draft.parents, verdict.path)
        if computed is not None:
            # Of a tree the draft's cache holds the leading chain, which the kept path may leave.
            computed = min(computed, num_fed + num_leading(verdict.path))
    advance = request.advance(tokens, verdict, num_drafted=len(draft.tokens))
    if computed is not None:
        # Drafts that were rejected, or fed by nobody, leave the valid prefix of the draft's cache.
        request.commit_draft_cache(computed)
    return advance
