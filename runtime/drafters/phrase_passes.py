"""Passes of a draft model that verify phrases: the first of Ouroboros' mechanisms.

Each pass feeds the draft model the tokens it misses, a trie of phrases that may follow and, if it is
asked to, a lookahead window. The draft model's choices are followed through the trie as far as it
goes; so one pass drafts 1 .. phrase_length + 1 tokens or more, and what the window found enters the
pool.

Source: Zhao et al. 2024, "Ouroboros" (arXiv:2402.13720), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from engines.base import Engine, FloatArray, Span
from engines.laws import ExactnessMode, Sampler, SamplingRow, are_plain_greedy
from runtime.core.drafting import DraftingConfig
from runtime.core.tree import TreeBuilder
from runtime.drafters.base import DraftRow
from runtime.drafters.pass_guess import Guess, cut
from runtime.drafters.phrases import PhraseDrafter
from runtime.drafters.window import LookaheadWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How the draft model is run.

    Attributes:
        phrase_draft: whether phrases accelerate it; else one pass drafts one token.
        draft_lenience: a phrase's token is drafted while the draft model finds it this many times
            as likely as its own choice; 1 for its own choice alone.
        draft_passes: passes after which a phrase is taken for the rest of a draft, where there is
            one behind its last token.
        draft_window: W of the window, where a request does not say; 0 for none.
    """

    phrase_draft: bool = True
    draft_lenience: float = 0.3
    draft_passes: int = 1
    draft_window: int = 0

    @classmethod
    def of(cls, config: DraftingConfig) -> Self:
        """Those of a server."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(cls)})


class PhrasePasses:
    """Drafts with an engine, phrase by phrase.

    Attributes:
        num_passes: of the draft model.
        num_drafted: tokens they yielded.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        phrases: PhraseDrafter,
        target_vocab_size: int,
        settings: PassSettings,
    ) -> None:
        self._engine = engine
        self._sampler = sampler
        self._phrases = phrases
        self._target_vocab_size = target_vocab_size
        self._num_known = min(engine.limits.vocab_size, target_vocab_size)
        self._settings = settings
        self._log_lenience = math.log(settings.draft_lenience)
        self._windows: dict[str, LookaheadWindow] = {}
        self.num_passes = 0
        self.num_drafted = 0

    def forget(self, key: str) -> None:
        """Drop the request's window."""
        self._windows.pop(key, None)

    def draft(
        self, live: Sequence[DraftRow], gammas: dict[int, int], computed: list[int]
    ) -> dict[int, list[int]]:
        """Draft for rows by slot; see ``ModelDrafter``.

        Raises:
            EngineError: the draft model failed; its caches of all live slots are undefined.
        """
        drafted: dict[int, list[int]] = {slot: [] for slot in gammas}
        # The lists grow under the rows, which are built once.
        rows = {
            slot: replace(live[slot].sampling, draft_tokens=tokens)
            for slot, tokens in drafted.items()
        }
        missing = {
            slot: tuple(live[slot].sampling.history[computed[slot] :].tolist()) for slot in gammas
        }
        num_passes = 0
        while missing:
            num_passes += 1
            guesses = {
                slot: self._guess(live[slot], drafted[slot], gammas[slot], computed[slot], fed)
                for slot, fed in missing.items()
            }
            logits = self._feed(computed, missing, guesses)
            paths = self._walk(rows, logits, guesses, drafted, gammas)
            following: dict[int, tuple[int, ...]] = {}
            for slot, fed in missing.items():
                self._learn(live[slot], fed[-1], guesses[slot], logits[slot])
                self._keep(slot, len(fed), paths[slot])
                computed[slot] += len(fed) + len(paths[slot])
                is_enough = num_passes >= self._settings.draft_passes
                if self._goes_on(live[slot], drafted[slot], gammas[slot], is_enough):
                    following[slot] = (drafted[slot][-1],)
            missing = following
        self.num_drafted += sum(len(tokens) for tokens in drafted.values())
        return drafted

    def _goes_on(self, row: DraftRow, drafted: Sequence[int], gamma: int, is_enough: bool) -> bool:
        """Until the draft is full, or enough passes were made and a phrase goes on from here."""
        if len(drafted) >= gamma or drafted[-1] in row.sampling.law.end_token_ids:
            return False
        pool, count = self._phrases.state_of(row).pool, self._phrases.wanted(row)
        return not (is_enough and pool.get(drafted[-1], count))

    def _guess(
        self,
        row: DraftRow,
        drafted: list[int],
        gamma: int,
        num_computed: int,
        fed: tuple[int, ...],
    ) -> Guess:
        tree = TreeBuilder()
        limits = self._engine.limits
        # The pass itself adds a token behind the longest path.
        room = min(gamma - len(drafted) - 1, limits.max_extend - len(fed))
        for chain in self._chains(row, drafted, room):
            if not tree.tokens or len(fed) + len(tree.tokens) + len(chain) <= limits.max_tree_nodes:
                tree.add_chain(chain)
        num_nodes = len(tree.tokens)
        window = self._window_of(row)
        if (
            window is None
            or len(fed) + num_nodes + window.num_nodes
            > min(limits.max_tree_nodes, limits.max_extend)
            or num_computed + len(fed) + window.depth > limits.max_context
        ):
            return Guess(tree, num_nodes)
        return Guess(tree, num_nodes, window, tuple(window.place(tree)))

    def _chains(self, row: DraftRow, drafted: list[int], room: int) -> list[tuple[int, ...]]:
        """Phrases that may follow, cut before anything the draft model does not know."""
        if room < 1 or not self._settings.phrase_draft:
            return []
        state, last = self._phrases.state_of(row), drafted[-1:]
        key = last[0] if last else int(row.sampling.history[-1])
        chains = [self._phrases.guess(row, tuple(drafted), room)]
        if self._engine.limits.max_tree_nodes:
            chains += state.pool.get(key, self._phrases.num_guesses)[1:]
        ends = frozenset(row.sampling.law.end_token_ids)
        return [cut(chain[:room], self._num_known, ends) for chain in chains]

    def _window_of(self, row: DraftRow) -> LookaheadWindow | None:
        """The row's window; None where none is asked for, or the engine takes no trees."""
        found = self._windows.get(row.key)
        if found is None and self._settings.phrase_draft:
            asked, length = row.params.window, self._phrases.state_of(row).phrase_length
            width = self._settings.draft_window if asked is None else asked
            if width and length > 1 and self._engine.limits.max_tree_nodes:
                text = row.sampling.history.tolist()
                found = LookaheadWindow.from_text(text, width=width, phrase_length=length)
                self._windows[row.key] = found
        return found

    def _feed(
        self,
        computed: Sequence[int],
        missing: dict[int, tuple[int, ...]],
        guesses: dict[int, Guess],
    ) -> FloatArray:
        """Logits [B, R, V]; column n of a row follows node n of its guess, 0 being the root."""
        self.num_passes += 1
        return self._engine.extend(
            [
                guesses[slot].span(slot, start, missing[slot])
                if slot in missing
                else Span(slot=slot, start=start, tokens=(), num_logits=0)
                for slot, start in enumerate(computed)
            ]
        )

    def _walk(
        self,
        rows: Mapping[int, SamplingRow],
        logits: FloatArray,
        guesses: dict[int, Guess],
        drafted: dict[int, list[int]],
        gammas: dict[int, int],
    ) -> dict[int, list[int]]:
        """Append what the draft model says, node by node; the nodes of each guess that it went through."""
        paths: dict[int, list[int]] = {slot: [] for slot in guesses}
        greatest: list[list[int]] | None = None
        if are_plain_greedy([rows[slot] for slot in guesses]):
            # Of every node at once: cheaper than asking the sampler node by node.
            greatest = logits[:, :, : self._target_vocab_size].argmax(axis=-1).tolist()
        going = list(guesses)
        while going:
            nodes = [paths[slot][-1] if paths[slot] else 0 for slot in going]
            if greatest is None:
                drawn = self._draw(rows, logits, going, nodes)
            else:
                drawn = [greatest[slot][node] for slot, node in zip(going, nodes, strict=True)]
            agreed = []
            for slot, node, token in zip(going, nodes, drawn, strict=True):
                said = self._settled(rows[slot], guesses[slot], node, logits[slot, node], token)
                drafted[slot].append(said)
                child = guesses[slot].tree.child(node, said)
                if child is not None and len(drafted[slot]) < gammas[slot]:
                    paths[slot].append(child)
                    if said not in rows[slot].law.end_token_ids:
                        agreed.append(slot)
            going = agreed
        return paths

    def _draw(
        self,
        rows: Mapping[int, SamplingRow],
        logits: FloatArray,
        slots: Sequence[int],
        nodes: Sequence[int],
    ) -> list[int]:
        """The draft model's token behind one node of each slot."""
        # Slots and nodes as two lists of indices gather one row of logits per slot.
        here = logits[slots, nodes]
        asked = [replace(rows[slot], index=at) for at, slot in enumerate(slots)]
        return self._sampler.propose(here[:, None], asked, vocab_size=self._target_vocab_size)

    def _settled(
        self, row: SamplingRow, guess: Guess, node: int, logits: FloatArray, drawn: int
    ) -> int:
        """The token drafted at a node: the draw, unless a phrase has one nearly as likely."""
        if self._log_lenience == 0.0:
            return drawn
        if row.mode is ExactnessMode.SEED_STABLE and not row.law.is_greedy:
            return drawn
        followers = guess.followers(node)
        if not followers or drawn in followers:
            return drawn
        best = max(followers, key=lambda token: float(logits[token]))
        is_near = float(logits[best]) >= float(logits[drawn]) + self._log_lenience
        return best if is_near else drawn

    def _learn(self, row: DraftRow, last: int, guess: Guess, logits: FloatArray) -> None:
        """Move the window on, and keep the phrases it found."""
        if guess.window is not None:
            chosen = logits[list(guess.ends), : self._num_known].argmax(axis=-1).tolist()
            found = guess.window.advance(last, chosen, row.sampling.law.end_token_ids)
            self._phrases.state_of(row).pool.put_all(found)

    def _keep(self, slot: int, num_fed: int, path: list[int]) -> None:
        """Bring the cache rows of a path through side branches to where they belong."""
        if path != list(range(1, len(path) + 1)):
            self._engine.keep_path(slot, (*range(num_fed), *(num_fed - 1 + node for node in path)))
