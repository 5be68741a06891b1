"""What drafts would have brought on answers that exist already: tokens per pass, and the seconds by measured costs.

Drafts of point masses are kept where the target draws the same token, so an answer that the target wrote, greedy or
sampled, says exactly what would have been kept of them. Nothing is computed anew but the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.drafters.base import DrafterParts, DraftRow
from outrider.runtime.drafters.registry import Drafters, build_drafters
from outrider.runtime.gamma.costs import RowKind
from outrider.runtime.offline.distill.answers import Written
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.step_costs import StepCosts
from outrider.runtime.oracle.analysis import Interval, optimal_gamma, ratio_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A drafter at one gamma, over held-out answers.

    Attributes:
        name: of the drafter.
        gamma: draft tokens of a pass at most.
        tokens: [n] behind the first token, by answer.
        passes: [n] of the target.
        plain_s: [n] seconds without drafts, by this machine's costs.
        drafted_s: [n] seconds with them.
    """

    name: str
    gamma: int
    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    plain_s: tuple[float, ...]
    drafted_s: tuple[float, ...]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass of the target yields."""
        return sum(self.tokens) / max(1, sum(self.passes))

    @property
    def speedup(self) -> float:
        """Predicted, over plain decoding."""
        return sum(self.plain_s) / sum(self.drafted_s)

    def gain_over(self, other: Replayed) -> Interval | None:
        """Return the interval of the seconds of another one over these, answer by answer; None for too few."""
        return ratio_interval(other.drafted_s, self.drafted_s)

    def words(self) -> str:
        """Return a line of a table: both figures with their intervals."""
        passes = ratio_interval(self.tokens, self.passes)
        speed = ratio_interval(self.plain_s, self.drafted_s)
        return (
            f"{self.name:<18} {self.gamma:>2}   {self.tokens_per_pass:.3f}{_words(passes)}   "
            f"{self.speedup:.3f}{_words(speed)}"
        )


def _words(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"


def replay(
    name: str,
    drafters: Drafters,
    gamma: int,
    answers: Sequence[Written],
    costs: StepCosts,
    end_token_ids: tuple[int, ...],
) -> Replayed:
    """Return what a drafter that calls no model brings at a gamma on answers of two tokens or more."""
    found = [
        _replay_one(f"{name} {gamma} {number}", (name, drafters), gamma, one, costs, end_token_ids)
        for number, one in enumerate(answers)
    ]
    tokens, passes, plain_s, drafted_s = zip(*found, strict=True)
    return Replayed(
        name=name, gamma=gamma, tokens=tokens, passes=passes, plain_s=plain_s, drafted_s=drafted_s
    )


def _replay_one(
    key: str,
    drafter: tuple[str, Drafters],
    gamma: int,
    written: Written,
    costs: StepCosts,
    end_token_ids: tuple[int, ...],
) -> tuple[int, int, float, float]:
    """Return tokens behind the first, passes, plain seconds and seconds with drafts of one answer."""
    name, drafters = drafter
    text, drafted_s, passes = np.array(written.tokens, dtype=np.int64), 0.0, 0
    params = SamplingParams(
        temperature=0.0 if written.is_greedy else 1.0, end_token_ids=end_token_ids
    )
    place = written.num_prompt + 1
    while place < len(text):
        # A pass emits one token more than it keeps of the draft.
        room = min(gamma, len(text) - place - 1)
        sampling = SamplingRow(
            index=0, slot=0, params=params, mode=ExactnessMode.MAX_ACCEPT, lenience=1.0, seed=0,
            history=text[:place], num_prompt=written.num_prompt,
        )  # fmt: skip
        row = DraftRow(sampling=sampling, text=text[:place], gamma=room, num_computed=0, key=key)
        tokens = drafters[name].propose([row], [0])[0].tokens if room else ()
        wanted = text[place : place + len(tokens)].tolist()
        kept = next(
            (i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]),
            len(tokens),
        )
        drafted_s += costs.step_s(1 + len(tokens)) + len(tokens) * costs.draft_s(uses_model=False)
        passes += 1
        place += kept + 1
    drafters.forget(key)
    num_tokens = len(text) - written.num_prompt - 1
    return num_tokens, passes, num_tokens * costs.step_s(1), drafted_s


NAMES = ("suffix", "datastore", "suffix+datastore")
"""Drafters that are compared: without the corpus, with it alone, and with it where the request's text says little."""


def drafters_with(rig: Rig, corpus: Path) -> Drafters:
    """Return the drafters of a server with a corpus and no draft model, to which each request is the first one."""
    manifest = rig.bundle.manifest
    return build_drafters(
        DrafterParts(
            draft=None,
            sampler=rig.sampler,
            vocab_size=manifest.target.vocab_size,
            chunk=manifest.max_extend,
            max_gamma=manifest.max_gamma,
            config=DraftingConfig(datastore=str(corpus), history_scope=HistoryScope.REQUEST),
        )
    )


def compare(rig: Rig, corpus: Path, written: Sequence[Written]) -> dict[bool, list[Replayed]]:
    """Return each of ``NAMES`` at its best gamma, on held-out answers that are greedy (True) and on sampled ones.

    A request decodes alone.

    Args:
        rig: with known step costs.
        corpus: a datastore of other answers.
        written: answers; those that are not held out are left out.
    """
    manifest, drafters = rig.bundle.manifest, drafters_with(rig, corpus)
    held = [one for one in written if one.is_held_out and len(one.answer) > 1]
    found = {}
    for is_greedy in (True, False):
        if given := [one for one in held if one.is_greedy is is_greedy]:
            costs = step_costs(rig, written, is_greedy=is_greedy)
            found[is_greedy] = [
                max(
                    (
                        replay(name, drafters, gamma, given, costs, manifest.eos_token_ids)
                        for gamma in range(1, manifest.max_gamma + 1)
                    ),
                    key=lambda one: one.speedup,
                )
                for name in NAMES
            ]
    return found


def step_costs(rig: Rig, written: Sequence[Written], *, is_greedy: bool) -> StepCosts:
    """Return what steps of one request cost at the length that answers have."""
    assert rig.costs is not None, "the rig was opened to know them"
    return StepCosts(
        table=rig.costs,
        kind=RowKind.GREEDY if is_greedy else RowKind.SAMPLED,
        num_cached=max(len(one.tokens) for one in written),
    )


def predicted_of_alpha(alpha: float, costs: StepCosts, max_gamma: int) -> tuple[int, float]:
    """Return the best gamma of a draft model and its speed-up, were each of its tokens kept with ``alpha``."""
    c = costs.c(uses_model=True)
    return optimal_gamma(alpha, c, max_gamma=max_gamma, verify_cost=costs.v)
