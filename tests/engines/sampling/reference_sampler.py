"""A sampler over the oracle's float64 laws: slow, sequential, one row at a time; draws in order of id, or of rank.

Shares no code with the samplers in ``engines``, only their noise.
"""

from __future__ import annotations

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, Verdict
from outrider.engines.sampling.noise import CounterNoise, Purpose
from outrider.runtime.oracle.sampling import adjusted_probs, processed_scores, softmax


class ReferenceSampler:
    """Implements ``engines.sampling.base.Sampler``; without log-probabilities and broken rows.

    ``draws_by_rank``: whether top-k rows are drawn from by descending probability, as ``CpuSampler`` does.
    """

    def __init__(self, *, draws_by_rank=False):
        self.noise = CounterNoise()
        self.draws_by_rank = draws_by_rank
        self.kept = {}

    def propose(self, logits, rows, *, vocab_size):
        return [self._propose(logits[row.index, 0, :vocab_size], row, vocab_size) for row in rows]

    def judge(self, logits, rows):
        return [self._judge(logits[row.index], row) for row in rows]

    def _propose(self, logits, row, vocab_size):
        depth = len(row.draft_tokens)
        position = len(row.history) + depth
        probs = np.zeros(vocab_size)
        probs[: len(logits)] = self._law(logits, row, depth)
        if row.params.is_greedy:
            return int(probs.argmax())
        if row.mode is ExactnessMode.SEED_STABLE:
            return self._race(probs, row, position)
        self.kept[row.slot, depth] = probs
        return self._drawn(probs, probs, row, self._uniform(row, Purpose.DRAFT, position))

    def _judge(self, logits, row):
        gamma, start = len(row.draft_tokens), len(row.history)
        is_lenient = row.mode is ExactnessMode.LENIENT and row.lenience != 1.0
        is_ratio = row.is_sampled_draft or is_lenient
        is_ratio = (
            is_ratio and not row.params.is_greedy and row.mode is not ExactnessMode.SEED_STABLE
        )
        overlaps = []
        for index, token in enumerate(row.draft_tokens):
            target = self._law(logits[index], row, index)
            if is_ratio:
                draft = np.eye(len(target))[token]
                if row.is_sampled_draft:
                    draft = self.kept[row.slot, index]
                    overlaps.append(np.minimum(draft, target).sum())
                lenience = row.lenience if is_lenient else 1.0
                coin = self._uniform(row, Purpose.ACCEPT, start + index)
                if coin * lenience * draft[token] < target[token]:
                    continue
                residual = np.maximum(target - draft, 0.0)
                uniform = self._uniform(row, Purpose.RECOVER, start + index)
                return Verdict(
                    num_accepted=index,
                    next_token=self._drawn(residual, target, row, uniform),
                    overlaps=tuple(overlaps),
                )
            own = self._own(target, row, start + index)
            if own != token and not (is_lenient and self._is_near(logits[index], row, index)):
                return Verdict(num_accepted=index, next_token=own)
        target = self._law(logits[gamma], row, gamma)
        if is_ratio and gamma:
            uniform = self._uniform(row, Purpose.BONUS, start + gamma)
            token = self._drawn(target, target, row, uniform)
        else:
            token = self._own(target, row, start + gamma)
        return Verdict(num_accepted=gamma, next_token=token, overlaps=tuple(overlaps))

    def _own(self, target, row, position):
        """The target's own token: what plain decoding would emit."""
        if row.params.is_greedy:
            return int(target.argmax())
        if row.mode is ExactnessMode.SEED_STABLE:
            return self._race(target, row, position)
        return self._drawn(target, target, row, self._uniform(row, Purpose.MATCH, position))

    def _drawn(self, weights, probs, row, uniform):
        """A token of ``weights``, whose order may be that of ``probs``."""
        if not (self.draws_by_rank and 0 < row.params.top_k < len(weights)):
            return drawn(weights, uniform)
        ranked = np.argsort(-probs, kind="stable")
        return int(ranked[drawn(weights[ranked], uniform)])

    def _is_near(self, logits, row, index):
        """Greedy: whether a draft token has ``lenience`` times the greatest probability."""
        history = np.concatenate([row.history, row.draft_tokens[:index]]).astype(np.int64)
        probs = softmax(processed_scores(logits, row.params, history, row.num_prompt))
        return row.params.is_greedy and probs[row.draft_tokens[index]] >= row.lenience * max(probs)

    def _law(self, logits, row, depth):
        history = np.concatenate([row.history, row.draft_tokens[:depth]]).astype(np.int64)
        return adjusted_probs(logits, row.params, history, row.num_prompt)

    def _race(self, probs, row, position):
        exponentials = self.noise.exponentials(row.seed, position, len(probs)).astype(np.float64)
        with np.errstate(divide="ignore"):
            return int((exponentials / probs).argmin())

    def _uniform(self, row, purpose, position):
        is_keyed = purpose is not Purpose.MATCH
        return self.noise.uniform(
            row.seed,
            purpose=purpose,
            position=position,
            round_start=len(row.history) if is_keyed else None,
        )


def drawn(weights, uniform):
    """Index whose interval of the running sum, by id, holds the uniform number."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
