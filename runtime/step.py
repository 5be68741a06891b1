"""One step of all live requests: plan -> run -> judge -> commit.

The only code that meets both the target and the drafters. Whatever a drafter does, its request goes
on; whatever the target does wrong ends the requests it was doing it for, and nothing else: a
failed verification loses the caches of all live rows, but rows still prefilling start over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.base import Engine, EngineError
from engines.laws import Sampler, SamplingRow, Verdict
from engines.rounds import Rounds, do_nothing
from engines.tree_judge import judge
from runtime.core.config import ServerConfig
from runtime.core.costs import CostTable
from runtime.core.params import Finished, Progressed
from runtime.core.request import Ending, Request
from runtime.core.scheduler import StepLimits, decode_spans, plan_step
from runtime.core.tree import num_leading, tried_chain
from runtime.core.tree_prices import TreePrices
from runtime.drafters import Drafters, build_drafters
from runtime.drafters.base import Draft, DrafterParts
from runtime.drafters.model import MAX_SHARED_MISSING
from runtime.prompts import PromptFeeder
from runtime.propose import (
    NO_DRAFT,
    DraftRules,
    Proposals,
    num_choices,
    propose,
    sampling_row,
    tell,
)
from runtime.rounds import DRAFT_FAILED, HOST_SERVES, on_device, why_on_host
from runtime.steering import Steering


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step runs on.

    Attributes:
        drafters: by name.
        rules: what drafters may propose.
        prompts: feeds the target's prompts.
        steering: chooses the gammas of adaptive requests; None where there are none.
        rounds: runs whole rounds on the engines' device; None where the host takes every step.
        meanwhile: called while the device runs a round, once all of it is enqueued; may have
            ``prompts`` feed ahead.
    """

    target: Engine
    sampler: Sampler
    drafters: Drafters
    limits: StepLimits
    rules: DraftRules
    prompts: PromptFeeder
    steering: Steering | None = None
    rounds: Rounds | None = None
    meanwhile: Callable[[], None] = do_nothing


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        progressed: requests that emitted, and their ending if that was it.
        failed: requests the engine could not serve, each with the error; None means its logits
            were not finite.
        asked: every drafter asked, by name, and what it raised, if it did.
        host_reason: why the host took part between draft and judgement; empty where it did not,
            None where nothing was decoded.
        searched: beam searches that are over, and their answers.
        passes: per pass of the target for a search, the steps drafted and those accepted.
    """

    progressed: list[tuple[Request, Progressed, Ending | None]] = field(default_factory=list)
    failed: list[tuple[Request, EngineError | None]] = field(default_factory=list)
    asked: Mapping[str, Exception | None] = field(default_factory=dict)
    host_reason: str | None = None
    searched: list[tuple[Request, Finished]] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)


def step_parts(
    engines: Sequence[Engine],
    sampler: Sampler,
    config: ServerConfig,
    max_gamma: int,
    *,
    rounds: Rounds | None = None,
    costs: CostTable | None = None,
    clock: Callable[[], float] = time.monotonic,
    meanwhile: Callable[[], None] = do_nothing,
) -> StepParts:
    """What steps of a server run on.

    Args:
        engines: the target and, where there is one, the draft.
        sampler: of both.
        config: of the server.
        max_gamma: draft tokens per step the bundle allows.
        rounds: runs rounds over these engines on their device; None for the host.
        costs: of the engines; None keeps every gamma fixed.
        clock: seconds; deadlines are on it.
        meanwhile: called while the device runs a round.

    Raises:
        ConfigError: a registered drafter cannot be loaded.
    """
    target = engines[0]
    chunk = min(config.prefill_chunk, target.limits.max_extend)
    limits = StepLimits(
        max_context=target.limits.max_context,
        max_gamma=min(max_gamma, target.limits.max_extend - 1),
        prefill_chunk=chunk,
        prefill_rows=target.limits.max_prompt_rows or target.limits.max_batch,
        answers_prompts=rounds is None,
    )
    drafters = build_drafters(
        DrafterParts(
            draft=engines[1] if len(engines) > 1 else None,
            sampler=sampler,
            vocab_size=target.limits.vocab_size,
            chunk=chunk,
            max_gamma=limits.max_gamma,
            config=config.drafting,
        )
    )
    return StepParts(
        target=target,
        sampler=sampler,
        drafters=drafters,
        limits=limits,
        rules=DraftRules(
            vocab_size=target.limits.vocab_size,
            scope=config.drafting.history_scope,
            # The tree's root is the last committed token.
            max_nodes=max(0, target.limits.max_tree_nodes - 1),
            prices=None
            if costs is None
            else TreePrices(costs, config.drafting.tree_nodes, target.limits),
            node_cost=None if costs is None else costs.node_cost(config.drafting.tree_nodes),
            trees_may_round_differently=config.drafting.trees_may_round_differently,
        ),
        prompts=PromptFeeder(target, sampler, limits),
        rounds=rounds,
        meanwhile=meanwhile,
        steering=None
        if costs is None
        else Steering(
            costs,
            max_gamma=limits.max_gamma,
            num_slots=min(engine.limits.max_batch for engine in engines),
            max_shared_missing=MAX_SHARED_MISSING,
            chunk=chunk,
            uses_model=drafters.uses_model,
            clock=clock,
        ),
    )


def run_step(parts: StepParts, live: Sequence[Request]) -> StepResult:
    """Run one step.

    Args:
        parts: what to run on.
        live: at least one request, request i holding slot i.

    Returns:
        What happened; requests that ended keep their slot until the caller frees it.
    """
    result = StepResult()
    plan = plan_step(live, parts.limits, has_fed=parts.prompts.take_fed())
    firsts: Sequence[tuple[int, Verdict]] = ()
    if plan.prefill is not None:
        fed = parts.prompts.feed(live, plan.prefill)
        firsts = fed.firsts
        result.failed += fed.failed
        if result.failed:
            return result
    if not plan.has_decode:
        _commit_firsts(parts.target, live, firsts, result)
        return result
    steering = parts.steering
    gammas = plan.gammas if steering is None else steering.choose(live, plan.gammas)
    try:
        proposals, verdicts = _verified(parts, live, gammas, result)
    except EngineError as error:
        _fail(live, gammas, error, result)
        return result
    result.failed += parts.prompts.commit_ahead()
    _commit_firsts(parts.target, live, firsts, result)
    for slot, verdict in verdicts:
        draft = proposals.drafts[slot]
        assert draft is not None
        _commit(parts.target, live[slot], draft, verdict, result)
    judged = [(slot, verdict) for slot, verdict in verdicts if verdict.next_token is not None]
    tell(parts.drafters, live, proposals, judged)
    if steering is not None:
        steering.observe(live, proposals.drafts, judged)
    return result


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
        reason = why_on_host(parts.rounds, parts.drafters, live, gammas, parts.rules)
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
                result.host_reason = ""
                return outcome.proposals, outcome.verdicts
            result.host_reason = DRAFT_FAILED
            return outcome.proposals, _on_host(parts, live, gammas, outcome.proposals)
    result.host_reason = reason
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
        wanted = num_choices(parts.drafters, request, gammas[slot])
        rows.append(sampling_row(request, draft, num_choices=wanted))
    spans = decode_spans([request.num_computed for request in live], fed, trees=trees)
    verdicts = judge(parts.sampler, parts.target.extend(spans), rows)
    return [(row.slot, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


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


def _commit_firsts(
    target: Engine,
    live: Sequence[Request],
    firsts: Sequence[tuple[int, Verdict]],
    result: StepResult,
) -> None:
    """Commit the first tokens that came with this step's chunk of prompt (P3 of ``runtime.prompts``)."""
    for slot, verdict in firsts:
        _commit(target, live[slot], NO_DRAFT, verdict, result)


def _commit(
    target: Engine, request: Request, draft: Draft, verdict: Verdict, result: StepResult
) -> None:
    if verdict.next_token is None:
        result.failed.append((request, None))
        return
    tokens, num_fed, computed = draft.tokens, request.num_known, draft.num_computed
    if draft.parents is not None:
        assert request.slot is not None
        try:
            target.keep_path(request.slot, (0, *verdict.path))
        except EngineError as error:
            result.failed.append((request, error))
            return
        tokens = tried_chain(draft.tokens, draft.parents, verdict.path)
        if computed is not None:
            # Of a tree the draft's cache holds the leading chain, which the kept path may leave.
            computed = min(computed, num_fed + num_leading(verdict.path))
    progressed, ending = request.commit(tokens, verdict, num_drafted=len(draft.tokens))
    if computed is not None:
        # Drafts that were rejected, or fed by nobody, leave the valid prefix of the draft's cache.
        request.commit_draft_cache(computed)
    result.progressed.append((request, progressed, ending))
