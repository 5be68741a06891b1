"""Steps of which nothing but the answer reaches the host: requests in, drafts and verdicts out.

The draft model's tokens exist on the device alone until they have been judged. Drafts that the host
makes (retrieved ones) go along as they are. What the host must see in between, it takes over itself;
``host_fallback_reason`` names the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.engines.base import EngineError, step_value
from outrider.engines.rounds import DraftError, Round, RoundAnswer, RoundRow, Rounds
from outrider.engines.sampling.base import Verdict
from outrider.runtime.core.request import Request
from outrider.runtime.drafters.base import Draft, DraftRow
from outrider.runtime.drafters.model.model import ModelDrafter, Ready, is_sampled
from outrider.runtime.drafters.registry import Drafters
from outrider.runtime.loop.drafting import (
    DraftRules,
    Proposals,
    degrade,
    draft_rows,
    propose,
    row_to_judge,
)
from outrider.runtime.loop.step_context import StepContext

HOST_SERVES = "the host samples"
BLOCKS = "whole blocks are judged on the host"
TREES = "trees are judged on the host"
GRAMMARS = "grammars mask tokens on the host"
DRAFT_FAILED = "the draft model failed"
_MODEL = "model"


@step_value
class Taken:
    """How far the device took a step.

    Attributes:
        host_fallback_reason: why the host has to go on; empty where it does not.
        proposals: drafts of all rows; None where none were made.
        verdicts: by slot; None where drafts, if there are any, are still to verify.
    """

    host_fallback_reason: str
    proposals: Proposals | None = None
    verdicts: list[tuple[int, Verdict]] | None = None


HOST_STEP = Taken(host_fallback_reason=HOST_SERVES)
"""Of a server that runs no rounds."""


def take_round(
    parts: StepContext, rounds: Rounds, live: Sequence[Request], gammas: Sequence[int | None]
) -> Taken:
    """Draft, verify and judge all decoding rows on the device, as far as it can.

    ``live`` and ``gammas`` are as ``propose`` takes them.

    Raises:
        EngineError: the target or the sampler failed; the caches of all live rows are undefined.
    """
    reason = host_fallback_reason(rounds, parts.drafters, live, gammas, parts.rules)
    if reason:
        return Taken(host_fallback_reason=reason)
    rules = replace(parts.rules, max_nodes=0)
    return _on_device(rounds, parts.drafters, live, gammas, rules, parts.meanwhile)


def host_fallback_reason(
    rounds: Rounds,
    drafters: Drafters,
    live: Sequence[Request],
    gammas: Sequence[int | None],
    rules: DraftRules,
) -> str:
    """Return why a step cannot run on the device, in words; empty where it can."""
    for request, gamma in zip(live, gammas, strict=True):
        name = request.speculation.drafter
        if gamma and name != _MODEL and drafters.uses_model(name):
            return f"drafter {name} reads the draft model's tokens on the host"
        if gamma is not None and request.speculation.verifies_block:
            return BLOCKS
        if gamma is not None and request.spec.grammar is not None:
            return GRAMMARS
        if (
            gamma
            and rules.max_nodes_of(request.spec)
            and drafters.capabilities(name).proposes_trees
        ):
            return TREES
        if gamma is not None and (reason := rounds.why_not(request.spec.params)):
            return reason
    return ""


def _on_device(
    rounds: Rounds,
    drafters: Drafters,
    live: Sequence[Request],
    gammas: Sequence[int | None],
    rules: DraftRules,
    meanwhile: Callable[[], None],
) -> Taken:
    modelled = [
        slot for slot, gamma in enumerate(gammas) if gamma and _drafter(live[slot]) == _MODEL
    ]
    guessed = [0 if slot in modelled else gamma for slot, gamma in enumerate(gammas)]
    proposals = propose(drafters, live, guessed, rules)
    if not modelled:
        answers = rounds.run(_round(live, proposals, {}, gammas), meanwhile)
        return _outcome(live, proposals, answers, None)
    rows = draft_rows(live, gammas, rules)
    model = drafters[_MODEL]
    assert isinstance(model, ModelDrafter)
    called = {**proposals.called, _MODEL: None}
    proposals = replace(proposals, rows=rows, called=called)
    try:
        ready = model.prepare(rows, modelled)
    except EngineError as error:
        return _without_model(drafters, live, proposals, modelled, error)
    for slot in modelled:
        proposals.drafts[slot] = Draft(
            tokens=(), is_sampled=is_sampled(rows[slot]), num_computed=ready.computed[slot]
        )
    try:
        round_ = _round(live, proposals, ready.gammas, gammas, ready)
        answers = rounds.run(round_, meanwhile)
    except DraftError as error:
        return _without_model(drafters, live, proposals, modelled, error)
    return _outcome(live, proposals, answers, ready)


def _drafter(request: Request) -> str:
    return request.speculation.drafter


def _round(
    live: Sequence[Request],
    proposals: Proposals,
    drafting: dict[int, int],
    gammas: Sequence[int | None],
    ready: Ready | None = None,
) -> Round:
    rows = [
        RoundRow(
            sampling=row_to_judge(
                request,
                draft,
                num_choices=proposals.num_choices.get(_drafter(request), 0) if gamma else 0,
            ),
            gamma=drafting.get(slot, 0),
        )
        for slot, (request, draft, gamma) in enumerate(
            zip(live, proposals.drafts, gammas, strict=True)
        )
        if draft is not None
    ]
    num_rows = rows[-1].sampling.slot + 1
    return Round(
        rows=rows,
        starts=[request.cache.num_computed for request in live[:num_rows]],
        # A row whose source the draft model has not read takes no part.
        draft_starts=[] if ready is None else [max(0, n) for n in ready.computed[:num_rows]],
    )


def _outcome(
    live: Sequence[Request],
    proposals: Proposals,
    answers: Sequence[RoundAnswer],
    ready: Ready | None,
) -> Taken:
    verdicts: list[tuple[int, Verdict]] = []
    slots = [slot for slot, draft in enumerate(proposals.drafts) if draft is not None]
    for slot, answer in zip(slots, answers, strict=True):
        if ready is not None and slot in ready.gammas:
            answer = _cut_at_end(answer, live[slot].spec.params.end_token_ids)
            draft = proposals.drafts[slot]
            assert draft is not None
            # Of what was drafted, all but the last token was fed.
            proposals.drafts[slot] = replace(
                draft,
                tokens=answer.draft_tokens,
                num_computed=live[slot].sequence.num_known + len(answer.draft_tokens) - 1,
            )
        verdicts.append((slot, answer.verdict))
    return Taken(host_fallback_reason="", proposals=proposals, verdicts=verdicts)


def _cut_at_end(answer: RoundAnswer, end_token_ids: Sequence[int]) -> RoundAnswer:
    """A draft ends with its first end token; what was kept behind it would be discarded anyway."""
    tokens, verdict = answer.draft_tokens, answer.verdict
    length = next(
        (at for at, token in enumerate(tokens, start=1) if token in end_token_ids), len(tokens)
    )
    if length == len(tokens):
        return answer
    kept = min(verdict.num_accepted, length)
    return RoundAnswer(
        draft_tokens=tokens[:length],
        verdict=replace(
            verdict,
            num_accepted=kept,
            overlaps=verdict.overlaps[:length],
            logprobs=verdict.logprobs[: kept + 1],
            choices=verdict.choices[: length + 1],
        ),
    )


def _without_model(
    drafters: Drafters,
    live: Sequence[Request],
    proposals: Proposals,
    slots: Sequence[int],
    error: EngineError,
) -> Taken:
    """The other rows' drafts; those of the model go on without it."""
    rows: list[DraftRow] = list(proposals.rows)
    degrade(drafters, live, rows, slots, error)
    drafts = [draft and replace(draft, num_computed=None) for draft in proposals.drafts]
    for slot in slots:
        drafts[slot] = Draft(tokens=())
    called = {**proposals.called, _MODEL: error}
    return Taken(
        host_fallback_reason=DRAFT_FAILED,
        proposals=replace(proposals, drafts=drafts, rows=rows, called=called),
    )
