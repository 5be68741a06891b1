"""What steps run on, and how it is put together for a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engines.base import Engine
from outrider.engines.device.rounds import Rounds, do_nothing
from outrider.engines.sampling.base import Sampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.scheduler import StepLimits
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.model.model import MAX_SHARED_MISSING
from outrider.runtime.drafters.registry import Drafters, build_drafters
from outrider.runtime.gamma.controller import Controller
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.gamma.tree_prices import TreePrices, node_cost
from outrider.runtime.loop.drafting import DraftRules
from outrider.runtime.loop.prefill import PromptFeeder, SourceReader

SCORED_BYTES = 32 << 20
"""Of the logits of one chunk of prompt. Engines keep room for up to twice as many from then on.

At a vocabulary of 151,936 that is 55 tokens, of 32,000 a whole chunk of 256.
"""
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a step runs on.

    Attributes:
        drafters: by name.
        rules: what drafters may propose.
        prompts: feeds the target's prompts.
        sources: reads the target's sources.
        gamma_controller: chooses the gammas of adaptive requests; None where there are none.
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
    sources: SourceReader
    gamma_controller: Controller | None = None
    rounds: Rounds | None = None
    meanwhile: Callable[[], None] = do_nothing


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
    are_waiting: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = do_nothing,
) -> StepContext:
    """Return what steps of a server run on.

    Args:
        engines: the target and, where there is one, the draft.
        sampler: of both.
        config: of the server.
        max_gamma: draft tokens per step the bundle allows.
        rounds: runs rounds over these engines on their device; None for the host.
        costs: of the engines; None keeps every gamma fixed.
        clock: seconds; deadlines are on it.
        meanwhile: called while the device runs a round.
        are_waiting: whether requests wait for the slots of those that end.
        beat: called as a step does what makes it longer than its like.

    Raises:
        ConfigError: a registered drafter cannot be loaded.
    """
    target = engines[0]
    chunk = min(config.prefill_chunk, target.limits.max_extend)
    limits = StepLimits(
        max_context=target.limits.max_context,
        max_gamma=min(max_gamma, target.limits.max_extend - 1),
        prefill_chunk=chunk,
        scored_chunk=min(chunk, max(1, SCORED_BYTES // (_LOGIT_BYTES * target.limits.vocab_size))),
        prefill_rows=target.limits.max_prompt_rows or target.limits.max_batch,
        answers_prompts=rounds is None,
        read_tokens=config.read_tokens,
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
    return StepContext(
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
            else TreePrices(
                costs, config.drafting.tree_nodes, target.limits, packs_rows=target.packs_rows
            ),
            node_cost=None if costs is None else node_cost(costs, config.drafting.tree_nodes),
            trees_may_round_differently=config.drafting.trees_may_round_differently,
        ),
        prompts=PromptFeeder(target, sampler, limits, beat),
        sources=SourceReader(target, beat, clock),
        rounds=rounds,
        meanwhile=meanwhile,
        gamma_controller=None
        if costs is None
        else Controller(
            costs,
            max_gamma=limits.max_gamma,
            max_shared_missing=MAX_SHARED_MISSING,
            uses_model=drafters.uses_model,
            packs_rows=all(engine.packs_rows for engine in engines),
            are_waiting=are_waiting,
            clock=clock,
        ),
    )
