"""The phrase pool of Ouroboros: short continuations by the token before them, and where they come from.

Phrases are guesses only, so they may come from anywhere: from what was committed, from what the
target said at positions of a draft that was rejected, from phrases that were tried and corrected.

Source: Zhao et al. 2024, "Ouroboros" (arXiv:2402.13720), sections 3.3 and 3.4. Our phrase_length is
the paper's beta minus 2: tokens after the key token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.base import Draft, DrafterCapabilities, DraftRow, Outcome
from outrider.runtime.drafters.branches import as_draft
from outrider.runtime.drafters.chain import ChainDrafter, cut_at_end
from outrider.runtime.drafters.phrases.window import Phrase
from outrider.runtime.drafters.scopes import Scoped


class PhrasePool:
    """Per key token its phrases, last written first to be used and last to go. Thread-safe.

    Args:
        pool_size: phrases of one key (G in the source).
        max_keys: keys; the one written longest ago goes first.
    """

    def __init__(self, *, pool_size: int, max_keys: int) -> None:
        self._pool_size = pool_size
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._phrases: OrderedDict[int, OrderedDict[Phrase, None]] = OrderedDict()

    def put(self, key: int, phrase: Phrase) -> None:
        """Add a phrase, or make it the newest again."""
        self.put_all([(key, phrase)])

    def put_all(self, found: Iterable[tuple[int, Phrase]]) -> None:
        """Add phrases by key, in order."""
        pool = self._phrases
        with self._lock:
            for key, phrase in found:
                held = pool.get(key)
                if held is None:
                    held = pool[key] = OrderedDict()
                else:
                    pool.move_to_end(key)
                held[phrase] = None
                held.move_to_end(phrase)
                if len(held) > self._pool_size:
                    held.popitem(last=False)
                if len(pool) > self._max_keys:
                    pool.popitem(last=False)

    def get(self, key: int, count: int) -> list[Phrase]:
        """Return at most ``count`` phrases, newest first."""
        with self._lock:
            held = self._phrases.get(key)
            return list(islice(reversed(held), count)) if held else []

    def replace(self, key: int, old: Phrase, new: Phrase) -> None:
        """Put a corrected phrase in the place of one that was tried."""
        with self._lock:
            self._phrases.get(key, OrderedDict()).pop(old, None)
        self.put(key, new)

    def __len__(self) -> int:
        """Return the number of phrases held."""
        with self._lock:
            return sum(map(len, self._phrases.values()))


def matching_segments(outcome: Outcome, length: int) -> Iterator[tuple[int, Phrase]]:
    """Find keys and phrases at the nodes of a draft that were not kept (rule H1).

    Behind a node's token comes the target's choice there; as long as the draft goes on with that
    very token, the target's choice behind it comes next. Only whole phrases count.
    """
    tokens, choices = outcome.draft_tokens, outcome.choices
    kept = _path(outcome)
    # Children stand behind their parents: nodes after these have too few of them.
    rejected = [node for node in range(1, len(tokens) - length + 2) if node not in kept]
    if not rejected:
        return
    child = _children(outcome)
    for node in rejected:
        phrase: list[int] = []
        at: int | None = node
        while at is not None and len(phrase) < length:
            phrase.append(choices[at][0])
            at = child(at, phrase[-1])
        if len(phrase) == length:
            yield tokens[node - 1], tuple(phrase)


def windows(tokens: Sequence[int], length: int) -> Iterator[tuple[int, Phrase]]:
    """Yield every token of a text with the ``length`` tokens after it (rule H3)."""
    for start in range(len(tokens) - length):
        yield tokens[start], tuple(tokens[start + 1 : start + 1 + length])


def corrected(outcome: Outcome, root: int, phrase: Phrase) -> Phrase | None:
    """Return the target's own tokens in the place of a phrase tried behind node ``root`` (rule H2).

    Returns:
        Its choice behind the root and behind each of the phrase's tokens but the last; None if not
        all of the phrase was verified.
    """
    child = _children(outcome)
    said = [outcome.choices[root][0]]
    node: int | None = root
    for token in phrase[:-1]:
        node = child(node, token) if node is not None else None
        if node is None:
            return None
        said.append(outcome.choices[node][0])
    return tuple(said)


@dataclass(slots=True)
class PhraseState:
    """One request: its pool, and the committed tokens that phrases have yet to be cut from."""

    pool: PhrasePool
    phrase_length: int
    tail: list[int] = field(default_factory=list)


class PhraseDrafter(ChainDrafter[PhraseState]):
    """Proposes the newest phrases after the last token, behind the end of the newest its own, and so on."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        is_guesser=True, proposes_trees=True, num_choices=1, wants_outcomes=True
    )

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__(config)
        self._pools = Scoped(
            lambda: PhrasePool(pool_size=config.pool_size, max_keys=config.pool_keys),
            max_scopes=config.max_scopes,
        )

    def wanted(self, row: DraftRow) -> int:
        """Return K of a request; at most 1 for rows that take no trees."""
        asked = row.params.num_phrases
        count = self._config.num_phrases if asked is None else asked
        return count if row.max_nodes else min(count, 1)

    def chains(self, row: DraftRow) -> list[Phrase]:
        """Return phrases behind the last token, newest first; the newest goes on to the draft's full depth."""
        state, ends = self.state_of(row), row.sampling.params.end_token_ids
        found = state.pool.get(state.tail[-1], max(self.wanted(row), 1))
        if found:
            found[0] = self.continued(state, found[0], row.gamma)
        return [cut_at_end(chain[: row.gamma], ends) for chain in found]

    def draft(self, row: DraftRow) -> Draft:
        """Return a trie of phrases, or the chain of the newest."""
        chains = self.chains(row)
        if not row.max_nodes:
            return Draft(tokens=chains[0] if chains else ())
        tree = TreeBuilder()
        for chain in chains:
            tree.add_chain(chain, max_nodes=row.max_nodes)
        return as_draft(tuple(tree.tokens), tuple(tree.parents))

    def new_state(self, row: DraftRow) -> PhraseState:
        """Return a state on the pool of the row's scope and phrase length."""
        length = row.params.phrase_length or self._config.phrase_length
        scope = None if row.scope is None else (row.scope, length)
        return PhraseState(self._pools.of(scope), length)

    def push(self, state: PhraseState, tokens: list[int]) -> None:
        """Cut phrases from committed tokens, the prompt's included."""
        state.tail += tokens
        state.pool.put_all(windows(state.tail, state.phrase_length))
        del state.tail[: -state.phrase_length]

    def end_text(self, state: PhraseState) -> None:
        """Keep the phrases alone."""
        state.tail.clear()

    def extend(self, state: PhraseState, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return phrases end to end."""
        found = state.pool.get(drafted[-1] if drafted else state.tail[-1], 1)
        return self.continued(state, found[0], length)[:length] if found else ()

    def continued(self, state: PhraseState, phrase: Phrase, length: int) -> Phrase:
        """Return a phrase with those behind its end, ``length`` tokens or more where there are as many."""
        while len(phrase) < length:
            found = state.pool.get(phrase[-1], 1)
            if not found:
                break
            phrase += found[0]
        return phrase

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take phrases from committed tokens and, unless that is off, from rejected ones."""
        for outcome in outcomes:
            state = self.state_of(outcome.row)
            if self._config.harvests_rejected and outcome.choices:
                state.pool.put_all(matching_segments(outcome, state.phrase_length))


def _children(outcome: Outcome) -> Callable[[int, int], int | None]:
    """Return a function from a node and a token to the node's child that holds it; None where there is none."""
    tokens, parents = outcome.draft_tokens, outcome.parents
    if parents is None:
        return lambda node, token: node + 1 if tokens[node : node + 1] == (token,) else None
    child = {
        (parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1)
    }
    return lambda node, token: child.get((node, token))


def _path(outcome: Outcome) -> Sequence[int]:
    return range(1, outcome.num_accepted + 1) if outcome.parents is None else outcome.path
