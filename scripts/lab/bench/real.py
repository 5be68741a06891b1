"""Drafts on and off over prompts of a file, gamma chosen step by step: the figures of README.

Per batch, plain decoding and each drafter run the same prompts in turns, once per round; requests share no history.
Ratios are of one round; the table has their median and its 95 % interval.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.options import MeasureOptions
from outrider.runtime.offline.prompts import encode_prompts, read_prompts
from outrider.runtime.offline.rig import RigOptions
from outrider.runtime.offline.speed import measure_settings
from rich.console import Console

COLUMNS = "| batch | drafter | off, tokens/s | auto, tokens/s | auto / off | tokens per pass |"


def main(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    prompts: Annotated[Path, typer.Option(help="As of outrider analyze.")],
    drafters: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "model,suffix,suffix+model,auto",
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    num_prompts: Annotated[int, typer.Option(help="The first of the file.")] = 8,
    max_tokens: int = 64,
    temperature: float = 0.0,
    rounds: Annotated[int, typer.Option(help="Six are the fewest that have an interval.")] = 6,
    device: Annotated[str, typer.Option(help="As of outrider serve.")] = "cpu",
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="Processor seconds.")] = False,
) -> None:
    """Print a table in Markdown."""
    console = Console(stderr=True)
    names, texts = drafters.split(","), read_prompts(prompts)[:num_prompts]
    typer.echo(f"{COLUMNS}\n{'|---' * 6}|")
    for batch in map(int, batches.split(",")):
        options = MeasureOptions(
            batch=batch,
            rounds=rounds,
            max_tokens=max_tokens,
            rig=RigOptions(counts_processor=cpu_time, device=device),
        )
        with closing(options.open_rig(bundle)) as rig:
            plain, measured = measure_settings(
                rig,
                encode_prompts(
                    texts, rig.tokenizer, max_tokens=max_tokens, manifest=rig.bundle.manifest
                ),
                [SpeculationParams(drafter=name) for name in names],
                options,
                temperature=temperature,
                phase=f"batch {batch}",
                report=lambda phase, step, of: console.print(f"{phase}: {step} of {of}"),
            )
        for name, found in zip(names, measured, strict=True):
            low, high = found.interval_over(plain) or (float("nan"), float("nan"))
            ratio = f"{found.over(plain):.2f} [{low:.2f}, {high:.2f}]"
            cells = (
                batch, f"`{name}`", f"{plain.tokens_per_s:.1f}", f"{found.tokens_per_s:.1f}", ratio,
                f"{found.tokens_per_step:.2f}",
            )  # fmt: skip
            typer.echo(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    typer.run(main)
