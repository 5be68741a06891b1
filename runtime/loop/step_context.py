"""What steps run on, and how it is put together for a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.engines.base import Engine, EngineLimits
from outrider.engines.rounds import Rounds, do_nothing
from outrider.engines.sampling.base import Sampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.scheduler import StepLimits
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.compose import NONE
from outrider.runtime.drafters.model.model import most_shared_missing
from outrider.runtime.drafters.model.prompt_end import PromptEndEngine
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
class ServedEngines:
    """What computes and samples for a worker; the engines are the caller's to close.

    Attributes:
        target: the model whose distribution is served.
        draft: the one that proposes; None where there is none.
        sampler: of both.
        max_gamma: draft tokens per step that the bundle allows.
        rounds: runs rounds over these engines on their device; None for the host.
        costs: of these engines on this machine; None keeps every gamma fixed.
    """

    target: Engine
    draft: Engine | None
    sampler: Sampler
    max_gamma: int
    rounds: Rounds | None = None
    costs: CostTable | None = None

    def with_prompt_ends(self) -> ServedEngines:
        """Return these with a draft model that may read the end of a prompt alone, where the host calls it.

        A head reads all of it: that costs one layer, and it drafts nearly nothing otherwise.
        """
        draft = self.draft
        if draft is None or self.rounds is not None:
            return self
        if draft.limits.max_source or draft.limits.reads_features:
            return self
        return replace(self, draft=PromptEndEngine(draft))

    @property
    def opened(self) -> tuple[Engine, ...]:
        """The target and, where there is one, the draft."""
        return (self.target,) if self.draft is None else (self.target, self.draft)


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
    engines: ServedEngines,
    config: ServerConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    meanwhile: Callable[[], None] = do_nothing,
    are_waiting: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = do_nothing,
) -> StepContext:
    """Return what steps of a server run on.

    Args:
        engines: what computes and samples.
        config: of the server.
        clock: seconds; deadlines are on it.
        meanwhile: called while the device runs a round.
        are_waiting: whether requests wait for the slots of those that end.
        beat: called as a step does what makes it longer than its like.

    Raises:
        ConfigError: a registered drafter cannot be loaded.
    """
    target, sampler, costs = engines.target, engines.sampler, engines.costs
    limits = _limits(engines, config)
    drafters = build_drafters(_drafter_parts(engines, config, limits))
    gamma_controller = None
    if costs is not None:
        lacks_default = engines.draft is None and config.default_drafter == "model"
        gamma_controller = Controller(
            costs,
            max_gamma=limits.max_gamma + _num_behind(drafters, config, limits),
            max_shared_missing=most_shared_missing(engines.draft, limits.max_gamma),
            uses_model=drafters.uses_model,
            packs_rows=all(engine.packs_rows for engine in engines.opened),
            leaves_out=isinstance(engines.draft, PromptEndEngine),
            are_waiting=are_waiting,
            default_drafter=NONE if lacks_default else config.default_drafter,
            clock=clock,
        )
    return StepContext(
        target=target,
        sampler=sampler,
        drafters=drafters,
        limits=limits,
        rules=_rules(engines, config.drafting, limits),
        prompts=PromptFeeder(target, sampler, limits, beat),
        sources=SourceReader(target, beat, clock),
        rounds=engines.rounds,
        meanwhile=meanwhile,
        gamma_controller=gamma_controller,
    )


def _limits(engines: ServedEngines, config: ServerConfig) -> StepLimits:
    limits = engines.target.limits
    chunk = min(config.prefill_chunk, limits.max_extend)
    max_gamma = min(engines.max_gamma, limits.max_extend - 1)
    return StepLimits(
        max_context=limits.max_context,
        max_gamma=max_gamma,
        max_depth=_max_depth(engines, max_gamma),
        prefill_chunk=chunk,
        scored_chunk=min(chunk, max(1, SCORED_BYTES // (_LOGIT_BYTES * limits.vocab_size))),
        prefill_rows=limits.max_prompt_rows or limits.max_batch,
        answers_prompts=engines.rounds is None,
        read_tokens=config.read_tokens,
        # On an accelerator a wide call costs little more than a narrow one.
        shared_chunk=config.shared_chunk if engines.rounds is None else chunk,
    )


def _drafter_parts(
    engines: ServedEngines, config: ServerConfig, limits: StepLimits
) -> DrafterParts:
    target = engines.target.limits
    return DrafterParts(
        draft=engines.draft,
        sampler=engines.sampler,
        vocab_size=target.vocab_size,
        chunk=limits.prefill_chunk,
        max_gamma=limits.max_gamma,
        max_depth=limits.max_depth,
        max_nodes=_max_nodes(target),
        config=config.drafting,
    )


def _num_behind(drafters: Drafters, config: ServerConfig, limits: StepLimits) -> int:
    """Return the tokens that drafts of requests that name no drafter have behind their gamma."""
    names = map(drafters.usable, (config.default_drafter, *config.auto_drafters))
    lengthens = any(drafters.capabilities(name).lengthens for name in names if name is not None)
    return min(config.drafting.phrase_length, limits.max_depth - limits.max_gamma) * lengthens


def _max_depth(engines: ServedEngines, max_gamma: int) -> int:
    """Return the tokens of a draft at most, with what a drafter puts behind its ``max_gamma``."""
    if engines.rounds is not None:
        # Kernels judge no more than the bundle's gamma.
        return max_gamma
    limits = engines.target.limits
    most = limits.max_extend - 1
    return max(max_gamma, most if limits.max_open is None else min(most, limits.max_open))


def _max_nodes(limits: EngineLimits) -> int:
    """Return the draft tokens of a tree at most: its root is the last committed token."""
    return max(0, min(limits.max_tree_nodes, limits.max_extend) - 1)


def _rules(engines: ServedEngines, config: DraftingConfig, bounds: StepLimits) -> DraftRules:
    target, costs, max_nodes = engines.target, engines.costs, config.tree_nodes
    prices = None
    if costs is not None:
        prices = TreePrices(costs, max_nodes, target.limits, packs_rows=target.packs_rows)
    return DraftRules(
        vocab_size=target.limits.vocab_size,
        scope=config.history_scope,
        max_nodes=_max_nodes(target.limits),
        max_depth=bounds.max_depth,
        max_context=bounds.max_context,
        prices=prices,
        node_cost=None if costs is None else node_cost(costs, max_nodes),
        trees_may_round_differently=config.trees_may_round_differently,
    )
