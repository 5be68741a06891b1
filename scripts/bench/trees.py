"""Trees of sampled candidates against chains, and the same trees judged as point masses: tokens per target pass.

All ways run the same prompts in one batch of arrivals with the same seeds, which are a prompt's place and the round's.
Counts do not depend on the machine; speeds are medians over rounds in which the ways take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Self

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import Draft, DrafterParts, DraftRow
from outrider.runtime.drafters.model.tree import TreeDrafter
from outrider.runtime.drafters.registry import REGISTRY

from scripts.bench.tools.common import Rig, code_prompts, open_rig
from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.tables import show

SHAPES = "2;3,2;4,2,2"
REPEATED, MATCHED = "tree-repeated", "tree-matched"


class RepeatedTree(TreeDrafter):
    """Siblings drawn with replacement."""

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """As the server's, but for that."""
        config = replace(parts.config, draws_with_replacement=True)
        return super().from_parts(replace(parts, config=config))


class MatchedTree(TreeDrafter):
    """The same candidates as ``tree``, judged as point masses."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Return trees without their candidates' probabilities."""
        return [
            draft if draft.candidates is None else replace(draft, is_sampled=False, candidates=None)
            for draft in super().propose(live, chosen)
        ]


@dataclass(frozen=True, slots=True)
class Way:
    """A drafter, its gamma, and candidates per level."""

    drafter: str
    gamma: int
    branching: tuple[int, ...] = ()


@dataclass(slots=True)
class Tally:
    """Counts and speeds of one way over all rounds."""

    speeds: list[float] = field(default_factory=list)
    num_emitted: int = 0
    num_passes: int = 0
    num_drafted: int = 0

    def figures(self) -> dict[str, float | None]:
        """Return its figures by name."""
        return {
            "tokens_per_pass": self.num_emitted / self.num_passes,
            "nodes_per_pass": self.num_drafted / self.num_passes,
            "tokens_per_s": statistics.median(self.speeds),
        }


def ways_of(gammas: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[Way]:
    """Chains of each gamma, and trees of each shape and gamma under each rule."""
    return [
        way
        for gamma in gammas
        for way in (
            Way("model", gamma),
            *(Way(name, gamma, s) for s in shapes for name in ("tree", REPEATED, MATCHED)),
        )
    ]


def measure(
    rig: Rig, ways: Sequence[Way], prompts: Sequence[tuple[int, ...]], params: SamplingParams, rounds: int,
    num_tokens: int
) -> dict[Way, Tally]:  # fmt: skip
    """All ways in turns."""
    tallies = {way: Tally() for way in ways}
    for number in range(rounds):
        for way, tally in tallies.items():
            speculation = SpeculationParams(
                drafter=way.drafter, gamma=way.gamma, is_adaptive=False, branching=way.branching
            )
            finished, took_s = rig.run(
                prompts, params, speculation, num_tokens, first_seed=number * len(prompts)
            )
            tally.speeds.append(sum(one.num_output for one in finished) / took_s)
            tally.num_emitted += sum(one.report.num_emitted for one in finished)
            tally.num_passes += sum(one.report.num_steps for one in finished)
            tally.num_drafted += sum(one.report.num_drafted for one in finished)
    return tallies


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a draft model that takes trees.")],
    gammas: Annotated[str, typer.Option(help="Draft tokens of a path.")] = "2,4",
    shapes: Annotated[str, typer.Option(help="Candidates per level.")] = SHAPES,
    temperature: Annotated[float, typer.Option(min=0.01, help="Above 0.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="In one batch.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Counted.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU backend.")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Print one line per way."""
    REGISTRY.update({REPEATED: RepeatedTree, MATCHED: MatchedTree})
    recorder = Recorder("trees", "trees of sampled candidates against chains", threads)
    rig = open_rig(bundle, max_batch=num_prompts, num_threads=threads)
    prompts = [tuple(rig.tokenizer.encode(text)) for text in code_prompts(num_prompts)]
    counts = [tuple(int(n) for n in shape.split(",")) for shape in shapes.split(";")]
    ways = ways_of([int(gamma) for gamma in gammas.split(",")], counts)
    tallies = measure(
        rig, ways, prompts, SamplingParams(temperature=temperature), rounds, max_tokens
    )
    rig.close()
    rows = [
        Row(
            case={"drafter": way.drafter, "gamma": way.gamma, "branching": ",".join(map(str, way.branching))},
            figures=tally.figures(),
        )
        for way, tally in tallies.items()
    ]  # fmt: skip
    show(rows)
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(out, rows, {**settings, "temperature": temperature})


if __name__ == "__main__":
    typer.run(main)
