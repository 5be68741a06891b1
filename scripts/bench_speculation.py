"""Speculation on against off in one run: speed-up, what theory predicts, runtime overhead, share of sampling.

Prediction: the generalised Theorem 3.8 (Leviathan et al. 2023, section 3.3, with a measured verification cost)
S = N(alpha, gamma) / (gamma c + v(gamma + 1)), with c and v in units of the runtime's own plain step. It is
made twice: with every call timed alone, its model's weights in the processor's cache, and with the calls in turns as in
service, gamma of the draft and one of the target, where each model pushes the other out. Plain steps have no draft
beside them either way. Theory is about decoding, so speed-ups are those of the tokens after each prompt's first;
tokens per second are of the whole run, prompts read included. All settings take turns batch by batch, and a speed-up is
the median of the rounds' own.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from engines.base import Engine, Span
from engines.laws import SamplingLaw
from runtime.core.analysis import walltime_factor
from runtime.core.params import Finished, SpeculationParams
from runtime.offline.speed import num_trials
from scripts.bench_common import Rig, code_prompts, open_rig
from scripts.bench_results import Recorder, Row, row_of

CONTEXT = 200
REPEATS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One cell in one round: a batch size, a temperature, a gamma.

    Attributes:
        tokens_per_s: of the whole run.
        decoded_per_s: of the tokens that came after every prompt of their batch had been read.
    """

    batch: int
    temperature: float
    gamma: int
    tokens_per_s: float
    decoded_per_s: float
    alpha_hat: float | None
    tokens_per_step: float
    engine_share: float
    sampling_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a gamma, in plain steps: one draft call, and the verification of gamma + 1 tokens."""

    c: float
    v: float


def costs_of(rig: Rig, num_rows: int, gamma: int) -> tuple[Costs, Costs]:
    """Costs of calls timed alone, and of calls in turns, at the benchmark's context; medians of interleaved rounds."""
    assert rig.draft is not None
    draft, plain = _call(rig.draft, num_rows, 1), _call(rig.target, num_rows, 1)
    verify = _call(rig.target, num_rows, gamma + 1)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for name, call in (("plain", plain), ("draft", draft), ("verify", verify)):
            call()
            times[name].append(_time(call))
        # The first round after these finds the caches as they left them, the second as in service.
        for is_timed in (False, True):
            draft_s = sum(_time(draft) for _ in range(gamma))
            verify_s = _time(verify)
            if is_timed:
                times["draft in turns"].append(draft_s / gamma)
                times["verify in turns"].append(verify_s)
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    alone = Costs(c=middle["draft"] / middle["plain"], v=middle["verify"] / middle["plain"])
    in_turns = Costs(
        c=middle["draft in turns"] / middle["plain"], v=middle["verify in turns"] / middle["plain"]
    )
    return alone, in_turns


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _call(engine: Engine, num_rows: int, num_tokens: int) -> Callable[[], object]:
    """One extend of ``num_tokens`` tokens for ``num_rows`` slots behind the benchmark's context."""
    rng = np.random.default_rng(0)
    tokens = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, num_tokens))
    context = tuple(int(token) for token in rng.integers(5, engine.limits.vocab_size, CONTEXT))
    engine.extend(
        [Span(slot=slot, start=0, tokens=context, num_logits=0) for slot in range(num_rows)]
    )
    spans = [
        Span(slot=slot, start=CONTEXT, tokens=tokens, num_logits=num_tokens)
        for slot in range(num_rows)
    ]
    return lambda: engine.extend(spans)


@dataclass(slots=True)
class Tally:
    """What one setting did in one round so far; seconds."""

    wall_s: float = 0.0
    num_decoded: int = 0
    decoded_s: float = 0.0
    engine_s: float = 0.0
    sampling_s: float = 0.0
    ends: list[Finished] = field(default_factory=list)

    def run(
        self, rig: Rig, prompts: Sequence[Sequence[int]], temperature: float, gamma: int, max_tokens: int
    ) -> None:  # fmt: skip
        """Run one batch of prompts and add it up."""
        speculation = SpeculationParams(
            is_enabled=gamma > 0, drafter="model" if gamma else None, gamma=gamma
        )
        engine_before, sampling_before = rig.engine_s(), rig.sampler.total_s
        finished, wall_s = rig.run(
            prompts, SamplingLaw(temperature=temperature), speculation, max_tokens
        )
        num_decoded, decoded_s = rig.decoded
        self.wall_s += wall_s
        self.num_decoded += num_decoded
        self.decoded_s += decoded_s
        self.engine_s += rig.engine_s() - engine_before
        self.sampling_s += rig.sampler.total_s - sampling_before
        self.ends += finished

    def measurement(self, batch: int, temperature: float, gamma: int) -> Measurement:
        """The parts related to the whole."""
        reports = [one.report for one in self.ends]
        num_output = sum(one.num_output for one in self.ends)
        accepted = sum(report.num_accepted for report in reports)
        trials = sum(num_trials(report) for report in reports)
        return Measurement(
            batch=batch, temperature=temperature, gamma=gamma, tokens_per_s=num_output / self.wall_s,
            decoded_per_s=self.num_decoded / self.decoded_s,
            alpha_hat=accepted / trials if trials else None,
            tokens_per_step=num_output / sum(report.num_steps for report in reports),
            engine_share=self.engine_s / self.wall_s, sampling_share=self.sampling_s / self.wall_s,
        )  # fmt: skip


def measure(
    rig: Rig,
    prompts: Sequence[Sequence[int]],
    batch: int,
    temperature: float,
    gammas: Sequence[int],
    max_tokens: int,
) -> dict[int, Measurement]:
    """One round: batch by batch, every gamma in turn, so that all meet the same machine."""
    tallies = {gamma: Tally() for gamma in gammas}
    for number, first in enumerate(range(0, len(prompts) - batch + 1, batch)):
        for gamma in gammas if number % 2 else reversed(gammas):
            tallies[gamma].run(rig, prompts[first : first + batch], temperature, gamma, max_tokens)
    return {gamma: tally.measurement(batch, temperature, gamma) for gamma, tally in tallies.items()}


def median_cell(rounds: Sequence[Measurement]) -> Measurement:
    """The round of median speed."""
    return sorted(rounds, key=lambda one: one.tokens_per_s)[len(rounds) // 2]


def main(
    bundle: Path,
    gammas: Annotated[str, typer.Option(help="comma-separated; 0 is always measured")] = "1,2,4,8",
    batches: str = "1,8",
    temperatures: str = "0,1",
    num_prompts: int = 16,
    max_tokens: int = 96,
    rounds: int = 3,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Measure every cell ``rounds`` times, interleaved, and print medians beside the prediction."""
    recorder = Recorder("speculation", "speculation against plain decoding, in process", threads)
    rig = open_rig(bundle, num_threads=threads)
    prompts = [rig.tokenizer.encode(text) for text in code_prompts(num_prompts)]
    wanted = [0, *(int(gamma) for gamma in gammas.split(","))]
    table = Table(
        title=f"{bundle.name}: medians of {rounds} rounds in turns, {num_prompts} x {max_tokens} tokens"
    )
    for head in ("batch", "T", "gamma", "tokens/s", "decoding", "speed-up", "predicted alone", "in turns", "ratio",
                 "alpha_hat", "tokens/step", "engine share", "sampling share"):  # fmt: skip
        table.add_column(head, justify="right")
    rows = []
    for batch in (int(one) for one in batches.split(",")):
        costs = {gamma: costs_of(rig, batch, gamma) for gamma in wanted if gamma and rig.draft}
        for temperature in (float(one) for one in temperatures.split(",")):
            cells: dict[int, list[Measurement]] = {gamma: [] for gamma in wanted}
            for _ in range(rounds):
                one_round = measure(rig, prompts, batch, temperature, wanted, max_tokens)
                for gamma, one in one_round.items():
                    cells[gamma].append(one)
            for gamma in wanted:
                cell = median_cell(cells[gamma])
                alone, in_turns = (
                    (
                        walltime_factor(cell.alpha_hat, gamma, one.c, verify_cost=one.v)
                        for one in costs[gamma]
                    )
                    if cell.alpha_hat is not None and gamma in costs
                    else (1.0, 1.0)
                )
                pairs = zip(cells[gamma], cells[0], strict=True)
                speedup = statistics.median(
                    on.decoded_per_s / off.decoded_per_s for on, off in pairs
                )
                table.add_row(
                    str(batch), f"{temperature:g}", str(gamma), f"{cell.tokens_per_s:.0f}",
                    f"{cell.decoded_per_s:.0f}", f"{speedup:.2f}", f"{alone:.2f}", f"{in_turns:.2f}",
                    f"{speedup / in_turns:.2f}",
                    "-" if cell.alpha_hat is None else f"{cell.alpha_hat:.2f}", f"{cell.tokens_per_step:.2f}",
                    f"{cell.engine_share:.2f}", f"{cell.sampling_share:.3f}",
                )  # fmt: skip
                row = row_of(cell, ("batch", "temperature", "gamma"), bundle=bundle.name)
                theory = {"speedup": speedup, "predicted_alone": alone, "predicted": in_turns}
                for name, one in zip(("_alone", ""), costs.get(gamma, ()), strict=False):
                    theory |= {f"c{name}": one.c, f"v{name}": one.v}
                rows.append(Row(case=row.case, figures={**row.figures, **theory}))
    Console(width=150).print(table)
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
