"""Checks the sampler in rounds over one prompt's real rows, against the oracle's distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np
from outrider.engines.base import Engine, FloatArray, Source, Span
from outrider.engines.sampling.base import (
    CandidateSampler,
    ExactnessMode,
    Sampler,
    SamplingParams,
    SamplingRow,
)
from outrider.engines.sampling.tree_judge import judge
from outrider.runtime.core.params import Prompt
from outrider.runtime.oracle.sampling import adjusted_probs
from outrider.runtime.oracle.verification import Probs, RowOf, completed, sequence_probs
from outrider.runtime.verify.chi_square import goodness_of_fit
from outrider.runtime.verify.drafts import (
    Drafter,
    LogitsOf,
    no_draft,
    paths_of,
    point_masses,
    sampled_chain,
    sampled_tree,
)
from outrider.runtime.verify.report import Check

# Tokens among which whole rounds are enumerated, and tokens drafted in them: 4 ** 3 drafts.
NUM_RUN_TOKENS = 4
RUN_GAMMA = 3
# Tokens of the sequences that rounds are completed to: two drafted ones and the one after them.
NUM_SEQUENCE = 3
BRANCHING = (3, 2)
# Two levels: the root has three children, the first and the second of them two each.
POINT_TREE = (0, 0, 0, 1, 1, 2, 2)
# Shares of the target's mass that tokens of the whole vocabulary are sorted into.
NUM_SHARES = 20
# Rounding of sums over all outcomes of a round, in float64.
MAX_DIFFERENCE = 1e-9
# Logits kept at a time, 256 MiB, but always those of an enumeration.
_MAX_KEPT = 2**26
_MIN_ROWS_KEPT = 128

EmittedProbs = Callable[[RowOf, RowOf, int], dict[tuple[int, ...], float]]


class Bench:
    """One prompt, the pair's logits after it, and a sampler.

    Args:
        target: engine, of whose slots the first is used until there is another bench.
        draft: likewise, with the target's tokens; None where there is none.
        sampler: under test, with a slot per row judged together.
        num_rows: rows judged together.
        prompt: what stands before the first position, and the source that it answers.
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
        prompt: Prompt,
        num_samples: int,
        seed: int,
    ) -> None:
        self._target_row = _row_of(target, prompt)
        self._draft_row = None if draft is None else _row_of(draft, prompt)
        self._sampler = sampler
        self._vocab_size = target.limits.vocab_size
        self._num_rows = num_rows
        self._history = np.array(prompt.tokens, dtype=np.int64)
        self._seeds = range(seed, seed + num_samples)
        self._generator = np.random.default_rng(seed)
        ranked = np.argsort(-self._target_row(()), kind="stable")
        self.likeliest: tuple[int, ...] = tuple(ranked[:NUM_RUN_TOKENS].tolist())

    def check_first(
        self, name: str, params: SamplingParams, mode: ExactnessMode, gamma: int
    ) -> list[Check]:
        """Check the first tokens of rounds of ``gamma`` drafts against the target; 0 drafts are plain draws."""
        runs = self._runs(params, mode, self._chain(gamma) if gamma else no_draft)
        counts = Counter(run[0] for run in runs)
        probs = self._probs(params, ())
        p_value = goodness_of_fit(counts, probs)
        return [Check(name=name, num_draws=counts.total(), p_value=p_value)]

    def check_sequences(self, name: str, params: SamplingParams, draft: Drafter) -> list[Check]:
        """Check rounds over the likeliest tokens, which the target completes, against the target's sequences.

        Every parameter applies behind accepted tokens and on bonus tokens, or the sequences have another distribution.
        """
        params = replace(params, allowed_token_ids=self.likeliest)
        target = self._probs_among(self._target_row, params)
        wanted = sequence_probs(target, NUM_SEQUENCE)
        index = {run: i for i, run in enumerate(wanted)}
        places = {token: place for place, token in enumerate(self.likeliest)}
        counts: Counter[int] = Counter()
        for run in self._runs(params, ExactnessMode.MAX_ACCEPT, draft):
            is_possible = set(run) <= set(self.likeliest)
            found = tuple(places[token] for token in run) if is_possible else ()
            counts[index[self._completed(found, target)] if is_possible else len(index)] += 1
        p_value = goodness_of_fit(counts, np.array([*wanted.values(), 0.0]))
        return [Check(name=name, num_draws=counts.total(), p_value=p_value)]

    def check_shares(
        self, name: str, params: SamplingParams, *, verifies_block: bool
    ) -> list[Check]:
        """Check every token of completed rounds over the whole vocabulary: one check per position.

        The mass of tokens that stand before it, and a random part of its own, is uniform in [0, 1) if the token has the
        target's distribution behind whatever came before it (the randomised probability integral transform). Tokens
        that the draft model underrates most stand first: a wrong judge moves mass between them and the others.
        """
        counts: list[Counter[int]] = [Counter() for _ in range(NUM_SEQUENCE)]
        # Twice as wide as logits.
        num_kept = max(_MIN_ROWS_KEPT, _MAX_KEPT // (2 * self._vocab_size))
        probs_of = lru_cache(num_kept)(partial(self._probs, params))
        draft = self._chain(NUM_SEQUENCE - 1)
        runs = self._runs(params, ExactnessMode.MAX_ACCEPT, draft, verifies_block=verifies_block)
        for run in runs:
            tokens = self._completed(run, probs_of)
            for position, token in enumerate(tokens):
                probs = probs_of(tokens[:position])
                lead = self._lead(tokens[:position])
                above, ties = probs[lead > lead[token]].sum(), probs[lead == lead[token]].sum()
                share = above + self._generator.random() * ties
                place = min(int(share * NUM_SHARES), NUM_SHARES - 1)
                counts[position][place if probs[token] > 0.0 else NUM_SHARES] += 1
        wanted = np.array([*[1.0 / NUM_SHARES] * NUM_SHARES, 0.0])
        return [
            Check(
                name=f"{name}, token {position}",
                num_draws=found.total(),
                p_value=goodness_of_fit(found, wanted),
            )
            for position, found in enumerate(counts, 1)
        ]

    def drafts(self) -> Iterator[tuple[str, Drafter]]:
        """Yield by name what completed rounds are drafted with: of the draft model, of the target itself, point masses.

        Of drafts of the target itself every token is kept, so that every round has a bonus token.
        """
        size, gamma = self._vocab_size, NUM_SEQUENCE - 1
        yield "drafts of the target", sampled_chain(self._sampler, self._target_row, gamma, size)
        yield "point masses", point_masses(self.likeliest, range(gamma), is_tree=False)
        yield "tree of point masses", point_masses(self.likeliest, POINT_TREE, is_tree=True)
        if self._draft_row is None:
            return
        yield "drafts of the model", self._chain(gamma)
        if isinstance(self._sampler, CandidateSampler):
            tree = sampled_tree(self._sampler, self._draft_row, BRANCHING, size)
            yield "tree of candidates", tree

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
        ids, plain = self.likeliest, SamplingParams(allowed_token_ids=self.likeliest)
        draft = self._probs_among(self._draft_row, plain)
        target = self._probs_among(self._target_row, plain)
        emitted = emitted_probs(draft, target, gamma)
        wanted = sequence_probs(target, gamma + 1)
        found = completed(emitted, target, gamma + 1)
        difference = max(abs(wanted.get(run, 0.0) - found.get(run, 0.0)) for run in wanted | found)
        index = {tuple(ids[token] for token in run): i for i, run in enumerate(emitted)}
        impossible = len(index)
        mode, chain = ExactnessMode.MAX_ACCEPT, self._chain(gamma)
        runs = self._runs(plain, mode, chain, verifies_block=verifies_block)
        counts = Counter(index.get(run, impossible) for run in runs)
        p_value = goodness_of_fit(counts, np.array([*emitted.values(), 0.0]))
        return [
            Check(name=f"{name}, rule", num_draws=0, p_value=float(difference <= MAX_DIFFERENCE)),
            Check(name=name, num_draws=counts.total(), p_value=p_value),
        ]

    def _chain(self, gamma: int) -> Drafter:
        assert self._draft_row is not None
        return sampled_chain(self._sampler, self._draft_row, gamma, self._vocab_size)

    def _lead(self, tokens: tuple[int, ...]) -> FloatArray:
        """Return by how much each token's logit is above the draft model's, [V] float32."""
        assert self._draft_row is not None
        lead, draft = self._target_row(tokens).copy(), self._draft_row(tokens)
        size = min(len(lead), len(draft))
        lead[:size] -= draft[:size]
        return lead

    def _probs(self, params: SamplingParams, tokens: tuple[int, ...]) -> Probs:
        """Return the oracle's probabilities behind some tokens, [V] float64."""
        history = np.concatenate([self._history, np.array(tokens, dtype=np.int64)])
        return adjusted_probs(self._target_row(tokens), params, history, len(self._history))

    def _probs_among(self, logits_of: LogitsOf, params: SamplingParams) -> RowOf:
        """Return a function from positions in ``likeliest`` to the next one's probabilities, [K] float64."""
        ids = list(self.likeliest)

        @cache
        def probs_of(prefix: tuple[int, ...]) -> Probs:
            tokens = tuple(ids[token] for token in prefix)
            history = np.concatenate([self._history, np.array(tokens, dtype=np.int64)])
            return adjusted_probs(logits_of(tokens), params, history, len(self._history))[ids]

        return probs_of

    def _completed(self, run: tuple[int, ...], probs_of: RowOf) -> tuple[int, ...]:
        """Return the first tokens of a run, continued by draws of the oracle where it is shorter."""
        while len(run) < NUM_SEQUENCE:
            probs = probs_of(run)
            run = (*run, int(self._generator.choice(len(probs), p=probs)))
        return run[:NUM_SEQUENCE]

    def _runs(
        self,
        params: SamplingParams,
        mode: ExactnessMode,
        draft: Drafter,
        *,
        verifies_block: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Yield the tokens that each round emits: the draft tokens kept, and the one after them.

        Raises:
            FloatingPointError: the models' logits are not finite.
        """
        for rows in self._batches(params, mode, verifies_block=verifies_block):
            judged = draft(rows)
            paths = [paths_of(row) for row in judged]
            longest = max(map(len, paths))
            logits = np.stack(
                [
                    [self._target_row(path) for path in (*of_row, *[()] * (longest - len(of_row)))]
                    for of_row in paths
                ]
            )
            verdicts = judge(self._sampler, logits, judged)
            for of_row, row, verdict in zip(paths, judged, verdicts, strict=True):
                if verdict.next_token is None:
                    raise FloatingPointError("the models' logits are not finite")
                end = verdict.num_accepted if row.parents is None else (0, *verdict.path)[-1]
                yield (*of_row[end], verdict.next_token)

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


def _row_of(engine: Engine, prompt: Prompt) -> LogitsOf:
    """Return a cached function from tokens after the prompt to the next token's logits, [V] float32."""
    known = prompt.tokens
    last, longest = len(known) - 1, engine.limits.max_extend
    if prompt.source:
        engine.read([Source(slot=0, tokens=prompt.source)])

    def feed_prompt() -> None:
        for start in range(0, last, longest):
            tokens = known[start : min(start + longest, last)]
            count = len(tokens)
            engine.extend(
                [Span(slot=0, start=start, tokens=tokens, num_logits=0, num_settled=count)]
            )

    feed_prompt()
    max_open = engine.limits.max_open

    @lru_cache(maxsize=max(_MIN_ROWS_KEPT, _MAX_KEPT // engine.limits.vocab_size))
    def row_of(tokens: tuple[int, ...]) -> FloatArray:
        if engine.first_start(0) > last:
            feed_prompt()
        fed = (known[last], *tokens)
        # More than can be taken back is settled, and the prompt fed again before the next.
        count = 0 if max_open is None or len(fed) <= max_open else len(fed)
        span = Span(slot=0, start=last, tokens=fed, num_logits=1, num_settled=count)
        return np.array(engine.extend([span])[0, 0], dtype=np.float32)

    return row_of
