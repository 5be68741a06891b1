"""Block verification against judging token by token: tokens per target pass and tokens per second.

Both ways run the same prompts in every round, in alternating order; the prompts rotate from round to round, and with
them the seeds, which are a prompt's place. Tokens per pass are of all rounds together, speeds and their ratio medians.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import SpeculationParams
from rich.console import Console
from rich.table import Table

from scripts.bench.tools.common import Rig, code_prompts, open_rig
from scripts.bench.tools.results import Recorder, Row

WAYS = {"token-wise": False, "block": True}


@dataclass(slots=True)
class Tally:
    """What one way did: per round tokens per second, and per request its tokens per pass."""

    speeds: list[float] = field(default_factory=list)
    per_pass: list[float] = field(default_factory=list)
    num_emitted: int = 0
    num_passes: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Over all requests."""
        return self.num_emitted / self.num_passes


def measure(
    rig: Rig, prompts: list[tuple[int, ...]], gamma: int, temperature: float, rounds: int, num_tokens: int
) -> dict[str, Tally]:  # fmt: skip
    """Both ways at one gamma; a first round warms up and is not counted."""
    tallies = {name: Tally() for name in WAYS}
    params = SamplingParams(temperature=temperature)
    for number in range(rounds + 1):
        turned = prompts[number:] + prompts[:number]
        for name in list(WAYS)[:: 1 if number % 2 else -1]:
            way = SpeculationParams(
                drafter="model", gamma=gamma, is_adaptive=False, verifies_block=WAYS[name]
            )
            finished, took_s = rig.run(turned, params, way, num_tokens)
            if number == 0:
                continue
            tally = tallies[name]
            tally.speeds.append(sum(one.num_output for one in finished) / took_s)
            tally.num_emitted += sum(one.report.num_emitted for one in finished)
            tally.num_passes += sum(one.report.num_steps for one in finished)
            tally.per_pass += [one.report.num_emitted / one.report.num_steps for one in finished]
    return tallies


def row_of(gamma: int, temperature: float, tallies: dict[str, Tally]) -> Row:
    """The figures of one gamma; the half width is that of a 95 % interval of the mean difference per request."""
    token_wise, block = (tallies[name] for name in WAYS)
    differences = [b - a for a, b in zip(token_wise.per_pass, block.per_pass, strict=True)]
    ratios = [b / a for a, b in zip(token_wise.speeds, block.speeds, strict=True)]
    return Row(
        case={"gamma": gamma, "temperature": temperature},
        figures={
            "token_wise_tokens_per_pass": token_wise.tokens_per_pass,
            "block_tokens_per_pass": block.tokens_per_pass,
            "mean_difference": statistics.fmean(differences),
            "half_width_95": 1.96 * statistics.stdev(differences) / math.sqrt(len(differences)),
            "token_wise_tokens_per_s": statistics.median(token_wise.speeds),
            "block_tokens_per_s": statistics.median(block.speeds),
            "median_ratio_of_speeds": statistics.median(ratios),
        },
    )


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a draft model.")],
    gammas: Annotated[str, typer.Option(help="Draft tokens per pass.")] = "2,4,8",
    temperature: Annotated[float, typer.Option(min=0.01, help="Above 0.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(min=2, help="In one batch.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Counted.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU backend.")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Print one line per gamma."""
    recorder = Recorder("block", "block verification against judging token by token", threads)
    rig = open_rig(bundle, max_batch=num_prompts, num_threads=threads)
    prompts = [tuple(rig.tokenizer.encode(text)) for text in code_prompts(num_prompts)]
    rows = []
    for gamma in (int(text) for text in gammas.split(",")):
        tallies = measure(rig, prompts, gamma, temperature, rounds, max_tokens)
        rows.append(row_of(gamma, temperature, tallies))
    rig.close()
    table = Table("gamma", "tokens/pass", "block", "difference", "tokens/s", "block", "ratio")
    for row in rows:
        one, two, mean, half, slow, fast, ratio = (float(v or 0.0) for v in row.figures.values())
        table.add_row(
            str(row.case["gamma"]), f"{one:.3f}", f"{two:.3f}", f"{mean:+.3f} ± {half:.3f}",
            f"{slow:.0f}", f"{fast:.0f}", f"{ratio:.2f}",
        )  # fmt: skip
    Console().print(table)
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
