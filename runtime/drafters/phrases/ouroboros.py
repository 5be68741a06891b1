"""Ouroboros: the draft model drafts phrase by phrase, and the draft is lengthened with K phrases.

The four mechanisms of the source, each of which can be switched off: the draft model accelerated by
phrases, with a lookahead window that finds new ones (``phrase_draft``; ``window``, 0 for none);
lengthening (``num_phrases``, 0 for none); phrases from verification (``harvests_rejected``); reuse
across requests (``history_scope``).

The draft model speaks greedily, or under the shared noise of seed_stable, and all of the draft is
judged as point masses: one draw of the target per node. So the drafting may be lenient: a phrase's
token stays in the draft while the draft model finds it ``draft_lenience`` times as likely as its own
choice, since a phrase that was verified before is often right where a small model is not. The
phrases behind the draft form a trie with it, since drawing once per phrase, as equation (8) of the
source reads, favours tokens that several phrases begin with.

Source: Zhao et al. 2024, "Ouroboros" (arXiv:2402.13720).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Need,
    Outcome,
)
from outrider.runtime.drafters.branches import as_draft
from outrider.runtime.drafters.chain import cut_at_end
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.phrases.phrase_passes import PhrasePasses
from outrider.runtime.drafters.phrases.phrases import PhraseDrafter, PhrasePool, corrected
from outrider.runtime.drafters.phrases.window import Phrase

USUAL = DraftingConfig()


@dataclass(frozen=True, slots=True)
class Tried:
    """Phrases appended to a draft.

    Attributes:
        tokens: proposed.
        root: tokens the draft model drafted; the phrases stand behind the last of them.
    """

    tokens: tuple[int, ...]
    root: int
    phrases: tuple[Phrase, ...]


class OuroborosDrafter(ModelDrafter):
    """Proposes the draft model's chain with the newest phrases after its last token, on top of gamma.

    ``root_phrases`` more are tried beside the draft, behind the last committed token, where a row takes trees: an
    addition to the source, for targets whose nodes cost little.
    """

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        needs=frozenset({Need.DRAFT_MODEL, Need.PLAIN_DRAFT_MODEL}),
        proposes_trees=True,
        num_choices=1,
        wants_outcomes=True,
        lengthens=True,
    )

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        self._config = parts.config
        self._phrases = PhraseDrafter(parts.config)
        self.passes = PhrasePasses(self._engine, parts, self._phrases)
        self._tried: dict[str, Tried] = {}
        self._max_depth, self._max_nodes = parts.max_depth, parts.max_nodes
        # Whether the operator asked for the phrases that the server's settings have.
        sizes = (parts.config.phrase_length, parts.config.num_phrases)
        self._is_unusual = sizes != (USUAL.phrase_length, USUAL.num_phrases)

    def check(self, params: SpeculationParams, gamma: int) -> None:
        """Refuse a window, a phrase or a number of phrases that was asked for and finds no room; see ``ChecksParams``.

        Defaults that find no room are cut: fewer phrases, or shorter ones.
        """
        config = self._config
        length = params.phrase_length or config.phrase_length
        count = config.num_phrases if params.num_phrases is None else params.num_phrases
        width = config.draft_window if params.window is None else params.window
        deepest, nodes = gamma + length, gamma + count * length
        if count and deepest > self._max_depth and (params.phrase_length or self._is_unusual):
            rule = f"needs drafts of {deepest} tokens with a gamma of {gamma}: at most {self._max_depth} are verified"
            raise RequestError("speculation.phrase_length", rule)
        is_asked = params.num_phrases is not None or self._is_unusual
        if count > 1 and nodes > self._max_nodes and is_asked:
            rule = (
                f"needs trees of {nodes} draft tokens with a gamma of {gamma}: the target verifies {self._max_nodes}; "
                "export with --max-tree-nodes, and serve with a drafter that proposes trees"
            )
            raise RequestError("speculation.num_phrases", rule)
        self.passes.check_window(width, length, gamma)

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Propose the model's chains, lengthened."""
        rows = list(live)
        for slot in chosen:
            rows[slot] = _speaking_greedily(live[slot])
        drafts = super().propose(rows, chosen)
        num_calls = self.passes.num_calls
        return [
            self._lengthened(live[slot], replace(draft, num_calls=num_calls.get(slot)))
            for slot, draft in zip(chosen, drafts, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Add phrases from outcomes, and correct those that were reached."""
        self._phrases.observe(outcomes)
        if not self._config.harvests_rejected:
            return
        for outcome in outcomes:
            tried = self._tried.pop(outcome.row.key, None)
            if tried is None or tried.tokens != outcome.draft_tokens:
                continue
            if outcome.num_accepted < tried.root or not outcome.choices:
                continue
            pool = self._phrases.state_of(outcome.row).pool
            key = tried.tokens[tried.root - 1]
            kept = outcome.draft_tokens[tried.root : outcome.num_accepted]
            for phrase in tried.phrases:
                said = corrected(outcome, tried.root, phrase)
                if said is not None and said != phrase and phrase != kept:
                    pool.replace(key, phrase, said)

    def forget(self, key: str) -> None:
        """Drop the request's state; its phrases stay in the pool."""
        self._tried.pop(key, None)
        self.passes.forget(key)
        self._phrases.forget(key)

    def _draft_in_lockstep(
        self, live: Sequence[DraftRow], gammas: dict[int, int], computed: list[int]
    ) -> dict[int, list[int]]:
        return self.passes.draft(live, gammas, computed)

    def _lengthened(self, row: DraftRow, draft: Draft) -> Draft:
        self._tried.pop(row.key, None)
        room, ends = row.depth - len(draft.tokens), row.sampling.params.end_token_ids
        if not draft.tokens or room < 1 or draft.tokens[-1] in ends:
            return draft
        state, count = self._phrases.state_of(row), self._phrases.wanted(row)
        found = state.pool.get(draft.tokens[-1], count)
        if not found and not row.max_nodes:
            return draft
        # The newest phrase goes on with its own.
        newest = self._phrases.continued(state, found[0], room)[:room] if found else ()
        if row.max_nodes:
            longer = self._branched(row, draft, state.pool, [newest, *found[1:]])
        else:
            longer = replace(draft, tokens=draft.tokens + cut_at_end(newest, ends))
        self._tried[row.key] = Tried(longer.tokens, len(draft.tokens), tuple(found))
        return longer

    def _branched(
        self, row: DraftRow, draft: Draft, pool: PhrasePool, phrases: Sequence[Phrase]
    ) -> Draft:
        """Return the draft with all phrases behind it, and some behind the last committed token."""
        tree, ends, drafted = TreeBuilder(), row.sampling.params.end_token_ids, draft.tokens
        tree.add_chain(drafted)
        for phrase in phrases:
            behind = cut_at_end(phrase[: row.depth - len(drafted)], ends)
            tree.add_chain((*drafted, *behind), max_nodes=row.max_nodes)
        for phrase in pool.get(int(row.text[-1]), self._config.root_phrases):
            tree.add_chain(cut_at_end(phrase[: row.gamma], ends), max_nodes=row.max_nodes)
        longer = as_draft(tuple(tree.tokens), tuple(tree.parents))
        return replace(draft, tokens=longer.tokens, parents=longer.parents)


def _speaking_greedily(row: DraftRow) -> DraftRow:
    """Return the row under which the draft model drafts: greedy, unless noise is shared with the target."""
    sampling = row.sampling
    if sampling.params.is_greedy or sampling.mode is ExactnessMode.SEED_STABLE:
        return row
    return replace(
        row, sampling=replace(sampling, params=replace(sampling.params, temperature=0.0))
    )
