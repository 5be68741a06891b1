"""Costs of bare engine calls in units of a plain step, the calls in turns as in service.

A call's time depends on what its threads did just before: plain steps of a small model that follow each other without
a pause take up to a fifth longer than behind the tenth of a millisecond that the runtime spends between them, and
verifications behind drafts do not. So calls in turns come behind the pauses that service has, and plain steps behind
plain steps: the first ones after drafts, which leave other things in the processor's caches, take up to a third longer
(int8 weights, half a millisecond a step).

In service the first draft call of a step feeds two tokens where the step before kept its whole draft: the last token of
that draft, which the draft model has not seen, and the one that the target added. Turns are timed both ways.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from outrider.engines.base import Engine, Span

from scripts.tools.common import Rig

REPEATS = 6
"""Of every call, in every round."""
PLAIN_BEFORE = 8
"""Plain steps in a row before those that are timed."""
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
        # By gamma: seconds of plain steps in a row.
        self._plain: dict[int, list[float]] = defaultdict(list)
        # By gamma and tokens of the first draft call: seconds of all drafts of a turn, and of its verification.
        self._turns: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def take(self, pauses: Mapping[int, float]) -> None:
        """Time every call ``REPEATS`` times more.

        Args:
            pauses: by gamma, 0 for plain steps, seconds from the end of one call to the start of the next in service.
        """
        rig, rows = self._rig, self._num_rows
        assert rig.draft is not None
        # The longer context comes last: it is valid for both.
        behind_all = _call(rig.draft, rows, 2, self._context - 1)
        draft = _call(rig.draft, rows, 1, self._context)
        plain = _call(rig.target, rows, 1, self._context)
        for gamma in (gamma for gamma in pauses if gamma):
            verify = _call(rig.target, rows, gamma + 1, self._context)
            for _ in range(REPEATS):
                in_a_row = [_time(plain, pauses[0]) for _ in range(PLAIN_BEFORE + 2)]
                self._plain[gamma] += in_a_row[PLAIN_BEFORE:]
                for num_first, first in zip(FIRST_SPANS, (draft, behind_all), strict=True):
                    drafts = [first, *[draft] * (gamma - 1)]
                    # The first turn after these finds the caches as they left them, the second as in service.
                    for is_timed in (False, True):
                        draft_s = sum(_time(one, pauses[gamma]) for one in drafts)
                        verify_s = _time(verify, pauses[gamma])
                        if is_timed:
                            self._turns[gamma, num_first].append((draft_s / gamma, verify_s))

    def costs(self, gamma: int, *, share_whole: float) -> Costs:
        """Return medians of calls in turns behind pauses, in plain steps timed likewise.

        Args:
            gamma: draft tokens per step.
            share_whole: of the steps, those that kept their whole draft.
        """
        draft_s = verify_s = 0.0
        for num_first, share in zip(FIRST_SPANS, (1.0 - share_whole, share_whole), strict=True):
            drafts, verifications = zip(*self._turns[gamma, num_first], strict=True)
            draft_s += share * statistics.median(drafts)
            verify_s += share * statistics.median(verifications)
        plain_s = statistics.median(self._plain[gamma])
        return Costs(c=draft_s / plain_s, v=verify_s / plain_s)


def _time(call: Callable[[], object], pause_s: float = 0.0) -> float:
    """Seconds of a call behind a pause in which this thread is busy, as the host's work keeps it."""
    ready = time.perf_counter() + pause_s
    while time.perf_counter() < ready:
        pass
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _call(engine: Engine, num_rows: int, num_tokens: int, num_context: int) -> Callable[[], object]:
    """One extend of ``num_tokens`` tokens for ``num_rows`` slots behind ``num_context``."""
    rng = np.random.default_rng(0)
    tokens = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, num_tokens))
    context = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, num_context))
    engine.extend(
        [
            Span(slot=slot, start=0, tokens=context, num_logits=0, num_settled=len(context))
            for slot in range(num_rows)
        ]
    )
    spans = [
        Span(slot=slot, start=num_context, tokens=tokens, num_logits=num_tokens, num_settled=1)
        for slot in range(num_rows)
    ]
    return lambda: engine.extend(spans)
