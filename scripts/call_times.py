"""What bare engine calls cost in units of a plain step: alone, and in turns as in service.

In service the first draft call of a step feeds two tokens where the step before kept its whole draft: the last token of
that draft, which the draft model has not seen, and the one that the target added. Turns are timed both ways.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engines.base import Engine, Span
from scripts.bench_common import Rig

REPEATS = 6
"""Of every call, in every round."""
FIRST_SPANS = (1, 2)
"""Tokens of a step's first draft call: behind a step that rejected some of its draft, and behind one that did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a gamma, in plain steps: one draft call, and the verification of gamma + 1 tokens."""

    c: float
    v: float


class CallTimes:
    """Seconds of bare engine calls, added to round by round.

    Args:
        rig: with a draft model, idle whenever calls are timed.
        num_rows: of every call.
        context: tokens before those of every call.
    """

    def __init__(self, rig: Rig, num_rows: int, *, context: int) -> None:
        self._rig, self._num_rows, self._context = rig, num_rows, context
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        # By gamma and tokens of the first draft call: seconds of all drafts of a turn, and of its verification.
        self._turns: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def take(self, gammas: Sequence[int]) -> None:
        """Time every call ``REPEATS`` times more."""
        rig, rows = self._rig, self._num_rows
        assert rig.draft is not None
        # The longer context comes last: it is valid for both.
        behind_all = _call(rig.draft, rows, 2, self._context - 1)
        draft = _call(rig.draft, rows, 1, self._context)
        plain = _call(rig.target, rows, 1, self._context)
        for gamma in gammas:
            verify = _call(rig.target, rows, gamma + 1, self._context)
            for _ in range(REPEATS):
                for name, call in (("plain", plain), ("draft", draft), ("verify", verify)):
                    call()
                    self._seconds[name, gamma].append(_time(call))
                for num_first, first in zip(FIRST_SPANS, (draft, behind_all), strict=True):
                    drafts = [first, *[draft] * (gamma - 1)]
                    # The first turn after these finds the caches as they left them, the second as in service.
                    for is_timed in (False, True):
                        draft_s = sum(map(_time, drafts))
                        verify_s = _time(verify)
                        if is_timed:
                            self._turns[gamma, num_first].append((draft_s / gamma, verify_s))

    def costs(self, gamma: int, *, share_whole: float) -> tuple[Costs, Costs]:
        """Medians of calls timed alone, and of calls in turns, behind the context.

        Args:
            gamma: draft tokens per step.
            share_whole: of the steps, those that kept their whole draft.
        """
        alone = {
            name: statistics.median(taken)
            for (name, at), taken in self._seconds.items()
            if at == gamma
        }
        draft_s = verify_s = 0.0
        for num_first, share in zip(FIRST_SPANS, (1.0 - share_whole, share_whole), strict=True):
            drafts, verifications = zip(*self._turns[gamma, num_first], strict=True)
            draft_s += share * statistics.median(drafts)
            verify_s += share * statistics.median(verifications)
        plain = alone["plain"]
        return (
            Costs(c=alone["draft"] / plain, v=alone["verify"] / plain),
            Costs(c=draft_s / plain, v=verify_s / plain),
        )


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _call(engine: Engine, num_rows: int, num_tokens: int, num_context: int) -> Callable[[], object]:
    """One extend of ``num_tokens`` tokens for ``num_rows`` slots behind ``num_context``."""
    rng = np.random.default_rng(0)
    tokens = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, num_tokens))
    context = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, num_context))
    engine.extend(
        [Span(slot=slot, start=0, tokens=context, num_logits=0) for slot in range(num_rows)]
    )
    spans = [
        Span(slot=slot, start=num_context, tokens=tokens, num_logits=num_tokens)
        for slot in range(num_rows)
    ]
    return lambda: engine.extend(spans)
