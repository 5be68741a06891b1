"""Settings of speculation against each other in one run, in interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import Finished, SpeculationParams, SpeculationReport
from outrider.runtime.offline.rig import Rig

Report = Callable[[str, int, int], None]
Prompts = Sequence[Sequence[int]]

PLAIN = SpeculationParams(is_enabled=False)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: a temperature and how requests are drafted for."""

    temperature: float
    speculation: SpeculationParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one cell gave.

    Attributes:
        tokens_per_s: median over rounds; every round's rate is in ``rounds``.
        alpha_hat: accepted / trials reached, over all rounds; None without trials.
        tokens_per_step: tokens emitted per target pass, over all rounds; prompts, and the first tokens that come
            with them, count in neither.
        operations: tokens that the target computed per token emitted, in the same passes.
    """

    tokens_per_s: float
    rounds: tuple[float, ...]
    alpha_hat: float | None
    tokens_per_step: float
    operations: float

    def over(self, plain: Measured) -> float:
        """Speed-up over another cell of the same run: the median of the rounds' ratios."""
        pairs = zip(self.rounds, plain.rounds, strict=True)
        return statistics.median(mine / other for mine, other in pairs)


def measure_cells(
    rig: Rig,
    prompts: Prompts,
    cells: Sequence[Cell],
    *,
    max_tokens: int,
    batch: int,
    rounds: int,
    phase: str,
    report: Report,
) -> list[Measured]:
    """Run every cell once per round, so that a disturbance of the machine spreads over all.

    Args:
        rig: idle.
        prompts: run in groups of ``batch``.
        cells: what to measure.
        max_tokens: of every answer.
        batch: prompts that are run together.
        rounds: runs of every cell.
        phase: name of the work.
        report: told the phase, the runs done and their number.
    """
    _run(rig, prompts[:batch], cells[0], max_tokens, batch)  # the first touch of everything
    rates: list[list[float]] = [[] for _ in cells]
    ends: list[list[Finished]] = [[] for _ in cells]
    for number in range(rounds):
        for index, cell in enumerate(cells):
            finished, wall_s = _run(rig, prompts, cell, max_tokens, batch)
            rates[index].append(sum(one.num_output for one in finished) / wall_s)
            ends[index] += finished
            report(phase, number * len(cells) + index + 1, rounds * len(cells))
    return [_measured(one, end) for one, end in zip(rates, ends, strict=True)]


def num_trials(report: SpeculationReport) -> int:
    """Draft tokens that were judged: each first one, and each whose predecessor was accepted."""
    drafted, accepted = report.drafted_by_position, report.accepted_by_position
    followed = zip(accepted, drafted[1:], strict=False)
    return sum(drafted[:1]) + sum(min(pair) for pair in followed)


def _run(
    rig: Rig, prompts: Prompts, cell: Cell, max_tokens: int, batch: int
) -> tuple[list[Finished], float]:
    params = SamplingParams(temperature=cell.temperature)
    finished: list[Finished] = []
    wall_s = 0.0
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        ended, took_s = rig.run(group, params, cell.speculation, max_tokens)
        finished += ended
        wall_s += took_s
    return finished, wall_s


def _measured(rates: Sequence[float], finished: Sequence[Finished]) -> Measured:
    reports = [one.report for one in finished]
    trials = sum(num_trials(report) for report in reports)
    accepted = sum(report.num_accepted for report in reports)
    num_steps = sum(report.num_steps for report in reports)
    num_drafted = sum(report.num_drafted for report in reports)
    num_emitted = sum(report.num_emitted for report in reports)
    return Measured(
        tokens_per_s=statistics.median(rates),
        rounds=tuple(rates),
        alpha_hat=accepted / trials if trials else None,
        tokens_per_step=num_emitted / num_steps,
        operations=(num_drafted + num_steps) / num_emitted,
    )
