"""Checks the sampler in rounds over one prompt's real rows, against the oracle's distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from outrider.engines.base import Engine, FloatArray, Span
from outrider.engines.sampling.base import ExactnessMode, Sampler, SamplingParams, SamplingRow
from outrider.runtime.oracle.sampling import adjusted_probs
from outrider.runtime.oracle.verification import Probs, RowOf, completed, sequence_probs
from outrider.runtime.verify.chi_square import goodness_of_fit
from outrider.runtime.verify.report import Check

# Tokens among which whole rounds are enumerated, and tokens drafted in them: 4 ** 3 drafts.
NUM_RUN_TOKENS = 4
RUN_GAMMA = 3
# Rounding of sums over all outcomes of a round, in float64.
MAX_DIFFERENCE = 1e-9
# Logits kept at a time, 256 MiB, but always those of an enumeration.
_MAX_KEPT = 2**26
_MIN_ROWS_KEPT = 128

EmittedProbs = Callable[[RowOf, RowOf, int], dict[tuple[int, ...], float]]


class Bench:
    """One prompt, the pair's logits after it, and a sampler.

    Args:
        target: engine, of whose slots the first is used.
        draft: likewise, with the target's tokens; None where there is none.
        sampler: under test, with a slot per row judged together.
        num_rows: rows judged together.
        prompt: tokens before the first position.
        num_samples: rounds per check.
        seed: of the first round.
    """

    def __init__(
        self,
        *,
        target: Engine,
        draft: Engine | None,
        sampler: Sampler,
        num_rows: int,
        prompt: tuple[int, ...],
        num_samples: int,
        seed: int,
    ) -> None:
        self._target_row = _row_of(target, prompt)
        self._draft_row = None if draft is None else _row_of(draft, prompt)
        self._sampler = sampler
        self._vocab_size = target.limits.vocab_size
        self._num_rows = num_rows
        self._history = np.array(prompt, dtype=np.int64)
        self._seeds = range(seed, seed + num_samples)

    def check_first(
        self, name: str, params: SamplingParams, mode: ExactnessMode, gamma: int
    ) -> Check:
        """Check the first tokens of rounds of ``gamma`` drafts against the target; 0 drafts are plain draws."""
        runs = self._runs(params, mode, gamma)
        counts = Counter(run[0] for run in runs)
        probs = adjusted_probs(self._target_row(()), params, self._history, len(self._history))
        p_value = goodness_of_fit(counts, probs)
        return Check(name=name, num_draws=counts.total(), p_value=p_value)

    def check_runs(
        self, name: str, emitted_probs: EmittedProbs, gamma: int, *, verifies_block: bool
    ) -> list[Check]:
        """Check whole rounds over the likeliest tokens: the rule against the target, the sampler against the rule.

        Args:
            name: of the rule.
            emitted_probs: the rule's distribution of a round, as ``oracle.verification.emitted_probs``.
            gamma: draft tokens of a round.
            verifies_block: whether the sampler judges drafts as whole blocks.
        """
        assert self._draft_row is not None
        ids = np.argsort(-self._target_row(()), kind="stable")[:NUM_RUN_TOKENS].tolist()
        draft, target = _probs_among(ids, self._draft_row), _probs_among(ids, self._target_row)
        emitted = emitted_probs(draft, target, gamma)
        wanted = sequence_probs(target, gamma + 1)
        found = completed(emitted, target, gamma + 1)
        difference = max(abs(wanted.get(run, 0.0) - found.get(run, 0.0)) for run in wanted | found)
        params = SamplingParams(allowed_token_ids=tuple(ids))
        index = {tuple(ids[token] for token in run): i for i, run in enumerate(emitted)}
        impossible = len(index)
        runs = self._runs(params, ExactnessMode.MAX_ACCEPT, gamma, verifies_block=verifies_block)
        counts = Counter(index.get(run, impossible) for run in runs)
        p_value = goodness_of_fit(counts, np.array([*emitted.values(), 0.0]))
        return [
            Check(name=f"{name}, rule", num_draws=0, p_value=float(difference <= MAX_DIFFERENCE)),
            Check(name=name, num_draws=counts.total(), p_value=p_value),
        ]

    def _runs(
        self,
        params: SamplingParams,
        mode: ExactnessMode,
        gamma: int,
        *,
        verifies_block: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Yield the tokens that each round emits: the draft tokens kept, and the one after them.

        Raises:
            FloatingPointError: the models' logits are not finite.
        """
        for rows in self._batches(params, mode, verifies_block=verifies_block):
            for _ in range(gamma):
                rows = self._drafted(rows)
            judged = [replace(row, is_sampled_draft=gamma > 0) for row in rows]
            logits = np.stack(
                [
                    [
                        self._target_row(tuple(row.draft_tokens[:length]))
                        for length in range(gamma + 1)
                    ]
                    for row in judged
                ]
            )
            for row, verdict in zip(judged, self._sampler.judge(logits, judged), strict=True):
                if verdict.next_token is None:
                    raise FloatingPointError("the models' logits are not finite")
                yield (*row.draft_tokens[: verdict.num_accepted], verdict.next_token)

    def _drafted(self, rows: Sequence[SamplingRow]) -> list[SamplingRow]:
        """Return the rows with one more draft token each."""
        assert self._draft_row is not None
        logits = np.stack([self._draft_row(tuple(row.draft_tokens)) for row in rows])[:, None]
        tokens = self._sampler.propose(logits, rows, vocab_size=self._vocab_size)
        return [
            replace(row, draft_tokens=(*row.draft_tokens, token))
            for row, token in zip(rows, tokens, strict=True)
        ]

    def _batches(
        self, params: SamplingParams, mode: ExactnessMode, *, verifies_block: bool
    ) -> Iterator[list[SamplingRow]]:
        for first in range(0, len(self._seeds), self._num_rows):
            yield [
                SamplingRow(
                    index=index,
                    slot=index,
                    params=params,
                    mode=mode,
                    lenience=1.0,
                    seed=seed,
                    history=self._history,
                    num_prompt=len(self._history),
                    verifies_block=verifies_block,
                )
                for index, seed in enumerate(self._seeds[first : first + self._num_rows])
            ]


def _row_of(engine: Engine, prompt: tuple[int, ...]) -> Callable[[tuple[int, ...]], FloatArray]:
    """Return a cached function from tokens after the prompt to the next token's logits, [V] float32."""

    @lru_cache(maxsize=max(_MIN_ROWS_KEPT, _MAX_KEPT // engine.limits.vocab_size))
    def row_of(tokens: tuple[int, ...]) -> FloatArray:
        logits = engine.extend([Span(slot=0, start=0, tokens=(*prompt, *tokens), num_logits=1)])
        return np.array(logits[0, 0], dtype=np.float32)

    return row_of


def _probs_among(ids: Sequence[int], row_of: Callable[[tuple[int, ...]], FloatArray]) -> RowOf:
    """Return a function from positions in ``ids`` to the next one's probabilities, [K] float64."""

    def probs_of(prefix: tuple[int, ...]) -> Probs:
        logits = row_of(tuple(ids[token] for token in prefix))[ids]
        return adjusted_probs(logits, SamplingParams(), np.array([], dtype=np.int64), 0)

    return probs_of
