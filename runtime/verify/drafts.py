"""Ways to draft the rounds that are checked: chains and trees, sampled from a model's rows or point masses.

A drafter takes rows that stand behind the prompt and returns them as they are judged. Point masses are drawn from noise
of their own, since verification has to be exact for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling.base import CandidateNode, CandidateSampler, Sampler, SamplingRow
from outrider.engines.trees import path_to
from outrider.runtime.drafters.model.tree import Growth

LogitsOf = Callable[[tuple[int, ...]], FloatArray]
"""From tokens behind the prompt to the next token's logits, [V] float32."""
Drafter = Callable[[Sequence[SamplingRow]], list[SamplingRow]]


def no_draft(rows: Sequence[SamplingRow]) -> list[SamplingRow]:
    """Plain decoding."""
    return list(rows)


def sampled_chain(sampler: Sampler, logits_of: LogitsOf, gamma: int, vocab_size: int) -> Drafter:
    """Chains of ``gamma`` tokens drawn from a model; ``vocab_size`` is the target's."""

    def draft(rows: Sequence[SamplingRow]) -> list[SamplingRow]:
        grown = list(rows)
        for _ in range(gamma):
            logits = np.stack([logits_of(tuple(row.draft_tokens)) for row in grown])[:, None]
            tokens = sampler.propose(logits, grown, vocab_size=vocab_size)
            grown = [
                replace(row, draft_tokens=(*row.draft_tokens, token))
                for row, token in zip(grown, tokens, strict=True)
            ]
        return [replace(row, is_sampled_draft=gamma > 0) for row in grown]

    return draft


def sampled_tree(
    sampler: CandidateSampler,
    logits_of: LogitsOf,
    branching: Sequence[int],
    vocab_size: int,
) -> Drafter:
    """Trees of so many candidates per level, drawn from a model, as drafter ``tree`` grows them."""

    def tree_of(row: SamplingRow) -> SamplingRow:
        growth = Growth(max_nodes=2 ** sum(branching), depth=len(branching))
        for count in branching:
            drawn: list[tuple[int, ...]] = []
            for node, path in growth.newest:
                point = CandidateNode(
                    row=replace(row, index=0, draft_tokens=path), column=0, node=node, count=count
                )
                logits = logits_of(path)[None, None]
                drawn += sampler.propose_children(logits, [point], vocab_size=vocab_size)
            growth.add_level(drawn, ())
        tree = growth.tree()
        return replace(
            row,
            draft_tokens=tree.tokens,
            parents=tree.parents,
            candidates=tree.candidates,
            is_sampled_draft=True,
        )

    return lambda rows: [tree_of(row) for row in rows]


def point_masses(ids: Sequence[int], parents: Sequence[int], *, is_tree: bool) -> Drafter:
    """Chains, or trees of a shape, of any of some tokens."""

    def draft(row: SamplingRow) -> SamplingRow:
        tokens = np.random.default_rng(row.seed).choice(ids, len(parents)).tolist()
        return replace(row, draft_tokens=tuple(tokens), parents=tuple(parents) if is_tree else None)

    return lambda rows: [draft(row) for row in rows]


def paths_of(row: SamplingRow) -> list[tuple[int, ...]]:
    """Return the drafted tokens that lead to each column of a row's logits, the first of which follows the prompt."""
    tokens = tuple(row.draft_tokens)
    if row.parents is None:
        return [tokens[:length] for length in range(len(tokens) + 1)]
    return [
        tuple(tokens[node - 1] for node in path_to(column, row.parents)[1:])
        for column in range(len(tokens) + 1)
    ]
