"""Measures settings of speculation against each other in interleaved rounds of one run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import Finished, SpeculationReport
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.gamma.costs import RowKind
from outrider.runtime.offline.options import MeasureOptions
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.step_costs import StepCosts

Report = Callable[[str, int, int], None]
Expect = Callable[[str, float], None]
"""Called with what will be done, and the seconds that it will take, before anything is measured."""

PLAIN = SpeculationParams(is_enabled=False)
Interval = tuple[float, float]
CONFIDENCE = 0.95
"""That a median lies in its interval. Six rounds are the fewest that give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one setting.

    Attributes:
        tokens_per_s: median over rounds; every round's rate is in ``rounds``.
        alpha_hat: accepted / trials reached, over all rounds; None without trials.
        tokens_per_step: tokens emitted per target pass, over all rounds; prompts and their first tokens are left out.
        operations: tokens that the target computed per token emitted, in the same passes.
        alpha_by_place: like ``alpha_hat``, of the first draft tokens, the second ones, and so on.
    """

    tokens_per_s: float
    rounds: tuple[float, ...]
    alpha_hat: float | None
    tokens_per_step: float
    operations: float
    alpha_by_place: tuple[float, ...] = ()

    def over(self, plain: Measured) -> float:
        """Return the speed-up over another setting of the same run: the median of the rounds' ratios."""
        return statistics.median(self._ratios(plain))

    def interval_over(self, plain: Measured) -> Interval | None:
        """Return the interval of that median; None for too few rounds."""
        return median_interval(self._ratios(plain))

    def _ratios(self, plain: Measured) -> list[float]:
        return [mine / other for mine, other in zip(self.rounds, plain.rounds, strict=True)]


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the narrowest pair of values that hold the median with ``CONFIDENCE``, whatever its law; None for too few.

    As many values lie beyond each end: one more, and the median would lie beyond too often, by the binomial law of
    values above it and below.
    """
    ranked, tail, num_beyond = sorted(values), 0.0, -1
    for count in range(len(ranked) // 2):
        tail += math.comb(len(ranked), count) / 2 ** len(ranked)
        if 2.0 * tail > 1.0 - CONFIDENCE:
            break
        num_beyond = count
    return None if num_beyond < 0 else (ranked[num_beyond], ranked[-1 - num_beyond])


def say_expected(
    rig: Rig,
    prompts: Prompts,
    options: MeasureOptions,
    temperature: float,
    num_runs: int,
    expect: Expect,
) -> None:
    """Say how long so many runs over the prompts take at the step costs of this machine, without drafts."""
    assert rig.costs is not None, "the rig was opened to know them"
    longest = max(len(prompt.tokens) for prompt in prompts)
    costs = StepCosts(
        table=rig.costs,
        kind=RowKind.GREEDY if temperature == 0.0 else RowKind.SAMPLED,
        batch=options.batch,
        num_cached=longest + options.max_tokens,
    )
    group_s = costs.target_s(longest) + options.max_tokens * costs.step_s(1)
    expect(
        f"{num_runs} runs over {len(prompts)} prompts with answers of {options.max_tokens} tokens",
        num_runs * math.ceil(len(prompts) / options.batch) * group_s,
    )


def measure_settings(
    rig: Rig,
    prompts: Prompts,
    settings: Sequence[SpeculationParams],
    options: MeasureOptions,
    *,
    temperature: float,
    phase: str,
    report: Report,
) -> tuple[Measured, list[Measured]]:
    """Measure plain decoding and each setting once per round, so that a disturbance of the machine spreads over all.

    The rig is idle before. ``report`` is called with the phase, the runs done and their number.
    """
    params, cells = SamplingParams(temperature=temperature), (PLAIN, *settings)
    _run(rig, prompts[: options.batch], params, PLAIN, options)  # the first touch of everything
    rates: list[list[float]] = [[] for _ in cells]
    ends: list[list[Finished]] = [[] for _ in cells]
    for number in range(options.rounds):
        for index, cell in enumerate(cells):
            finished, wall_s = _run(rig, prompts, params, cell, options)
            rates[index].append(sum(one.num_output for one in finished) / wall_s)
            ends[index] += finished
            report(phase, number * len(cells) + index + 1, options.rounds * len(cells))
    plain, *measured = (_measured(one, end) for one, end in zip(rates, ends, strict=True))
    return plain, measured


def num_trials(report: SpeculationReport) -> int:
    """Return the number of judged draft tokens: each first one, and each whose predecessor was accepted."""
    return sum(_trials(report))


def _trials(report: SpeculationReport) -> list[int]:
    """Return how many of them were at each place of a draft."""
    drafted, accepted = report.drafted_by_position, report.accepted_by_position
    followed = zip(accepted, drafted[1:], strict=False)
    return [*drafted[:1], *(min(pair) for pair in followed)]


def alpha_by_place(reports: Sequence[SpeculationReport]) -> tuple[float, ...]:
    """Return accepted / trials reached at each place of a draft that any was reached at."""
    trials = [sum(each) for each in zip_longest(*map(_trials, reports), fillvalue=0)]
    lists = [report.accepted_by_position for report in reports]
    accepted = [sum(each) for each in zip_longest(*lists, fillvalue=0)]
    return tuple(kept / count for kept, count in zip(accepted, trials, strict=False) if count)


def _run(
    rig: Rig,
    prompts: Prompts,
    params: SamplingParams,
    speculation: SpeculationParams,
    options: MeasureOptions,
) -> tuple[list[Finished], float]:
    finished: list[Finished] = []
    wall_s = 0.0
    for first in range(0, len(prompts), options.batch):
        group = prompts[first : first + options.batch]
        ended, took_s = rig.run(group, params, speculation, options.max_tokens)
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
        alpha_by_place=alpha_by_place(reports),
    )
