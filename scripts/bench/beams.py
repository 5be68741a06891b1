"""Beam search with speculation against plain beam search: steps per pass of the target, and steps per second.

All ways run the same prompts in every round, in an order that turns by one from round to round; a first round warms up.
Steps per pass are of all rounds together, seconds and ratios medians of rounds. Every answer is held against plain
search's, bit for bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import BeamAnswer, Failed
from outrider.runtime.core.params import BeamParams, Prompt, SpeculationParams
from outrider.runtime.offline.rig import Answer

from scripts.bench.tools.common import Rig, code_prompts, open_rig
from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.tables import show

Prompts = Sequence[Prompt | tuple[int, ...]]


@dataclass(slots=True)
class Tally:
    """One gamma's seconds per round, and its steps and passes over all rounds."""

    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_passes: int = 0
    answers: list[tuple[BeamAnswer, ...]] = field(default_factory=list)


def run_searches(
    rig: Rig, prompts: Prompts, beams: BeamParams, gamma: int, max_tokens: int
) -> tuple[list[Answer], float]:
    """Searches one after another, and the seconds they took."""
    answers = []
    began = rig.clock()
    for prompt in prompts:
        answer = Answer()
        # Where answers have ends, none comes before the last step.
        params = SamplingParams(temperature=0.0, min_tokens=max_tokens)
        speculation = SpeculationParams(drafter="model", gamma=gamma)
        spec = rig.spec(prompt, params, speculation, max_tokens, beams=beams)
        rig.worker.submit(spec, answer)
        while answer.end is None:
            rig.worker.run_step()
        answers.append(answer)
    return answers, rig.clock() - began


def measure(
    rig: Rig, prompts: Prompts, beams: BeamParams, gammas: list[int], *, rounds: int, max_tokens: int
) -> dict[int, Tally]:  # fmt: skip
    """All gammas, 0 among them; no end token, so that every search takes ``max_tokens`` steps."""
    tallies = {gamma: Tally() for gamma in gammas}
    for number in range(rounds + 1):
        turn = number % len(gammas)
        for gamma in gammas[turn:] + gammas[:turn]:
            answers, took_s = run_searches(rig, prompts, beams, gamma, max_tokens)
            tally = tallies[gamma]
            tally.answers = []
            for answer in answers:
                if answer.end is None or isinstance(answer.end, Failed):
                    raise RuntimeError("a measured search failed")
                tally.answers.append(answer.end.beams)
                if number:
                    tally.num_steps += max_tokens
                    tally.num_passes += answer.end.report.num_steps
            if number:
                tally.seconds.append(took_s)
    if any(tally.answers != tallies[0].answers for tally in tallies.values()):
        raise RuntimeError("a draft changed an answer")
    return tallies


def row_of(beams: BeamParams, gamma: int, tally: Tally, plain: Tally) -> Row:
    """The figures of one gamma beside those of plain search in the same rounds."""
    ratios = [slow / fast for slow, fast in zip(plain.seconds, tally.seconds, strict=True)]
    return Row(
        case={"num_beams": beams.num_beams, "beam_width": beams.num_slots, "gamma": gamma},
        figures={
            "steps_per_pass": tally.num_steps / tally.num_passes,
            "steps_per_s": tally.num_steps / len(tally.seconds) / statistics.median(tally.seconds),
            "median_ratio_of_speeds": statistics.median(ratios),
        },
    )


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a draft model.")],
    num_beams: Annotated[str, typer.Option(help="Widths of the search.")] = "1,2,4",
    widths: Annotated[str, typer.Option(help="Of the draft, in multiples of it.")] = "1,2",
    gammas: Annotated[str, typer.Option(help="Steps drafted per pass.")] = "1,2,4",
    num_prompts: Annotated[int, typer.Option(min=1, help="One after another.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Steps per search.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Counted.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU backend.")] = 2,
    json_out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Print one line per width and gamma."""
    recorder = Recorder("beams", "beam search with speculation against plain beam search", threads)
    searches = [
        BeamParams(num_beams=beams, num_results=beams, width=beams * times)
        for beams in (int(text) for text in num_beams.split(","))
        for times in (int(text) for text in widths.split(","))
    ]
    most = max(search.num_slots for search in searches)
    rig = open_rig(bundle, max_batch=most, num_threads=threads)
    room = rig.bundle.manifest.max_context - max_tokens
    prompts = [tuple(rig.tokenizer.encode(text))[:room] for text in code_prompts(num_prompts)]
    rows = []
    for search in searches:
        drafted = [int(text) for text in gammas.split(",")]
        tallies = measure(rig, prompts, search, [0, *drafted], rounds=rounds, max_tokens=max_tokens)
        rows += [row_of(search, gamma, tally, tallies[0]) for gamma, tally in tallies.items()]
    rig.close()
    show(rows)
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
