"""The drafter contract: rows of a batch in, short drafts out.

A drafter may propose anything: the verification keeps the answer's law whatever the draft. What it
must say truthfully is whether each token was drawn from a law the sampler kept, or is a point mass.
A drafter that raises is switched off for the rows it was asked for, which go on plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from outrider.engines.base import Engine, IntArray
from outrider.engines.sampling.base import CandidateSampler, Sampler, SamplingRow
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.core.params import RequestSpec, SpeculationParams

LEAST_NODE_PROB = 0.01
"""Nodes less likely than this are never proposed, however little they cost to verify."""


def least_prob(node_cost: float) -> float:
    """Chance of being kept from which on a node is proposed, given what it costs in plain steps."""
    return min(max(node_cost, LEAST_NODE_PROB), 1.0)


class Need(StrEnum):
    """What a drafter cannot be built without."""

    DRAFT_MODEL = "draft model"
    DRAFT_TREES = "draft model that takes trees, and a sampler that keeps their laws"
    CORPUS = "corpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a drafter needs and proposes; decides where it is offered and what it may be part of.

    Attributes:
        needs: what it cannot be built without; where one is missing the drafter is not offered.
        proposes_trees: whether it may propose trees; else chains only.
        is_sampled: whether it may draw tokens from laws that the sampler keeps; else point masses.
        is_guesser: whether it implements ``Guesser`` too, so that "model/NAME" may be asked for.
        num_choices: most likely tokens of the target wanted at every verified position.
        wants_outcomes: whether ``observe`` is to be called.
    """

    needs: frozenset[Need] = frozenset()
    proposes_trees: bool = False
    is_sampled: bool = False
    is_guesser: bool = False
    num_choices: int = 0
    wants_outcomes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """A live row as a drafter sees it.

    Attributes:
        sampling: committed tokens, law and seed; ``draft_tokens`` is empty.
        gamma: tokens wanted at most, of a tree in depth; 0 for rows that take no part.
        num_computed: leading tokens valid in the draft model's cache.
        key: names the request for as long as it lives; state is kept under it until ``forget``.
        scope: whose history the request may use and add to; None for nobody's.
        params: what the request asks of its drafter.
        max_nodes: tokens of a tree at most; 0 where only chains are verified, and of a tree its
            leading one.
        node_cost: what verifying one more token of a tree costs in this step, in plain steps; None
            where nothing was measured.
        is_adaptive: whether gamma is chosen step by step. Where it is not, what is drafted must be
            the request's own affair: it decides which noise its draws use.
    """

    sampling: SamplingRow
    gamma: int
    num_computed: int
    key: str = ""
    scope: str | None = None
    params: SpeculationParams = field(default_factory=SpeculationParams)
    max_nodes: int = 0
    node_cost: float | None = None
    is_adaptive: bool = False

    def after(self, sampling: SamplingRow) -> DraftRow:
        """The same row when tokens were committed since."""
        return DraftRow(
            sampling=sampling,
            gamma=self.gamma,
            num_computed=self.num_computed,
            key=self.key,
            scope=self.scope,
            params=self.params,
            max_nodes=self.max_nodes,
            node_cost=self.node_cost,
            is_adaptive=self.is_adaptive,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a drafter proposes for one row.

    Attributes:
        tokens: at most gamma ids, an end token only in last place; empty is plain decoding. Of a
            tree at most ``max_nodes`` ids, no path longer than gamma.
        is_sampled: whether the sampler keeps the law each token was drawn from.
        num_computed: leading tokens now valid in the draft model's cache; None when untouched.
        parents: None for a chain; of a tree, ``runtime.core.tree.DraftTree.parents``. Without
            offers its nodes are judged as point masses, whatever they were drawn from.
        candidates: of a tree whose candidates the sampler drew and keeps the laws of,
            ``DraftTree.candidates``.
        is_without_replacement: of such a tree, how siblings were drawn.
        expected: of these tokens, how many the drafter expects to be kept; None where it does not
            say. Decides in a chain of fallbacks whether the next drafter is asked.
    """

    tokens: tuple[int, ...]
    is_sampled: bool = False
    num_computed: int | None = None
    parents: tuple[int, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    is_without_replacement: bool = False
    expected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one row's draft, after the commit.

    Attributes:
        row: as it was when the draft was proposed, except that ``sampling.history`` [n] int64 now
            ends with what was committed since.
        num_fed: committed tokens when the draft was proposed; the last of them is the root.
        draft_tokens: the whole draft.
        num_accepted: leading draft tokens the target kept; of a tree the nodes of the kept path.
        choices: entry i holds the target's most likely tokens, likeliest first, after the root and
            the first i draft tokens; empty unless the drafter's traits ask. Behind the first
            rejected token the context is one that was never committed. Of a tree entry i is of
            node i.
        parents: of a tree, as in ``Draft``.
        path: of a tree, the nodes kept, from the root's child down.
    """

    row: DraftRow
    num_fed: int
    draft_tokens: tuple[int, ...]
    num_accepted: int
    choices: tuple[tuple[int, ...], ...] = ()
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """What drafters may be built from.

    Attributes:
        draft: the draft model's engine, if the bundle has one.
        sampler: draws draft tokens.
        vocab_size: the target's V; nothing at or beyond it is proposed.
        chunk: tokens fed to all lagging rows together in one step.
        max_gamma: draft tokens of one row at most.
        config: settings of all drafters.
    """

    draft: Engine | None
    sampler: Sampler
    vocab_size: int
    chunk: int
    max_gamma: int = 8
    config: DraftingConfig = field(default_factory=DraftingConfig)

    @property
    def corpus(self) -> Path | None:
        """Folder made by ``outrider datastore build``, if one is configured."""
        return Path(self.config.datastore) if self.config.datastore else None

    def has(self, need: Need) -> bool:
        """Whether a need can be met here."""
        if need is Need.DRAFT_MODEL:
            return self.draft is not None
        if need is Need.DRAFT_TREES:
            has_trees = self.draft is not None and self.draft.limits.max_tree_nodes > 1
            return has_trees and isinstance(self.sampler, CandidateSampler)
        return need is Need.CORPUS and self.corpus is not None


class Proposer(Protocol):
    """Whatever proposes drafts: a drafter, or several composed."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Draft for some of the live rows.

        Args:
            live: every live row, row i holding slot i.
            chosen: slots to draft for, ascending; their gamma is at least 1.

        Returns:
            One draft per chosen slot.

        Raises:
            EngineError: the draft model failed; its caches of all live slots are undefined.
        """
        ...


class Drafter(Proposer, Protocol):
    """One way to propose drafts. Called by one thread: the one that owns the engines."""

    @property
    def traits(self) -> Traits:
        """What it needs and proposes; an attribute of the class, known before one is built."""
        ...

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """A drafter of a server; ``parts`` have what ``traits`` need."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of drafts this drafter was asked for, empty ones included."""
        ...

    def forget(self, key: str) -> None:
        """A request has ended, well or not: drop what is kept under its key, if anything is."""
        ...


@runtime_checkable
class Guesser(Protocol):
    """A drafter that can also continue a context beyond the committed tokens, for a cascade."""

    @property
    def traits(self) -> Traits:
        """With ``is_guesser`` set."""
        ...

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """At most ``length`` tokens that may follow the committed tokens and ``drafted``.

        For one row the committed tokens never shrink; ``drafted`` may be anything each time.
        """
        ...


class Text(Protocol):
    """A live request as a drafter sees it that looks at its text alone; one object for all its life."""

    @property
    def spec(self) -> RequestSpec:
        """What was asked for."""
        ...

    @property
    def tokens(self) -> IntArray:
        """[N] int64, the same array for life; the first ``num_known`` are committed."""
        ...

    @property
    def num_prompt(self) -> int:
        """Leading tokens that are prompt."""
        ...

    @property
    def num_known(self) -> int:
        """Committed tokens."""
        ...


@runtime_checkable
class TextDrafter(Drafter, Protocol):
    """A drafter of this package that looks at texts alone, and is asked for many at once without further ado.

    It proposes what ``propose`` and ``observe`` would for chains. Only tokens that were committed somewhere are
    proposed, no more than wanted, and an end token only in last place: nobody checks.
    """

    def continue_texts(
        self, texts: Sequence[Text], lengths: Sequence[int], scope: HistoryScope
    ) -> list[tuple[int, ...]]:
        """Per text at most so many tokens, each number at least 1."""
        ...

    def note_texts(self, texts: Sequence[Text]) -> None:
        """These were asked for, and what came of it is committed; where ``traits.wants_outcomes``."""
        ...
