"""A cascade: the draft model's own drafting is speculated on by a cheaper drafter.

The guesser continues the context and the draft model is fed the guess in one pass. Each draft token is drawn once from
the draft model's own probabilities. The pass is used up to the first draw that differs from the guess, and that draw is
kept. So the chain is the one the draft model would have drafted alone, token for token under the same noise, and the
sampler keeps the same rows of probabilities. Verification is therefore as exact as for a draft of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.engines.base import FloatArray, Span
from outrider.engines.sampling.base import SamplingRow
from outrider.runtime.drafters.base import DrafterParts, DraftRow, Guesser
from outrider.runtime.drafters.model.model import (
    ModelDrafter,
    begun,
    num_committed,
    with_idle_slots,
)
from outrider.runtime.drafters.model.speculated_guess import cut


class CascadeDrafter(ModelDrafter):
    """Proposes the draft model's chain, in fewer passes of it.

    Args:
        guesser: continues contexts; its owner gives it outcomes and ends.
    """

    def __init__(self, parts: DrafterParts, guesser: Guesser) -> None:
        super().__init__(parts)
        self._guesser = guesser
        self._num_known = min(self._limits.vocab_size, parts.vocab_size)

    def _draft_in_lockstep(
        self, live: Sequence[DraftRow], gammas: dict[int, int], computed: list[int]
    ) -> dict[int, list[int]]:
        drafted, rows, missing = begun(live, gammas, computed)
        while missing:
            guesses = {
                slot: self._guess(live[slot], drafted[slot], gammas[slot], len(missing[slot]))
                for slot in missing
            }
            spans = {
                slot: Span(
                    slot=slot,
                    start=computed[slot],
                    tokens=(*fed, *guesses[slot]),
                    num_logits=len(guesses[slot]) + 1,
                    num_settled=num_committed(fed, drafted[slot]),
                )
                for slot, fed in missing.items()
            }
            logits = self._engine.extend(with_idle_slots(spans, computed))
            following: dict[int, tuple[int, ...]] = {}
            num_matched = self._draw(live, rows, logits, guesses, drafted)
            for slot, fed in missing.items():
                computed[slot] += len(fed) + num_matched[slot]
                last = drafted[slot][-1]
                is_end = last in live[slot].sampling.params.end_token_ids
                is_full = len(drafted[slot]) >= gammas[slot]
                if not is_full and not is_end:
                    following[slot] = (last,)
            missing = following
        return drafted

    def _guess(
        self, row: DraftRow, drafted: list[int], gamma: int, num_fed: int
    ) -> tuple[int, ...]:
        """Return the guess, with room left for the token that the pass itself adds."""
        room = min(gamma - len(drafted) - 1, self._limits.max_extend - num_fed)
        if room < 1:
            return ()
        guess = self._guesser.guess(row, tuple(drafted), room)[:room]
        return cut(guess, self._num_known, row.sampling.params.end_token_ids)

    def _draw(
        self,
        live: Sequence[DraftRow],
        rows: Mapping[int, SamplingRow],
        logits: FloatArray,
        guesses: dict[int, tuple[int, ...]],
        drafted: dict[int, list[int]],
    ) -> dict[int, int]:
        """Draw from each column while the draws equal the guess; return by slot how many did."""
        num_matched = dict.fromkeys(guesses, 0)
        going = list(guesses)
        column = 0
        while going:
            tokens = self._sampler.propose(
                logits[:, column:],
                [rows[slot] for slot in going],
                vocab_size=self._target_vocab_size,
            )
            agreed = []
            for slot, token in zip(going, tokens, strict=True):
                drafted[slot].append(token)
                if (constraint := live[slot].constraint) is not None:
                    constraint.follow(drafted[slot])
                guess = guesses[slot]
                if column < len(guess) and guess[column] == token:
                    num_matched[slot] += 1
                    agreed.append(slot)
            going = agreed
            column += 1
        return num_matched
