"""Memory and processor time of opening a bundle, with the mapped weights taken into memory and left mapped, in turns.

``python -m scripts.bench.loading BUNDLE`` starts a process a run: peaks of memory are those of a process. Weights
that were taken lie in a file in memory, of which a process is charged for the pages that it has touched.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.bundle import bundle as bundles
from outrider.engines.opening import open_pair

_WAYS = ("mapped", "taken")


def status() -> dict[str, int]:
    """Return the process's memory and the machine's files in memory (``Shmem``), in MiB by Linux's names."""
    lines = [
        line
        for file in ("/proc/self/status", "/proc/meminfo")
        for line in Path(file).read_text().splitlines()
    ]
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) >> 10 for name in ("VmHWM", "RssAnon", "Shmem")}


def open_once(bundle: Path, way: str) -> dict[str, float]:
    """Open a bundle in this process; return MiB over what was there before, and processor seconds."""
    if way == "mapped":
        bundles.take_mapped = lambda paths: 0
    from outrider.engines.onnx import engine  # noqa: F401

    before, began = status(), time.process_time()
    loaded = bundles.load_bundle(bundle)
    pair = open_pair(loaded, with_trees=True, max_batch=1)
    seconds, after = time.process_time() - began, status()
    pair.close()
    return {"s": seconds, **{name: after[name] - before[name] for name in after}}


def main(
    bundle: Path,
    rounds: int = 5,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the medians of both ways."""
    if way:
        print(json.dumps(open_once(bundle, way)))
        return
    found: dict[str, list[dict[str, float]]] = {one: [] for one in _WAYS}
    for _ in range(rounds):
        for one in _WAYS:
            command = (sys.executable, "-m", "scripts.bench.loading", str(bundle), "--way", one)
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[one].append(json.loads(done.stdout.splitlines()[-1]))
    for one, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(one, {name: round(value, 2) for name, value in medians.items()})


if __name__ == "__main__":
    typer.run(main)
