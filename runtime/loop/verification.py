"""Verification of a step's drafts on the host, and of its parts where all of it failed.

A failed call loses the caches of its rows: those that decode are fed again first, those still prefilling start over. A
draw depends on its request's own tokens and noise alone, so a verdict of a part is that of an undisturbed step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from outrider.engines.base import Span, step_value
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.tree_judge import judge as judge_trees
from outrider.runtime.core.bisect_failures import bisect_failures
from outrider.runtime.core.request import Request
from outrider.runtime.loop.drafting import Proposals, propose, row_to_judge
from outrider.runtime.loop.result import Failure
from outrider.runtime.loop.step_context import StepContext

logger = logging.getLogger(__name__)

STEP_FAILED = "the step failed; its rows were tried again"


@step_value
class Verified:
    """Drafts of a step, and what the target made of them.

    Attributes:
        proposals: drafts of all rows.
        verdicts: by slot.
        host_fallback_reason: why the host took part; empty where it did not, None where nothing was decoded.
        was_recovered: whether all rows failed together, and their parts were tried again.
        failed: requests for which the engine failed although no other took part, and the error.
    """

    proposals: Proposals
    verdicts: Sequence[tuple[int, Verdict]] = ()
    host_fallback_reason: str | None = None
    was_recovered: bool = False
    failed: Sequence[Failure] = ()


def verify(
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
        sequence = request.sequence
        # The last committed token, whose keys are missing, and the draft.
        tokens = () if draft is None else (sequence.last_token, *draft.tokens)
        span = Span(
            slot=slot,
            start=request.cache.num_computed,
            tokens=tokens,
            num_logits=len(tokens),
            parents=None if draft is None else draft.parents,
            num_settled=min(1, len(tokens)),
        )
        spans.append(behind_forced(span, request) if sequence.num_pending and tokens else span)
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
    """Return a span whose draft stands behind the tokens that the constraint forced since the last judged one."""
    sequence, num_pending = request.sequence, request.sequence.num_pending
    before = sequence.tokens[request.cache.num_computed : sequence.num_known - 1].tolist()
    parents = span.parents
    if parents is not None:
        parents = (*range(num_pending), *(num_pending + parent for parent in parents))
    return replace(
        span, tokens=(*before, *span.tokens), parents=parents, num_settled=len(before) + 1
    )


def recover(
    parts: StepContext,
    live: Sequence[Request],
    gammas: Sequence[int | None],
    drafted: Proposals | None,
    error: Exception,
) -> Verified:
    """Verify parts of a step that failed as a whole, on the host, down to single rows.

    Args:
        parts: what steps run on.
        live: request i holds slot i.
        gammas: per slot, of the step; None for rows that do not decode. These read their prompts again.
        drafted: its drafts; None where a round failed on the device, which lost the draft model's caches too.
        error: the target's, the sampler's, or a bug.
    """
    logger.warning("a step of %d rows failed; trying parts of it", len(live), exc_info=error)
    for request, gamma in zip(live, gammas, strict=True):
        if gamma is None:
            request.lose_cache()
    if drafted is None:
        for request in live:
            request.lose_draft_cache()
        drafted = propose(parts.drafters, live, gammas, parts.rules)
    proposals = drafted

    def attempt(slots: Sequence[int]) -> list[tuple[int, Verdict]]:
        # The call that failed left their caches undefined.
        for slot in slots:
            parts.prompts.feed_again(live[slot])
        return verify(parts, live, gammas, proposals, range(slots[0], slots[-1] + 1))

    decoding = [slot for slot, gamma in enumerate(gammas) if gamma is not None]
    done, failed = bisect_failures(decoding, attempt)
    return Verified(
        proposals=proposals,
        verdicts=[one for verdicts in done for one in verdicts],
        host_fallback_reason=STEP_FAILED,
        was_recovered=True,
        failed=[(live[slot], error) for slot, error in failed],
    )
