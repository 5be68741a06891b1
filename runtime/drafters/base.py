"""The drafter contract: rows of a batch in, short drafts out.

A drafter may propose anything: verification keeps the distribution of the answer for any draft. It must say
truthfully whether a token was drawn from probabilities that the sampler kept, or is a point mass. A drafter that
raises is switched off for the rows it was asked for, which go on plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

from outrider.engines.base import Engine, IntArray, step_value
from outrider.engines.sampling.base import CandidateSampler, Sampler, SamplingRow
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.grammar.base import Constraint

LEAST_NODE_PROB = 0.01
"""Nodes less likely than this are never proposed, however little they cost to verify."""


def least_prob(node_cost: float) -> float:
    """Return the least chance of being kept at which a node is proposed, given its cost in plain steps."""
    return min(max(node_cost, LEAST_NODE_PROB), 1.0)


class Need(StrEnum):
    """A thing that a drafter cannot be built without."""

    DRAFT_MODEL = "draft model"
    PLAIN_DRAFT_MODEL = "draft model that reads tokens alone, and is no head"
    DRAFT_TREES = "draft model that takes trees, and a sampler that keeps their probabilities"
    CORPUS = "corpus"
    HOST_SAMPLER = "sampler that draws from the host's logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCapabilities:
    """A drafter's needs and abilities; they decide which servers have it and which names it may be part of.

    Attributes:
        needs: where one is missing, the server does not have the drafter.
        proposes_trees: whether it may propose trees; else chains only.
        is_sampled: whether it may draw tokens whose probabilities the sampler keeps; else point masses.
        is_guesser: whether it implements ``Guesser`` too, so that "model/NAME" may be asked for.
        num_choices: most likely tokens of the target wanted at every verified position.
        wants_outcomes: whether ``observe`` is to be called.
        lengthens: whether it may put a phrase of point masses behind its gamma tokens.
    """

    needs: frozenset[Need] = frozenset()
    proposes_trees: bool = False
    is_sampled: bool = False
    is_guesser: bool = False
    num_choices: int = 0
    wants_outcomes: bool = False
    lengthens: bool = False


@step_value
class DraftRow:
    """A live row as a drafter sees it.

    Attributes:
        sampling: committed tokens, sampling parameters and seed; ``draft_tokens`` is empty.
        text: [n] int64, what drafts may be found in. It ends with ``sampling.history``, which a model is fed, and may
            begin with a source and ``SEPARATOR``; that one is not to be matched, learnt or proposed.
        gamma: tokens wanted at most, of a tree in depth; 0 for rows that take no part.
        num_behind: point masses that may stand behind these; 0 but for drafters that lengthen.
        num_computed: leading tokens valid in the draft model's cache; -1 while it has the source to read.
        key: names the request for as long as it lives; state is kept under it until ``forget``.
        scope: name of the history that the request uses and adds to; None for none.
        params: what the request asks of its drafter.
        max_nodes: tokens of a tree at most; 0 where only chains are verified, and of a tree its
            leading one.
        node_cost: what verifying one more token of a tree costs in this step, in plain steps; None
            where nothing was measured.
        num_remaining: tokens that the answer may still have.
        is_adaptive: whether gamma is chosen step by step. Where it is not, drafts must not depend on
            other rows: they decide which noise the request's draws use.
        source: what encoders read; empty for models without one.
        constraint: what constrains the answer; None for nothing. Point masses that do not fit are cut off a chain, so
            only who draws from probabilities should mask them (``Constraint.begin`` and ``follow``).
        group: rows of the same group have prompt and source in common; empty for a row alone.
        num_pending: last committed tokens that the constraint forced; the target has not read them yet, nor computed
            anything of the one before them.
    """

    sampling: SamplingRow
    text: IntArray
    gamma: int
    num_computed: int
    key: str = ""
    scope: str | None = None
    params: SpeculationParams = field(default_factory=SpeculationParams)
    max_nodes: int = 0
    node_cost: float | None = None
    num_remaining: int = 0
    is_adaptive: bool = False
    source: tuple[int, ...] = ()
    constraint: Constraint | None = None
    group: str = ""
    num_pending: int = 0
    num_behind: int = 0

    @property
    def depth(self) -> int:
        """Return the tokens of a chain, or of a tree's longest path, at most."""
        return self.gamma + self.num_behind

    @property
    def quoted(self) -> IntArray:
        """Return the source as far as ``text`` holds it, [m] int64; empty where it does not."""
        return self.text[: max(0, len(self.text) - len(self.sampling.history) - 1)]


@step_value
class Draft:
    """A drafter's proposal for one row.

    Attributes:
        tokens: at most ``depth`` ids, an end token only in last place; empty is plain decoding. Of a
            tree at most ``max_nodes`` ids, no path longer than ``depth``.
        is_sampled: whether the sampler keeps the probabilities each token was drawn from.
        num_computed: leading tokens now valid in the draft model's cache, -1 where it has a source to read; None
            when untouched.
        parents: None for a chain; of a tree, ``runtime.core.tree.DraftTree.parents``. Without
            ``candidates`` its nodes are judged as point masses, also where they were drawn.
        candidates: of a tree whose candidates the sampler drew and keeps the probabilities of,
            ``DraftTree.candidates``.
        num_calls: calls of the draft model that drafted it; None for one per token.
        expected: of these tokens, how many the drafter expects to be kept; None where it does not
            say. Decides in a chain of fallbacks whether the next drafter is asked.
    """

    tokens: tuple[int, ...]
    is_sampled: bool = False
    num_computed: int | None = None
    parents: tuple[int, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    num_calls: int | None = None
    expected: float | None = None


@step_value
class Outcome:
    """The result of one row's draft, after the commit.

    Attributes:
        row: as it was when the draft was proposed, except that ``sampling.history`` and ``text`` now
            end with what was committed since.
        num_fed: tokens of ``text`` when the draft was proposed; the last of them is the root.
        draft_tokens: the whole draft.
        num_accepted: leading draft tokens the target kept; of a tree the nodes of the kept path.
        choices: entry i holds the target's most likely tokens, likeliest first, after the root and
            the first i draft tokens; empty unless the drafter's capabilities ask. Behind the first
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
    """The parts that drafters may be built from.

    Attributes:
        draft: the draft model's engine, if the bundle has one.
        sampler: draws draft tokens.
        vocab_size: the target's V; nothing at or beyond it is proposed.
        chunk: tokens fed to all lagging rows together in one step.
        max_gamma: draft tokens of one row at most.
        max_depth: of one row, with what stands behind these.
        max_nodes: tokens of a tree that the target verifies, its root left out; 0 for none.
        config: settings of all drafters.
    """

    draft: Engine | None
    sampler: Sampler
    vocab_size: int
    chunk: int
    max_gamma: int = 8
    max_depth: int = 8
    max_nodes: int = 0
    config: DraftingConfig = field(default_factory=DraftingConfig)

    def has(self, need: Need) -> bool:
        """Return whether these parts meet a need."""
        if need is Need.DRAFT_MODEL:
            return self.draft is not None
        if need is Need.PLAIN_DRAFT_MODEL:
            return self.draft is not None and not self.draft.limits.reads_features
        if need is Need.DRAFT_TREES:
            has_trees = self.draft is not None and self.draft.limits.max_tree_nodes > 1
            return has_trees and isinstance(self.sampler, CandidateSampler)
        if need is Need.HOST_SAMPLER:
            return isinstance(self.sampler, CandidateSampler)
        return bool(self.config.datastore)


class Proposer(Protocol):
    """Proposes drafts: a drafter, or several composed."""

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
    def capabilities(self) -> DrafterCapabilities:
        """Return its needs and abilities; an attribute of the class, known before one is built."""
        ...

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build a drafter of a server; ``parts`` meet its needs."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn the outcomes of drafts that this drafter was asked for, empty ones included."""
        ...

    def forget(self, key: str) -> None:
        """Drop all that is kept under the key of a request, which has ended."""
        ...


@runtime_checkable
class ChecksParams(Protocol):
    """A drafter that refuses requests which it could not draft for as they ask."""

    def check(self, params: SpeculationParams, gamma: int) -> None:
        """Refuse a request whose drafts have ``gamma`` tokens at most.

        Raises:
            RequestError: names the field, what it needs and what there is.
        """
        ...


@runtime_checkable
class Guesser(Protocol):
    """A drafter that can also continue a context beyond the committed tokens, for a cascade."""

    @property
    def capabilities(self) -> DrafterCapabilities:
        """Return capabilities with ``is_guesser`` set."""
        ...

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return at most ``length`` tokens that may follow the committed tokens and ``drafted``.

        For one row the committed tokens never shrink; ``drafted`` may be anything each time.
        """
        ...
