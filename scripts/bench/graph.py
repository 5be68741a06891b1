"""Time one step of two canonical graphs against each other, in turn.

Both graphs run within one process, so that a load beside the measurement meets both, and on huge pages where the system
has them: without, a graph is up to a fifth slower or quicker by where its weights happen to lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from outrider.engines.huge_pages import use_everywhere
from rich.console import Console
from rich.table import Table

from scripts.bench.tools.graph_steps import GraphRun, Shape, interleaved_times, medians, timed_step
from scripts.bench.tools.results import Recorder, Row

_NUM_IDS = 100  # any vocabulary has as many


def main(
    before: Annotated[Path, typer.Argument(help="model.onnx or grouped.onnx")],
    after: Annotated[Path, typer.Argument(help="model.onnx or grouped.onnx")],
    repeats: int = 200,
    length: int = 200,
    capacity: int = 256,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Print the median step of both graphs at 1, 2 and 5 tokens."""
    recorder = Recorder("graph", "one step of two graphs, in turn", threads)
    runs = [GraphRun(path, capacity=capacity, threads=threads) for path in (before, after)]
    use_everywhere()
    tokens = np.random.default_rng(0).integers(0, _NUM_IDS, capacity)
    rows = []
    table = Table("tokens", "before ms", "after ms", "before / after")
    for num_tokens in (1, 2, 5):
        shape = Shape(num_tokens, length, capacity)
        steps = [timed_step(run, tokens, shape) for run in runs]
        first, second = medians(interleaved_times(steps, repeats))
        table.add_row(str(num_tokens), f"{first:.3f}", f"{second:.3f}", f"{first / second:.2f}")
        figures = {"before_ms": first, "after_ms": second, "ratio": first / second}
        rows.append(Row(case={"num_tokens": num_tokens}, figures=figures))
    Console().print(table)
    settings = {
        "before": str(before), "after": str(after), "repeats": repeats, "length": length, "capacity": capacity,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
