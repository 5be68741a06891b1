"""Sampling as a share of the whole step: adjust, propose and judge beside drafting and verification.

Real steps of the runtime in process: rows are prefilled first, then every step in which all of them decode is one
sample of (engine seconds, sampling seconds). Modes take turns, so that a load beside the measurement meets all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.params import (
    Event,
    Failed,
    Finished,
    Progressed,
    RequestSpec,
    SpeculationParams,
)
from rich.console import Console
from rich.table import Table

from scripts.bench.tools.common import Rig, code_prompts, open_rig
from scripts.bench.tools.results import Recorder, row_of
from scripts.demo_pair.random import build_bundle

MAX_ACCEPT, SEED_STABLE, _ = ExactnessMode
MODES: dict[str, tuple[SamplingParams, ExactnessMode]] = {
    "greedy": (SamplingParams(temperature=0.0), MAX_ACCEPT),
    "temperature 1": (SamplingParams(), MAX_ACCEPT),
    "temperature .8": (SamplingParams(temperature=0.8), MAX_ACCEPT),
    "top-k 50, top-p .95": (SamplingParams(top_k=50, top_p=0.95), MAX_ACCEPT),
    "top-p .95": (SamplingParams(top_p=0.95), MAX_ACCEPT),
    "flat, top-p .9": (SamplingParams(temperature=6.0, top_p=0.9), MAX_ACCEPT),
    "min-p .05": (SamplingParams(min_p=0.05), MAX_ACCEPT),
    "penalties": (
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
        MAX_ACCEPT,
    ),
    "seed_stable": (SamplingParams(), SEED_STABLE),
}
SEEDS_APART = 1000


@dataclass(slots=True)
class Samples:
    """Per decoding step of one cell, seconds."""

    engine_s: list[float] = field(default_factory=list)
    sampling_s: list[float] = field(default_factory=list)
    num_emitted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Medians of one mode at one batch size; times of one step in milliseconds.

    ``share_of_fastest`` relates the fastest tenth of both times: what an unloaded machine shows, where the median of a
    loaded one mostly says how long two engine threads wait for each other.
    """

    mode: str
    batch: int
    engine_ms: float
    sampling_ms: float
    share: float
    share_of_fastest: float
    tokens_per_step: float


def run_batch(rig: Rig, prompts: Sequence[Sequence[int]], spec: RequestSpec, into: Samples) -> None:
    """Run one batch to its end, and note each step in which all rows decode.

    Raises:
        RuntimeError: a request failed.
    """
    counts: dict[int, int] = {}
    is_done: set[int] = set()

    def receiver(row: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            if isinstance(event, Failed):
                raise RuntimeError(f"a benchmark request failed: {event.error}")
            if isinstance(event, Progressed):
                counts[row] = counts.get(row, 0) + len(event.tokens)
            if isinstance(event, Finished):
                is_done.add(row)

        return deliver

    for row, prompt in enumerate(prompts):
        rig.next_id += 1
        name = f"bench-{rig.next_id}"
        rig.worker.submit(
            RequestSpec(
                internal_id=name, request_id=name, prompt_tokens=tuple(prompt), params=spec.params,
                seed=spec.seed + row, max_tokens=spec.max_tokens, speculation=spec.speculation,
            ),
            receiver(row),
        )  # fmt: skip
    while len(is_done) < len(prompts):
        all_decode = len(counts) == len(prompts) and not is_done
        before = (rig.engine_s(), rig.sampler.total_s, sum(counts.values()))
        rig.worker.run_step()
        if all_decode:
            into.engine_s.append(rig.engine_s() - before[0])
            into.sampling_s.append(rig.sampler.total_s - before[1])
            into.num_emitted.append(sum(counts.values()) - before[2])


def cell_of(mode: str, batch: int, samples: Samples) -> Cell:
    """Medians over steps; the share is the median of each step's own share.

    Raises:
        ValueError: in no step did all rows decode.
    """
    if not samples.engine_s:
        raise ValueError(
            f"{mode}, batch {batch}: rows ended before all decoded; max_tokens is too small"
        )
    shares = [
        sampling / (sampling + engine)
        for sampling, engine in zip(samples.sampling_s, samples.engine_s, strict=True)
    ]
    fastest = [np.quantile(times, 0.1) for times in (samples.engine_s, samples.sampling_s)]
    return Cell(
        mode=mode,
        batch=batch,
        engine_ms=1e3 * statistics.median(samples.engine_s),
        sampling_ms=1e3 * statistics.median(samples.sampling_s),
        share=statistics.median(shares),
        share_of_fastest=float(fastest[1] / sum(fastest)),
        tokens_per_step=statistics.mean(samples.num_emitted) / batch,
    )


def measure(
    rig: Rig, modes: Sequence[str], batch: int, gamma: int, max_tokens: int, rounds: int
) -> list[Cell]:
    """Every mode ``rounds`` times in turn, with other prompts and seeds each time."""
    prompts = [rig.tokenizer.encode(text) for text in code_prompts(batch * rounds)]
    samples = {mode: Samples() for mode in modes}
    for number in range(rounds):
        for mode in modes:
            probs, exactness = MODES[mode]
            spec = RequestSpec(
                internal_id="", request_id="", prompt_tokens=(), params=probs,
                seed=SEEDS_APART * number, max_tokens=max_tokens,
                speculation=SpeculationParams(
                    is_enabled=gamma > 0, drafter="model" if gamma else None, gamma=gamma,
                    mode=exactness,
                ),
            )  # fmt: skip
            run_batch(rig, prompts[batch * number : batch * (number + 1)], spec, samples[mode])
    return [cell_of(mode, batch, samples[mode]) for mode in modes]


def main(
    bundles: list[Path],
    large: Annotated[
        Path | None,
        typer.Option(
            help="bundle of the random 125M pair at vocabulary 151,936; built if it is absent"
        ),
    ] = None,
    modes: Annotated[str, typer.Option(help="comma-separated numbers of modes; all if empty")] = "",
    batches: str = "1,8",
    gamma: int = 4,
    max_tokens: int = 80,
    rounds: int = 3,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Print the share of sampling in a step for every bundle, batch size and mode."""
    recorder = Recorder("sampling", "sampling as a share of a decoding step", threads)
    names = list(MODES)
    chosen = [names[int(one)] for one in modes.split(",")] if modes else names
    roots = list(bundles)
    if large is not None:
        if not large.exists():
            build_bundle(large, bundles[0] / "tokenizer.json")
        roots.append(large)
    table = Table(title=f"gamma {gamma}, {rounds} interleaved rounds, medians over steps")
    for head in (
        "bundle",
        "batch",
        "mode",
        "engines ms",
        "sampling ms",
        "share",
        "share of fastest",
        "tokens/step",
    ):
        table.add_column(head, justify="right")
    rows = []
    for root in roots:
        rig = open_rig(root, num_threads=threads)
        for batch in (int(one) for one in batches.split(",")):
            for cell in measure(rig, chosen, batch, gamma, max_tokens, rounds):
                table.add_row(
                    root.name, str(batch), cell.mode, f"{cell.engine_ms:.2f}",
                    f"{cell.sampling_ms:.3f}", f"{cell.share:.3f}", f"{cell.share_of_fastest:.3f}",
                    f"{cell.tokens_per_step:.2f}",
                )  # fmt: skip
                rows.append(row_of(cell, ("mode", "batch"), bundle=root.name, gamma=gamma))
    Console(width=120).print(table)
    recorder.write(json_out, rows, {"max_tokens": max_tokens, "rounds": rounds})


if __name__ == "__main__":
    typer.run(main)
