"""Rounds whose drafts, verification and judgement follow one another on the device.

    draft -> propose -> draft -> propose -> ... -> target -> judge -> one copy to the host

Each proposed token is the next draft step's input and, with the others, the target's, where it lies.
The host knows the shapes, the parameters and all noise before the round begins; it enqueues the whole
of it, has the device's time to plan what follows and to enqueue it behind, and then waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from outrider.engines.accelerators.device.base import DeviceTensor, PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.sampling.round import DeviceRound
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.accelerators.device.transfers import DeviceTokens
from outrider.engines.base import EngineError, IntArray, Span
from outrider.engines.rounds import DraftError, Round, RoundAnswer, RoundRow, do_nothing
from outrider.engines.sampling.base import SamplingParams

# Stands where the device puts a token of its own.
_ANY_TOKEN = 0


class DeviceRounds:
    """Implements ``engines.rounds.Rounds``.

    The draft is None where no row asks for it.

    Attributes:
        device: that all three share.
    """

    def __init__(
        self,
        target: PlanEngine,
        draft: PlanEngine | None,
        sampler: DeviceSampler,
        device: PlanDevice,
    ) -> None:
        self.device = device
        self._target = target
        self._draft = draft
        self._sampler = sampler

    def why_not(self, params: SamplingParams) -> str:
        """Say why rows with these parameters cannot be judged here; see ``Rounds.why_not``."""
        return self._sampler.why_not(params)

    def run(self, asked: Round, meanwhile: Callable[[], None] = do_nothing) -> list[RoundAnswer]:
        """Draft, verify and judge; see ``Rounds.run``."""
        rows = [row.sampling for row in asked.rows]
        gammas = np.array([row.num_drafted for row in asked.rows])
        longest = int(gammas.max())
        round_ = self._sampler.begin(rows, gamma=longest) if longest else None
        if round_ is not None:
            depths = _depths(asked, longest)
            round_.prepare(depths, gammas)
            self._propose(asked, round_, depths)
        spans = [*_target_spans(asked)]
        given = [] if round_ is None else [*_given_drafts(asked, round_.draft_tokens)]
        logits = self._target.extend_on_device(spans, given)
        if round_ is None:
            # Plain decoding; some engines give more columns than are wanted.
            round_ = self._sampler.begin(rows, gamma=logits.shape[1] - 1)
        coming = round_.send(round_.judge(logits, gammas))
        # What this enqueues runs behind the answers' copy, which alone is waited for.
        meanwhile()
        found = round_.receive(coming, gammas)
        emitted = [
            (*tokens[: verdict.num_accepted], verdict.next_token or 0) for tokens, verdict in found
        ]
        verdicts = round_.with_tops([verdict for _, verdict in found], logits, emitted)
        return [
            RoundAnswer(draft_tokens=tokens, verdict=verdict)
            for (tokens, _), verdict in zip(found, verdicts, strict=True)
        ]

    def _propose(self, asked: Round, round_: DeviceRound, depths: Sequence[IntArray]) -> None:
        """Enqueue the draft model's steps and the draws between them."""
        starts = list(asked.draft_starts)
        drawn: DeviceTensor | None = None
        for depth, of_rows in enumerate(depths):
            active = [row for row in asked.rows if row.gamma > depth]
            fed = {row.sampling.slot: _fed(row, starts, depth) for row in active}
            spans = [
                Span(slot=slot, start=start, tokens=fed.get(slot, ()), num_logits=int(slot in fed))
                for slot, start in enumerate(starts)
            ]
            given = [] if drawn is None else [*_given(fed, drawn)]
            try:
                assert self._draft is not None, "rows are drafted for only where there is a draft"
                logits = self._draft.extend_on_device(spans, given)
            except EngineError as error:
                raise DraftError(str(error)) from error
            drawn = round_.propose(logits, of_rows)
            for slot, span in fed.items():
                starts[slot] += len(span)


def _depths(asked: Round, longest: int) -> list[IntArray]:
    """For each proposal, draft tokens of each row before it.

    A row that rests writes where no draft token of it lies.
    """
    return [
        np.array([depth if row.gamma > depth else longest for row in asked.rows])
        for depth in range(max(row.gamma for row in asked.rows))
    ]


def _fed(row: RoundRow, starts: Sequence[int], depth: int) -> tuple[int, ...]:
    """Tokens for the draft model: first those it misses, then the one just drawn."""
    if depth:
        return (_ANY_TOKEN,)
    return tuple(row.sampling.history[starts[row.sampling.slot] :].tolist())


def _target_spans(asked: Round) -> Iterator[Span]:
    """The last committed token and the draft of each row; nothing for slots between rows."""
    rows = {row.sampling.slot: row for row in asked.rows}
    for slot, start in enumerate(asked.starts):
        row = rows.get(slot)
        if row is None:
            yield Span(slot=slot, start=start, tokens=(), num_logits=0)
            continue
        drafted = row.sampling.draft_tokens or (_ANY_TOKEN,) * row.gamma
        tokens = (int(row.sampling.history[-1]), *drafted)
        yield Span(slot=slot, start=start, tokens=tokens, num_logits=len(tokens))


def _given_drafts(asked: Round, drafted: DeviceTensor | None) -> Iterator[DeviceTokens]:
    """The model's drafts, behind the last committed tokens."""
    if drafted is None:
        return
    gammas = {row.sampling.slot: row.gamma for row in asked.rows if row.gamma}
    for gamma in set(gammas.values()):
        for rows in _runs(slot for slot, one in gammas.items() if one == gamma):
            yield DeviceTokens(source=drafted, rows=rows, column=1, width=gamma)


def _given(slots: Iterable[int], drawn: DeviceTensor) -> Iterator[DeviceTokens]:
    """Tokens just drawn, [B, 1] int64, as the first of their rows."""
    for rows in _runs(slots):
        yield DeviceTokens(source=drawn, rows=rows, column=0, width=1)


def _runs(slots: Iterable[int]) -> Iterator[range]:
    """Ascending slots as ranges without gaps."""
    for _, group in groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0]):
        members = [slot for _, slot in group]
        yield range(members[0], members[-1] + 1)
