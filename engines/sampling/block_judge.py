"""Judges a sampled draft as a whole, on the unnormalised weights of the CPU sampler.

The definition, with the proof, is ``runtime.oracle.block``; letters are as there. One row is adjusted at a time and
none is kept, so the row after the kept run is adjusted twice. A run of weight 0 ends the judgement: nothing behind it
is read.

Source: Sun et al. 2024, "Block verification accelerates speculative decoding" (arXiv:2403.10444), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engines.base import FloatArray
from outrider.engines.sampling.base import Verdict
from outrider.engines.sampling.noise import Purpose
from outrider.engines.sampling.token_probs import TokenProbs, residual_probs, shared_weights

# A run of less weight is rejected unasked: dividing float32 weights by its weight could overflow.
_SMALLEST_WEIGHT = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraft:
    """A sampled draft, with the sources of its probabilities and coins.

    Attributes:
        tokens: the draft, at least one.
        target_at: p of index 0..gamma, None where the logits are not finite, or no token may follow; valid until the
            next call.
        is_finite_at: whether the logits of an index are finite.
        draft_at: q of index 0..gamma - 1.
        uniform: fresh number in [0, 1) of a purpose, by index of the token it decides.
        scratch: [V] float32 to write in, as long as the longest row.
    """

    tokens: Sequence[int]
    target_at: Callable[[int], TokenProbs | None]
    is_finite_at: Callable[[int], bool]
    draft_at: Callable[[int], TokenProbs]
    uniform: Callable[[Purpose, int], float]
    scratch: FloatArray


def judge_block(draft: BlockDraft) -> Verdict:
    """Return the longest run of draft tokens whose coin is below its threshold, and the token after it."""
    weights = _Weights()
    for index, token in enumerate(draft.tokens):
        target = draft.target_at(index)
        if target is None:
            if not draft.is_finite_at(index):
                return Verdict(num_accepted=0, next_token=None)
            weights.end()
            break
        proposal = draft.draft_at(index)
        if index > 0:
            weights.excesses.append(_excess(target, proposal, weights.last, draft.scratch))
        weights.add(target, proposal, token)
        if weights.last == 0.0:
            break
    num_accepted = _num_accepted(weights, draft)
    target = draft.target_at(num_accepted)
    if target is None:
        has_conflict = draft.is_finite_at(num_accepted)
        return Verdict(num_accepted=0, next_token=None, has_conflict=has_conflict)
    if num_accepted == len(draft.tokens):
        bonus = target.draw(draft.uniform(Purpose.BONUS, num_accepted))
        return Verdict(num_accepted=num_accepted, next_token=bonus)
    shared, _ = shared_weights(
        target, draft.draft_at(num_accepted), draft.scratch, weight=weights.of_runs[num_accepted]
    )
    residual, is_fallback = residual_probs(target, shared)
    return Verdict(
        num_accepted=num_accepted,
        next_token=residual.draw(draft.uniform(Purpose.RECOVER, num_accepted)),
        num_fallbacks=int(is_fallback),
    )


class _Weights:
    """P of the runs of 0, 1, ... tokens, and S of the runs of 1, 2, ... that the draft goes beyond."""

    def __init__(self) -> None:
        self.of_runs = [1.0]
        self.excesses: list[float] = []

    @property
    def last(self) -> float:
        """P of the longest run so far."""
        return self.of_runs[-1]

    def add(self, target: TokenProbs, proposal: TokenProbs, token: int) -> None:
        """Lengthen the run by a token: P min(1, P p / q)."""
        proposed = proposal.weight(token) * target.total()
        wanted = self.last * target.weight(token) * proposal.total()
        weight = min(1.0, wanted / proposed) if proposed > 0.0 else 0.0
        self.of_runs.append(weight if weight > _SMALLEST_WEIGHT else 0.0)

    def end(self) -> None:
        """End behind a run that no token may follow: all of its weight is beyond what the draft proposes."""
        if len(self.of_runs) > 1:
            self.excesses.append(self.last)
        self.of_runs.append(0.0)

    def is_below_threshold(self, coin: float, length: int) -> bool:
        """Say whether a coin keeps the run of ``length`` tokens when no longer one is kept."""
        weight = self.of_runs[length]
        if length > len(self.excesses) or weight == 1.0:  # nothing comes behind it; 0/0 is 1
            return coin < weight
        excess = self.excesses[length - 1]
        return coin * (excess + 1.0 - weight) < excess


def _excess(target: TokenProbs, proposal: TokenProbs, weight: float, scratch: FloatArray) -> float:
    """S, the mass of (P p - q)+."""
    _, mass = shared_weights(target, proposal, scratch, weight=weight)
    return weight * (target.total() - mass) / target.total()


def _num_accepted(weights: _Weights, draft: BlockDraft) -> int:
    for length in range(len(weights.of_runs) - 1, 0, -1):
        coin = draft.uniform(Purpose.ACCEPT, length - 1)
        if weights.is_below_threshold(coin, length):
            return length
    return 0
