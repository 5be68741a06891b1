"""Speculation on against off in one run: speed-up, what theory predicts, runtime overhead, share of sampling.

Every group of prompts is run at every gamma before the next group, in an order that turns. Speed-ups are of one round,
and the table shows the median of the rounds: of the whole run, prompts included, and of decoding alone, from the first
token of a group's last row on.

Prediction, for decoding: the generalised Theorem 3.8 (Leviathan et al. 2023, section 3.3, with a measured verification
cost) S = N(alpha, gamma) / (gamma c + v(gamma + 1)), with c and v in units of the runtime's own plain step, timed in
every round. The calls take turns as in service, gamma of the draft and one of the target, where each model pushes the
other out of the processor's cache. Each call comes behind the pause that the runtime made between its calls in this
round (plain steps likewise; ``bench/tools/call_times.py`` says why). The first draft call of a turn feeds two
tokens in the share alpha^gamma of steps, those behind a step that kept its whole draft. The time of the pauses counts
nowhere: the formula's overhead is 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.speed import num_trials
from outrider.runtime.oracle.analysis import walltime_factor

from scripts.lab.bench.tools.call_times import CallTimes, Costs
from scripts.tools.common import Rig, code_prompts, open_rig
from scripts.tools.results import Recorder, Row
from scripts.tools.tables import show

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One gamma in one round.

    Attributes:
        num_emitted: tokens of ``num_output`` that passes of the target emitted, which ``num_steps`` counts.
        pause_s: from the end of one engine call to the start of the next.
    """

    tokens_per_s: float
    decode_tokens_per_s: float
    num_accepted: int
    num_trials: int
    num_output: int
    num_emitted: int
    num_steps: int
    pause_s: float
    engine_share: float
    sampling_share: float


def run_round(
    rig: Rig, groups: Sequence[Prompts], temperature: float, gammas: Sequence[int], max_tokens: int
) -> dict[int, Sample]:
    """Every group at every gamma, the gammas in turns."""
    parts: dict[int, list[Sample]] = {gamma: [] for gamma in gammas}
    for number, group in enumerate(groups):
        turn = number % len(gammas)
        for gamma in (*gammas[turn:], *gammas[:turn]):
            parts[gamma].append(run_group(rig, group, temperature, gamma, max_tokens))
    return {gamma: joined(samples) for gamma, samples in parts.items()}


def run_group(rig: Rig, group: Prompts, temperature: float, gamma: int, max_tokens: int) -> Sample:
    """Run prompts that arrive together, and relate the parts to the whole."""
    speculation = SpeculationParams(
        is_enabled=gamma > 0, drafter="model" if gamma else None, gamma=gamma
    )
    engine_before, sampling_before = rig.engine_s(), rig.sampler.total_s
    engines = [engine for engine in (rig.target, rig.draft) if engine is not None]
    for engine in engines:
        engine.calls = []
    params = SamplingParams(temperature=temperature)
    answers, wall_s = rig.answer(group, params, speculation, max_tokens)
    reports = [one.end.report for one in answers if isinstance(one.end, Finished)]
    num_output = sum(len(one.tokens) for one in answers)
    return Sample(
        tokens_per_s=num_output / wall_s,
        decode_tokens_per_s=decode_rate([one.arrivals for one in answers]),
        num_accepted=sum(report.num_accepted for report in reports),
        num_trials=sum(num_trials(report) for report in reports),
        num_output=num_output,
        num_emitted=sum(report.num_emitted for report in reports),
        num_steps=sum(report.num_steps for report in reports),
        pause_s=median_pause([call for engine in engines for call in engine.calls or ()]),
        engine_share=(rig.engine_s() - engine_before) / wall_s,
        sampling_share=(rig.sampler.total_s - sampling_before) / wall_s,
    )


def median_pause(calls: Iterable[tuple[float, float]]) -> float:
    """Seconds from the end of one call to the start of the next; two calls, as (began, ended), at least."""
    in_order = sorted(calls)
    return statistics.median(
        later[0] - earlier[1] for earlier, later in itertools.pairwise(in_order)
    )


def decode_rate(arrivals: Sequence[Sequence[float]]) -> float:
    """Tokens per second from the moment on when every row has its first token.

    That the draft model reads the prompts, too, is part of it: steps are accounted for several at once, so that only
    the first token, which comes alone, and the last say when they were made.

    Args:
        arrivals: per row, when each token came; seconds.
    """
    began = max(times[0] for times in arrivals)
    later = [at for times in arrivals for at in times if at > began]
    return len(later) / (max(later) - began) if later else math.nan


def joined(samples: Sequence[Sample]) -> Sample:
    """Sums of counts, and means of rates and shares over groups of about equal work."""
    counts = ("num_accepted", "num_trials", "num_output", "num_emitted", "num_steps")
    rates = ("tokens_per_s", "decode_tokens_per_s")
    return Sample(
        **{name: sum(getattr(one, name) for one in samples) for name in counts},
        **{
            name: statistics.harmonic_mean([getattr(one, name) for one in samples])
            for name in rates
        },
        pause_s=statistics.fmean(one.pause_s for one in samples),
        engine_share=statistics.fmean(one.engine_share for one in samples),
        sampling_share=statistics.fmean(one.sampling_share for one in samples),
    )


def measured(gamma: int, rounds: Sequence[dict[int, Sample]]) -> dict[str, float | None]:
    """Return the figures of one gamma: over all rounds, or the median of them.

    Speed-ups are over gamma 0 in the same round: of the whole run, and of decoding alone.
    """
    samples = [one[gamma] for one in rounds]

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in samples)

    def speedup(name: str) -> float:
        return statistics.median(
            getattr(one[gamma], name) / getattr(one[0], name) for one in rounds
        )

    def summed(name: str) -> int:
        return sum(getattr(one, name) for one in samples)

    trials = summed("num_trials")
    return {
        "tokens_per_s": median("tokens_per_s"),
        "decode_tokens_per_s": median("decode_tokens_per_s"),
        "speedup": speedup("tokens_per_s"),
        "decode_speedup": speedup("decode_tokens_per_s"),
        "alpha_hat": summed("num_accepted") / trials if trials else None,
        "tokens_per_step": summed("num_emitted") / summed("num_steps"),
        "engine_share": median("engine_share"),
        "sampling_share": median("sampling_share"),
    }


def theory(
    gamma: int, alpha_hat: float | None, decode_speedup: float | None, costs: Costs
) -> dict[str, float]:
    """Return the formula's prediction for a cell that drafts; ``ratio`` is the speed-up of decoding over it."""
    if alpha_hat is None or decode_speedup is None:
        return {}
    factor = walltime_factor(alpha_hat, gamma, costs.c, verify_cost=costs.v)
    return {"predicted": factor, "c": costs.c, "v": costs.v, "ratio": decode_speedup / factor}


def main(
    bundle: Path,
    gammas: Annotated[str, typer.Option(help="comma-separated; 0 is always measured")] = "1,2,4,8",
    batches: str = "1,8",
    temperatures: str = "0,1",
    num_prompts: int = 16,
    max_tokens: int = 96,
    rounds: int = 5,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Measure every cell ``rounds`` times, interleaved, and print medians beside the prediction."""
    recorder = Recorder("speculation", "speculation against plain decoding, in process", threads)
    rig = open_rig(bundle, num_threads=threads)
    prompts = [rig.tokenizer.encode(text) for text in code_prompts(num_prompts)]
    context = round(statistics.fmean(map(len, prompts))) + max_tokens // 2
    drafted = [int(gamma) for gamma in gammas.split(",")]
    rows = []
    for batch in (int(one) for one in batches.split(",")):
        groups = [prompts[at : at + batch] for at in range(0, num_prompts - batch + 1, batch)]
        times = CallTimes(rig, batch, context=context)
        for temperature in (float(one) for one in temperatures.split(",")):
            run_round(rig, groups[:1], temperature, [0, *drafted], max_tokens)  # the first touch
            found = []
            for _ in range(rounds):
                found.append(run_round(rig, groups, temperature, [0, *drafted], max_tokens))
                times.take({gamma: one.pause_s for gamma, one in found[-1].items()})
            for gamma in (0, *drafted):
                figures = measured(gamma, found)
                if gamma:
                    alpha_hat = figures["alpha_hat"]
                    costs = times.costs(gamma, share_whole=(alpha_hat or 0.0) ** gamma)
                    figures |= theory(gamma, alpha_hat, figures["decode_speedup"], costs)
                case = {
                    "bundle": bundle.name, "batch": batch, "temperature": temperature, "gamma": gamma,
                }  # fmt: skip
                rows.append(Row(case=case, figures=figures))
    title = f"medians of {rounds} interleaved rounds, {num_prompts} x {max_tokens} tokens"
    show(rows, f"{bundle.name}: {title}")
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
