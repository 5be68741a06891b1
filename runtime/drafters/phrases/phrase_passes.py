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
from dataclasses import dataclass, field, replace

from outrider.engines.base import Engine, FloatArray
from outrider.engines.sampling.base import ExactnessMode, are_plain_greedy
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.base import DrafterParts, DraftRow
from outrider.runtime.drafters.model.model import (
    MAX_SHARED_MISSING,
    num_committed,
    with_idle_slots,
)
from outrider.runtime.drafters.model.speculated_guess import Guess, cut
from outrider.runtime.drafters.phrases.phrases import PhraseDrafter, PhraseState
from outrider.runtime.drafters.phrases.window import LookaheadWindow, window_nodes


@dataclass(slots=True, kw_only=True)
class Turn:
    """One row while it is drafted for.

    Attributes:
        gamma: draft tokens wanted.
        state: its phrases.
        ends: tokens that end a draft.
        fed: tokens that the next pass feeds.
        drafted: so far.
        path: nodes of the last pass's guess that were drafted.
        num_passes: that it took part in.
    """

    row: DraftRow
    gamma: int
    state: PhraseState
    ends: tuple[int, ...]
    fed: tuple[int, ...]
    drafted: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    num_passes: int = 0


class PhrasePasses:
    """Drafts with an engine, phrase by phrase.

    Attributes:
        num_passes: of the draft model.
        num_drafted: tokens they yielded.
        num_calls: by slot of the last ``draft``, the passes that drafted for it.
    """

    def __init__(self, engine: Engine, parts: DrafterParts, phrases: PhraseDrafter) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._sampler = parts.sampler
        self._phrases = phrases
        self._target_vocab_size = parts.vocab_size
        self._num_known = min(engine.limits.vocab_size, parts.vocab_size)
        self._config = parts.config
        self._log_lenience = math.log(parts.config.draft_lenience)
        self._windows: dict[str, LookaheadWindow] = {}
        self.num_passes = 0
        self.num_drafted = 0
        self.num_calls: dict[int, int] = {}

    def check_window(self, width: int, phrase_length: int, gamma: int) -> None:
        """Refuse a window that passes of the draft model would have to leave out.

        Raises:
            RequestError: what it needs, and what there is.
        """
        if not width:
            return
        # The pass itself adds a token behind the longest path; the newest phrase goes on up to there.
        longest = gamma - 1
        phrases = longest + (self._config.num_phrases - 1) * min(phrase_length, longest)
        needed = MAX_SHARED_MISSING + phrases + window_nodes(width, phrase_length)
        known = min(self._limits.max_tree_nodes, self._limits.max_extend)
        if needed > known:
            rule = (
                f"needs passes of {needed} tokens of the draft model, whose trees have {known} at most: export with "
                "--max-tree-nodes, and serve with a drafter that proposes trees"
            )
            raise RequestError("speculation.window", rule)

    def forget(self, key: str) -> None:
        """Drop the request's window."""
        self._windows.pop(key, None)

    def draft(
        self, live: Sequence[DraftRow], gammas: dict[int, int], computed: list[int]
    ) -> dict[int, list[int]]:
        """Draft for rows by slot; see ``ModelDrafter``."""
        turns = {slot: self._turn(live[slot], gammas[slot], computed[slot]) for slot in gammas}
        going = turns
        num_passes = 0
        while going:
            num_passes += 1
            guesses = {
                slot: self._guess(turn, computed[slot] + len(turn.fed))
                for slot, turn in going.items()
            }
            spans = {
                slot: guesses[slot].span(
                    slot, computed[slot], turn.fed, num_committed(turn.fed, turn.drafted)
                )
                for slot, turn in going.items()
            }
            self.num_passes += 1
            # [B, R, V]; column n of a row follows node n of its guess, 0 being the root.
            logits = self._engine.extend(with_idle_slots(spans, computed))
            self._walk(going, logits, guesses)
            # 0 is no bound.
            is_enough = num_passes >= self._config.draft_passes > 0
            following: dict[int, Turn] = {}
            for slot, turn in going.items():
                turn.num_passes += 1
                self._learn(turn, guesses[slot], logits[slot])
                self._keep(slot, turn)
                computed[slot] += len(turn.fed) + len(turn.path)
                if self._goes_on(turn, is_enough):
                    turn.fed = (turn.drafted[-1],)
                    following[slot] = turn
            going = following
        self.num_calls = {slot: turn.num_passes for slot, turn in turns.items()}
        drafted = {slot: turn.drafted for slot, turn in turns.items()}
        self.num_drafted += sum(map(len, drafted.values()))
        return drafted

    def _turn(self, row: DraftRow, gamma: int, num_computed: int) -> Turn:
        return Turn(
            row=row,
            gamma=gamma,
            state=self._phrases.state_of(row),
            ends=row.sampling.params.end_token_ids,
            fed=tuple(row.sampling.history[num_computed:].tolist()),
        )

    def _goes_on(self, turn: Turn, is_enough: bool) -> bool:
        """Return whether another pass follows: the draft is not full, and passes or phrases are too few."""
        last = turn.drafted[-1]
        if len(turn.drafted) >= turn.gamma or last in turn.ends:
            return False
        return not (is_enough and turn.state.pool.get(last, self._phrases.wanted(turn.row)))

    def _guess(self, turn: Turn, num_fed: int) -> Guess:
        """Return the guess of the next pass behind the first ``num_fed`` tokens of the row."""
        tree, limits = TreeBuilder(), self._limits
        # The pass itself adds a token behind the longest path.
        room = min(turn.gamma - len(turn.drafted) - 1, limits.max_extend - len(turn.fed))
        if room > 0 and self._config.phrase_draft:
            budget = limits.max_tree_nodes - len(turn.fed)
            for chain in self._chains(turn, room):
                if not tree.tokens or len(tree.tokens) + len(chain) <= budget:
                    tree.add_chain(chain)
        num_nodes = len(tree.tokens)
        window = self._window_of(turn)
        if (
            window is None
            or len(turn.fed) + num_nodes + window.num_nodes
            > min(limits.max_tree_nodes, limits.max_extend)
            or num_fed + window.depth > limits.max_context
        ):
            return Guess(tree, num_nodes)
        return Guess(tree, num_nodes, window, tuple(window.place(tree)))

    def _chains(self, turn: Turn, room: int) -> list[tuple[int, ...]]:
        """Return phrases that may follow, cut before anything the draft model does not know."""
        phrases, pool = self._phrases, turn.state.pool
        key = turn.drafted[-1] if turn.drafted else turn.state.tail[-1]
        count = self._config.num_phrases if self._limits.max_tree_nodes else 1
        found = pool.get(key, max(count, 1))
        if not found:
            return []
        found[0] = phrases.continued(turn.state, found[0], room)
        return [cut(chain[:room], self._num_known, turn.ends) for chain in found]

    def _window_of(self, turn: Turn) -> LookaheadWindow | None:
        """Return the row's window; None where none is asked for, or the engine takes no trees."""
        if not self._limits.max_tree_nodes or not self._config.phrase_draft:
            return None
        row = turn.row
        found = self._windows.get(row.key)
        if found is None:
            asked, length = row.params.window, turn.state.phrase_length
            width = self._config.draft_window if asked is None else asked
            if width and length > 1:
                # Of the text's own tokens all are known to the draft model; of the source's perhaps not.
                text = [token for token in row.text.tolist() if 0 <= token < self._num_known]
                found = LookaheadWindow.from_text(text, width=width, phrase_length=length)
                self._windows[row.key] = found
        return found

    def _walk(
        self, turns: Mapping[int, Turn], logits: FloatArray, guesses: Mapping[int, Guess]
    ) -> None:
        """Append the draft model's tokens, node by node, and note the nodes of each guess it went through."""
        is_greedy = are_plain_greedy([turn.row.sampling for turn in turns.values()])
        for turn in turns.values():
            turn.path = []
        going = list(turns)
        while going:
            nodes = [turns[slot].path[-1] if turns[slot].path else 0 for slot in going]
            if is_greedy:
                # One by one: most nodes of a guess are never asked for, and logits are far away.
                drawn = [
                    int(logits[slot, node, : self._target_vocab_size].argmax())
                    for slot, node in zip(going, nodes, strict=True)
                ]
            else:
                drawn = self._draw(turns, logits, going, nodes)
            agreed = []
            for slot, node, token in zip(going, nodes, drawn, strict=True):
                turn, guess = turns[slot], guesses[slot]
                child = guess.tree.child(node, token)
                if child is None:
                    token = self._settled(turn, guess, node, logits[slot, node], token)
                    child = guess.tree.child(node, token)
                turn.drafted.append(token)
                if child is not None and len(turn.drafted) < turn.gamma:
                    turn.path.append(child)
                    if token not in turn.ends:
                        agreed.append(slot)
            going = agreed

    def _draw(
        self,
        turns: Mapping[int, Turn],
        logits: FloatArray,
        slots: Sequence[int],
        nodes: Sequence[int],
    ) -> list[int]:
        """Draw the draft model's token behind one node of each slot."""
        # Slots and nodes as two lists of indices gather one row of logits per slot.
        here = logits[slots, nodes]
        asked = [
            replace(turns[slot].row.sampling, draft_tokens=turns[slot].drafted, index=at)
            for at, slot in enumerate(slots)
        ]
        return self._sampler.propose(here[:, None], asked, vocab_size=self._target_vocab_size)

    def _settled(self, turn: Turn, guess: Guess, node: int, logits: FloatArray, drawn: int) -> int:
        """Return the token drafted where no phrase has the draw: a phrase's if nearly as likely, else the draw."""
        if self._log_lenience == 0.0:
            return drawn
        row = turn.row.sampling
        if row.mode is ExactnessMode.SEED_STABLE and not row.params.is_greedy:
            return drawn
        followers = guess.followers(node)
        # The window's tokens are no phrases.
        if not followers:
            return drawn
        best = max(followers, key=lambda token: float(logits[token]))
        is_near = float(logits[best]) >= float(logits[drawn]) + self._log_lenience
        return best if is_near else drawn

    def _learn(self, turn: Turn, guess: Guess, logits: FloatArray) -> None:
        """Move the window on, and keep the phrases it found."""
        if guess.window is not None:
            chosen = logits[list(guess.ends), : self._num_known].argmax(axis=-1).tolist()
            found = guess.window.advance(turn.fed[-1], chosen, turn.ends)
            turn.state.pool.put_all(found)

    def _keep(self, slot: int, turn: Turn) -> None:
        """Bring the cache rows of a path through side branches to where they belong."""
        path, num_fed = turn.path, len(turn.fed)
        # Nodes ascend along a path: it is the leading chain exactly where the last has its number.
        if path and path[-1] != len(path):
            self._engine.keep_path(slot, (*range(num_fed), *(num_fed - 1 + node for node in path)))
