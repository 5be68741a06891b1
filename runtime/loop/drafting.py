"""The step's dealings with drafters: ask them, check what they say, tell them what became of it.

Nothing a drafter does or raises harms a request: a draft is cut to what may be verified, and rows
whose drafter failed go on with what is left of their chain of fallbacks, or plainly.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from outrider.engines.base import EngineError, step_value
from outrider.engines.sampling.base import ExactnessMode, SamplingRow, Verdict
from outrider.runtime.core.drafting import HistoryScope, salted_scope_of
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import draft_room
from outrider.runtime.core.tree import DraftTree, leading_chain, pruned
from outrider.runtime.drafters.base import Draft, DrafterCapabilities, DraftRow, Need, Outcome
from outrider.runtime.drafters.compose import as_error
from outrider.runtime.drafters.registry import Drafters
from outrider.runtime.gamma.tree_prices import TreePrices, affordable_nodes

logger = logging.getLogger(__name__)

NO_DRAFT = Draft(tokens=())
_scope_of = lru_cache(maxsize=1024)(salted_scope_of)
"""Kept by tenant: every row of every step asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """What may be proposed.

    Attributes:
        vocab_size: the target's V.
        scope: whose earlier requests may inform drafts.
        max_depth: tokens of a chain, or of a tree's longest path, at most; those that were forced count too.
        max_context: tokens of a slot.
        max_nodes: draft tokens of a tree at most; 0 where the target takes no trees.
        prices: of trees; None where nobody knows them.
        node_cost: what a token of a tree costs a request of a fixed gamma, in plain steps, whoever
            its neighbours are; None where nothing was measured.
        trees_may_round_differently: see ``DraftingConfig``.
    """

    vocab_size: int
    max_depth: int
    max_context: int
    scope: HistoryScope = HistoryScope.TENANT
    max_nodes: int = 0
    prices: TreePrices | None = None
    node_cost: float | None = None
    trees_may_round_differently: bool = False

    def max_nodes_of(self, spec: RequestSpec) -> int:
        """Tokens of a tree for a request; 0 where its answer is promised bit for bit.

        Chains have the bits of plain decoding, and so has the leading chain of a tree; its side
        branches are summed in another order, and may turn where two tokens nearly tie.
        """
        if self.max_nodes == 0:
            return 0
        is_fixed = spec.params.is_greedy or spec.speculation.mode is ExactnessMode.SEED_STABLE
        return 0 if is_fixed and not self.trees_may_round_differently else self.max_nodes

    def price(self, gammas: Sequence[int | None]) -> float | None:
        """What a token of a tree costs in a step that drafts; None where nobody knows, or none are taken."""
        if self.prices is None or self.max_nodes == 0:
            return None
        return self.prices.of_step(gammas)


@step_value
class Proposals:
    """Drafts of one step.

    Attributes:
        drafts: per live slot; None for rows that do not decode.
        rows: per live slot, as drafters saw it; empty when none was asked.
        called: every drafter called, by name, and what it raised, if it did; of a chain each part, without its cap.
        num_choices: likeliest target tokens wanted, by drafter that wants any.
        observers: drafters that learn the outcomes of their drafts.
        has_trees: whether any draft is a tree.
    """

    drafts: list[Draft | None]
    rows: Sequence[DraftRow] = ()
    called: Mapping[str, Exception | None] = field(default_factory=dict)
    num_choices: Mapping[str, int] = field(default_factory=dict)
    observers: Collection[str] = ()
    has_trees: bool = False


def propose(
    drafters: Drafters, live: Sequence[Request], gammas: Sequence[int | None], rules: DraftRules
) -> Proposals:
    """A draft, possibly empty, per decoding row.

    Args:
        drafters: by name.
        live: request i holds slot i.
        gammas: per slot, draft tokens wanted at most; None for rows that do not decode.
        rules: what they may propose.
    """
    drafts = [None if gamma is None else NO_DRAFT for gamma in gammas]
    chosen: dict[str, list[int]] = {}
    for slot, gamma in enumerate(gammas):
        if gamma:
            chosen.setdefault(live[slot].speculation.drafter, []).append(slot)
    if not chosen:
        return Proposals(drafts=drafts)
    called: dict[str, Exception | None] = {}
    capabilities = {name: drafters.capabilities(name) for name in chosen}
    rows = draft_rows(live, gammas, rules, capabilities.values())
    num_choices: dict[str, int] = {}
    observers: list[str] = []
    has_trees = False
    for name, slots in chosen.items():
        may_sample = capabilities[name].is_sampled
        if capabilities[name].num_choices:
            num_choices[name] = capabilities[name].num_choices
        if capabilities[name].wants_outcomes:
            observers.append(name)
        try:
            proposed = [
                _checked(draft, rows[slot], rules.vocab_size, may_sample=may_sample)
                for slot, draft in zip(slots, drafters[name].propose(rows, slots), strict=True)
            ]
        except BaseException as raised:  # a drafter may be anybody's; its rows go on without it
            error = as_error(raised)
            *others, failed = drafters.asked(name)
            called = {**dict.fromkeys(others), **called, failed: error}
            if degrade(drafters, live, rows, slots, error):
                drafts = [draft and replace(draft, num_computed=None) for draft in drafts]
            continue
        for part in drafters.asked(name):
            called.setdefault(part, None)
        for slot, draft in zip(slots, proposed, strict=True):
            drafts[slot] = draft
            has_trees = has_trees or draft.parents is not None
            if draft.num_computed is not None and len(chosen) > 1:
                rows[slot] = replace(rows[slot], num_computed=draft.num_computed)
    return Proposals(
        drafts=drafts,
        rows=rows,
        called=called,
        num_choices=num_choices,
        observers=observers,
        has_trees=has_trees,
    )


def report_outcomes(
    drafters: Drafters,
    live: Sequence[Request],
    proposals: Proposals,
    verdicts: Sequence[tuple[int, Verdict]],
) -> None:
    """Report committed verdicts, by slot, to the drafters that were asked for these slots."""
    outcomes_of: dict[str, list[Outcome]] = {}
    rows = proposals.rows
    for slot, verdict in verdicts if rows else ():
        draft, row, request = proposals.drafts[slot], rows[slot], live[slot]
        name = request.speculation.drafter
        if draft is None or not row.gamma or name not in proposals.observers:
            continue
        outcome = Outcome(
            row=replace(row, sampling=request.undrafted, text=request.text),
            num_fed=len(row.text),
            draft_tokens=draft.tokens,
            num_accepted=verdict.num_accepted,
            choices=verdict.choices,
            parents=draft.parents,
            path=verdict.path,
        )
        outcomes_of.setdefault(name, []).append(outcome)
    for name, outcomes in outcomes_of.items():
        try:
            drafters.observe(name, outcomes)
        except BaseException as raised:  # what it failed to learn harms nobody
            as_error(raised)
            logger.exception("drafter %s failed to learn", name)


def row_to_judge(request: Request, draft: Draft, *, num_choices: int = 0) -> SamplingRow:
    """Return the request's row as a sampler sees it, with a draft to judge or none."""
    row = request.undrafted
    if draft is NO_DRAFT and not num_choices and request.constraint is None:
        return row
    return replace(
        row,
        draft_tokens=draft.tokens,
        parents=draft.parents,
        candidates=draft.candidates,
        is_sampled_draft=draft.is_sampled,
        num_choices=num_choices,
        masks=None
        if request.constraint is None
        else request.constraint.masks(draft.tokens, draft.parents),
    )


def draft_rows(
    live: Sequence[Request],
    gammas: Sequence[int | None],
    rules: DraftRules,
    capabilities: Iterable[DrafterCapabilities] = (),
) -> list[DraftRow]:
    """Return the live rows as drafters see them.

    The size of trees follows what they cost beside the others only where gamma does, too: else a
    request's drafts, which decide what noise it uses, would depend on its neighbours.

    Trees are allowed where one of the drafters whose ``capabilities`` these are proposes any.
    """
    takes_trees = rules.max_nodes > 0 and True in [one.proposes_trees for one in capabilities]
    price = rules.price(gammas) if takes_trees else None
    rows = []
    for request, gamma in zip(live, gammas, strict=True):
        spec, is_adaptive = request.spec, request.speculation.is_adaptive
        max_nodes = rules.max_nodes_of(spec) if takes_trees else 0
        # Forced tokens stand between the last judged one and the tree.
        max_nodes = max_nodes and max(0, max_nodes - request.sequence.num_pending)
        num_behind = _num_behind(request, gamma, rules) if gamma else 0
        node_cost = rules.node_cost
        if is_adaptive and price is not None:
            depth = (gamma or 0) + num_behind
            max_nodes, node_cost = affordable_nodes(max_nodes, depth, price), price
        rows.append(
            DraftRow(
                sampling=request.undrafted,
                text=request.text,
                source=spec.source_tokens,
                gamma=gamma or 0,
                num_computed=request.cache.draft_computed,
                key=spec.internal_id,
                scope=_scope_of(rules.scope, spec.tenant if spec.is_known else None, spec.salt),
                params=spec.speculation,
                max_nodes=max_nodes,
                node_cost=node_cost,
                num_remaining=request.sequence.num_remaining,
                is_adaptive=is_adaptive,
                constraint=request.constraint,
                group=request.group.name,
                num_pending=request.sequence.num_pending,
                num_behind=num_behind,
            )
        )
    return rows


def _num_behind(request: Request, gamma: int, rules: DraftRules) -> int:
    """Return the point masses that a row has room for behind ``gamma`` tokens."""
    deepest = rules.max_depth - request.sequence.num_pending
    room = min(deepest, draft_room(request, rules.max_context)) - gamma
    return max(0, min(request.speculation.num_behind, room))


def _checked(draft: Draft, row: DraftRow, vocab_size: int, *, may_sample: bool) -> Draft:
    """What may be verified of a draft: known ids, no more than were asked for.

    Judged as point masses, tokens are exact wherever they are from; by a law that was kept for others, never.
    """
    if draft.is_sampled and not may_sample:
        draft = replace(draft, is_sampled=False, candidates=None)
    if draft.parents is not None and row.max_nodes == 0:
        chain = leading_chain(draft.tokens, draft.parents)
        draft = replace(draft, tokens=chain, parents=None, is_sampled=False, candidates=None)
    if draft.parents is not None:
        tokens, parents = pruned(
            draft.tokens,
            draft.parents,
            max_depth=row.depth,
            max_nodes=row.max_nodes,
            vocab_size=vocab_size,
        )
        if draft.candidates is not None:
            # A tree that is cut offers less than was drawn: its nodes are point masses from then on.
            is_whole = draft.is_sampled and (tokens, parents) == (draft.tokens, draft.parents)
            draft = replace(
                draft, is_sampled=is_whole, candidates=draft.candidates if is_whole else None
            )
        if draft.candidates is not None:
            # Raises where the offers are not those of this tree.
            tree = DraftTree(tokens=tokens, parents=parents, candidates=draft.candidates)
            if not tree.has_distinct_siblings:
                raise ValueError("siblings of a sampled tree must differ: none is drawn twice")
        return replace(draft, tokens=tokens, parents=parents if tokens else None)
    tokens = draft.tokens[: row.depth]
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            tokens = tokens[:index]
            break
    if row.constraint is not None and not draft.is_sampled:
        tokens = tokens[: row.constraint.fits(tokens)]
    return draft if len(tokens) == len(draft.tokens) else replace(draft, tokens=tokens)


def degrade(
    drafters: Drafters,
    live: Sequence[Request],
    rows: list[DraftRow],
    slots: Sequence[int],
    error: Exception,
) -> bool:
    """Switch the failed drafter off for the rows it was asked for.

    Returns:
        Whether the draft model was part of it: then its caches of all live rows are lost.
    """
    name = live[slots[0]].speculation.drafter
    has_model = any(Need.DRAFT_MODEL in one.capabilities.needs for one in drafters.members(name))
    if has_model:
        for slot, request in enumerate(live):
            request.lose_draft_cache()
            rows[slot] = replace(rows[slot], num_computed=request.cache.draft_computed)
    left = drafters.without_model(name) if isinstance(error, EngineError) and has_model else None
    for slot in slots:
        live[slot].degrade(left)
    return has_model
