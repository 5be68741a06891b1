"""Speculation on equals speculation off, token for token, on a real bundle: the second promise, checked at length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engines.laws import ExactnessMode, SamplingLaw
from runtime.core.params import Event, Failed, Finished, Progressed, RequestSpec, SpeculationParams
from scripts.bench_common import Rig, code_prompts, open_rig


def completions(
    rig: Rig, prompts: Sequence[Sequence[int]], speculation: SpeculationParams, law: SamplingLaw, max_tokens: int,
    arrivals: random.Random,
) -> list[tuple[int, ...]]:  # fmt: skip
    """Output tokens of every prompt, submitted at random steps while others run."""
    outputs: list[list[int]] = [[] for _ in prompts]
    errors: list[str] = []
    open_requests = 0

    def deliver_to(number: int, event: Event) -> None:
        nonlocal open_requests
        if isinstance(event, Progressed):
            outputs[number] += [one.token for one in event.tokens]
        elif isinstance(event, Failed):
            errors.append(f"request {number} failed: {event.error}")
        elif isinstance(event, Finished):
            open_requests -= 1

    pending = list(range(len(prompts)))
    while pending or open_requests:
        while pending and (not open_requests or arrivals.random() < 0.3):
            number = pending.pop(0)
            rig.next_id += 1
            spec = RequestSpec(
                internal_id=f"equality-{rig.next_id}", request_id=f"equality-{rig.next_id}",
                prompt_tokens=tuple(prompts[number]), law=law, seed=number, max_tokens=max_tokens,
                speculation=speculation,
            )  # fmt: skip
            open_requests += 1
            rig.worker.submit(spec, lambda event, number=number: deliver_to(number, event))
        rig.worker.run_step()
        if errors:
            raise RuntimeError(errors[0])
    return [tuple(tokens) for tokens in outputs]


def main(
    bundle: Path,
    num_prompts: int = 50,
    max_tokens: int = 128,
    gammas: str = "1,2,3,4,5,6,7,8",
    batches: str = "1,3,8",
    drafters: str = "model,lookup",
    threads: int = 2,
) -> None:
    """Compare every drafter, gamma and batch size with plain decoding, greedy and seed_stable at temperature 1."""
    table = Table(
        title=f"{bundle.name}: prompts whose tokens differ from plain decoding, of {num_prompts}"
    )
    for head in ("law", "drafter", "batch", *(f"gamma {gamma}" for gamma in gammas.split(","))):
        table.add_column(head, justify="right")
    num_different = 0
    laws = {
        "greedy": (0.0, ExactnessMode.MAX_ACCEPT),
        "seed_stable": (1.0, ExactnessMode.SEED_STABLE),
    }
    plain: dict[str, list[tuple[int, ...]]] = {}
    jobs = list(
        itertools.product(laws, drafters.split(","), (int(batch) for batch in batches.split(",")))
    )
    for name, drafter, batch in track(jobs, description="comparing"):
        temperature, mode = laws[name]
        law = SamplingLaw(temperature=temperature)
        rig = open_rig(bundle, max_batch=batch, num_threads=threads)
        prompts = [rig.tokenizer.encode(text) for text in code_prompts(num_prompts)]
        if name not in plain:
            off = SpeculationParams(is_enabled=False, mode=mode)
            alone = open_rig(bundle, max_batch=1, num_threads=threads)
            plain[name] = completions(alone, prompts, off, law, max_tokens, random.Random(0))
        cells = []
        for gamma in (int(one) for one in gammas.split(",")):
            speculation = SpeculationParams(drafter=drafter, gamma=gamma, mode=mode)
            got = completions(rig, prompts, speculation, law, max_tokens, random.Random(gamma))
            cells.append(sum(one != other for one, other in zip(got, plain[name], strict=True)))
        num_different += sum(cells)
        table.add_row(name, drafter, str(batch), *(str(cell) for cell in cells))
    Console(width=150).print(table)
    raise SystemExit(num_different > 0)


if __name__ == "__main__":
    typer.run(main)
