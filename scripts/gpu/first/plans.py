"""Builds TensorRT-RTX plans of a bundle without a GPU, and reads in them what they will do.

    python -m scripts.gpu.first.plans BUNDLE --compute-capability 8.9

A plan keeps its optimised graph as text and its kernels as source: whether attention is fused, and that it walks a list
of the tiles that its mask leaves, can be read there. Caches in place are read from the parsed network as it is built.
The bundle stays as it is.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.accelerators.tensorrt.api import RTX
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.plans import PlanEntry
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans

from scripts.tools.results import Row
from scripts.tools.tables import markdown

_TEXT = re.compile(rb"[\x20-\x7e]{12,}")
# A layer's attention as it was given, and as the optimiser left it: a kernel's name, or parts of one.
_GIVEN = re.compile(r"= attention\(.*name=node_\w+")
_FUSED = re.compile(r"= attention\(.*name=attention_op__(\w+)")
_UPDATE = re.compile(r"= kvcache_update\(")
# Counts what a tile of 64 x 64 of the mask lets be seen, lists the tiles of which that is not nothing.
_TILES = re.compile(r"__global__ void __myl_\w*(CastSum|NeqCastIotaEqlSeleOr)\w*\(")


def texts_of(plan: bytes) -> set[str]:
    """Return the lines of text in a plan."""
    return {line.decode() for line in _TEXT.findall(plan)}


def facts_of(plan: bytes) -> dict[str, int | str]:
    """Return what a plan's own text says of its attention and caches.

    Returns:
        Attention layers given and fused, names of the kernels, updates of caches in place, and how many of the two
        kinds of kernels there are that list the tiles which masks leave.
    """
    lines = texts_of(plan)
    fused = [found for line in lines if (found := _FUSED.search(line))]
    tiles = {found[1] for line in lines if (found := _TILES.search(line))}
    return {
        "attention given": sum(bool(_GIVEN.search(line)) for line in lines),
        "attention fused": len(fused),
        "kernel": ", ".join(sorted({found[1] for found in fused})),
        "caches in place": sum(bool(_UPDATE.search(line)) for line in lines),
        "tiles listed": len(tiles),
    }


def row_of(bundle: Bundle, plan: PlanEntry) -> Row:
    """Return a plan's line of the table."""
    data = (bundle.root / plan.path).read_bytes()
    shapes = "; ".join(
        f"{one.name} {'/'.join(map(str, one.batch))} x {'/'.join(map(str, one.tokens))}"
        for one in plan.profiles
    )
    sizes: dict[str, int | str] = {"MB": len(data) // 10**6, "capacity": plan.capacity}
    return Row(
        case={"plan": plan.part, "profiles: rows x tokens": shapes}, figures=sizes | facts_of(data)
    )


def main(
    bundle: Annotated[Path, typer.Argument(help="Exported directory.")],
    compute_capability: Annotated[str, typer.Option(help="Of the GPU to build for.")] = "8.9",
    precision: Annotated[str, typer.Option(help="As outrider build takes it.")] = "float16",
) -> None:
    """Print a table of the plans."""
    with tempfile.TemporaryDirectory(dir=bundle.absolute().parent) as folder:
        copy = Path(shutil.copytree(bundle, Path(folder) / bundle.name))
        options = BuildOptions(
            flavour=RTX, compute_capabilities=(compute_capability,), precision=precision
        )
        built = build_plans(copy, options, report=lambda *step: None)
        typer.echo(markdown([row_of(built, plan) for plan in built.manifest.plans]))


if __name__ == "__main__":
    typer.run(main)
