"""Ouroboros: the draft model drafts phrase by phrase, and the draft is lengthened with K phrases.

The four mechanisms of the source, each of which can be had alone: the draft model accelerated by
phrases ("model/phrases"); lengthening (``num_phrases``, 0 for none); phrases from verification
(``harvests_rejected``); reuse across requests (``history_scope``).

The draft model speaks greedily, or under the shared noise of seed_stable, and all of the draft is
judged as point masses: one draw of the target per node. The phrases behind the draft form a trie
with it, since drawing once per phrase, as equation (8) of the source reads, favours tokens that
several phrases begin with.

Source: Zhao et al. 2024, "Ouroboros" (arXiv:2402.13720).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from engines.base import Engine
from engines.laws import ExactnessMode, Sampler
from runtime.core.tree import merge_chains
from runtime.drafters.base import Draft, DrafterParts, DraftRow, Need, Outcome, Traits
from runtime.drafters.cascade import CascadeDrafter
from runtime.drafters.chain import cut_at_end
from runtime.drafters.phrases import Phrase, PhraseDrafter, corrected


@dataclass(frozen=True, slots=True)
class Tried:
    """Phrases appended to a draft.

    Attributes:
        draft: tokens and parents proposed.
        root: tokens the draft model drafted; the phrases stand behind the last of them.
    """

    draft: Draft
    root: int
    phrases: tuple[Phrase, ...]


class OuroborosDrafter(CascadeDrafter):
    """Proposes the draft model's chain with the newest phrases after its last token.

    Args:
        phrases: the pool, and its harvest.
        num_phrases: K, where a request does not say.
    """

    traits: ClassVar[Traits] = Traits(
        needs=frozenset({Need.DRAFT_MODEL}),
        proposes_trees=True,
        num_choices=1,
        wants_outcomes=True,
    )

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        *,
        target_vocab_size: int,
        chunk: int,
        phrases: PhraseDrafter,
        num_phrases: int,
        phrase_length: int,
    ) -> None:
        super().__init__(
            engine, sampler, target_vocab_size=target_vocab_size, chunk=chunk, guesser=phrases
        )
        self._phrases = phrases
        self._num_phrases = num_phrases
        self._phrase_length = phrase_length
        self._tried: dict[str, Tried] = {}

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Over the bundle's draft model, with the server's pool bounds."""
        assert parts.draft is not None, "offered only where there is a draft model"
        return cls(
            parts.draft,
            parts.sampler,
            target_vocab_size=parts.vocab_size,
            chunk=parts.chunk,
            phrases=PhraseDrafter.from_parts(parts),
            num_phrases=parts.config.num_phrases,
            phrase_length=parts.config.phrase_length,
        )

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """The model's chains, lengthened.

        Raises:
            EngineError: the draft model failed; its caches of all live slots are undefined.
        """
        rows = list(live)
        for slot in chosen:
            rows[slot] = _speaking_greedily(live[slot])
        drafts = super().propose(rows, chosen)
        return [
            self._lengthened(live[slot], draft) for slot, draft in zip(chosen, drafts, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Harvest, and correct the phrases that were reached."""
        self._phrases.observe(outcomes)
        for outcome in outcomes:
            tried = self._tried.pop(outcome.row.key, None)
            if tried is None or tried.draft.tokens != outcome.draft_tokens:
                continue
            if outcome.num_accepted < tried.root or not outcome.choices:
                continue
            pool = self._phrases.state_of(outcome.row).pool
            key = tried.draft.tokens[tried.root - 1]
            kept = outcome.draft_tokens[tried.root : outcome.num_accepted]
            for phrase in tried.phrases:
                said = corrected(outcome, tried.root, phrase)
                if said is not None and said != phrase and phrase != kept:
                    pool.replace(key, phrase, said)

    def forget(self, key: str) -> None:
        """Drop the request's state; its phrases stay in the pool."""
        self._tried.pop(key, None)
        self._phrases.forget(key)

    def _is_enough(self, row: DraftRow, drafted: Sequence[int], gamma: int) -> bool:
        """Phrases take over where they fill the rest of the draft."""
        state = self._phrases.state_of(row)
        return (
            len(drafted) >= max(1, gamma - state.phrase_length)
            and len(drafted) < gamma
            and bool(state.pool.get(drafted[-1], self._wanted(row)))
        )

    def _wanted(self, row: DraftRow) -> int:
        asked = row.params.num_phrases
        return self._num_phrases if asked is None else asked

    def _lengthened(self, row: DraftRow, draft: Draft) -> Draft:
        self._tried.pop(row.key, None)
        room, ends = row.gamma - len(draft.tokens), row.sampling.law.end_token_ids
        if not draft.tokens or room < 1 or draft.tokens[-1] in ends:
            return draft
        # Without trees only the newest phrase fits: a chain.
        count = self._wanted(row) if row.max_nodes else min(self._wanted(row), 1)
        found = self._phrases.state_of(row).pool.get(draft.tokens[-1], count)
        if not found:
            return draft
        chains = [(*draft.tokens, *cut_at_end(phrase, ends)[:room]) for phrase in found]
        if len(chains) == 1:
            longer = replace(draft, tokens=chains[0])
        else:
            tree = merge_chains(chains, max_nodes=row.max_nodes)
            longer = replace(draft, tokens=tree.tokens, parents=tree.parents)
        self._tried[row.key] = Tried(longer, len(draft.tokens), tuple(found))
        return longer


def _speaking_greedily(row: DraftRow) -> DraftRow:
    """The row under which the draft model drafts: greedy, unless noise is shared with the target."""
    sampling = row.sampling
    if sampling.law.is_greedy or sampling.mode is ExactnessMode.SEED_STABLE:
        return row
    return replace(row, sampling=replace(sampling, law=replace(sampling.law, temperature=0.0)))
