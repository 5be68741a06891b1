"""Builds TensorRT-RTX plans of a bundle without a GPU, and reads in them what they will do.

    python -m scripts.gpu.first.plans BUNDLE --compute-capability 8.9

A plan names the kernels that it launches and their layers: whether one fused kernel attends can be read
there. That caches are updated in place is held by the build, which refuses other networks. The bundle stays as it is.
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
# A launch of a fused kernel of attention, and the layer that it computes.
_FUSED = re.compile(r'layers="\[ONNX Layer: (\w+)\]" fmha_batch=')


def texts_of(plan: bytes) -> set[str]:
    """Return the lines of text in a plan."""
    return {line.decode() for line in _TEXT.findall(plan)}


def fused_layers(plan: bytes) -> list[str]:
    """Return the names of the layers whose attention is one fused kernel."""
    return sorted({found[1] for line in texts_of(plan) if (found := _FUSED.search(line))})


def row_of(bundle: Bundle, plan: PlanEntry) -> Row:
    """Return a plan's line of the table."""
    data = (bundle.root / plan.path).read_bytes()
    shapes = "; ".join(
        f"{one.name} {'/'.join(map(str, one.batch))} x {'/'.join(map(str, one.tokens))}"
        for one in plan.profiles
    )
    figures = {
        "MB": len(data) // 10**6,
        "capacity": plan.capacity,
        "fused attention layers": len(fused_layers(data)),
    }
    return Row(case={"plan": plan.part, "profiles: rows x tokens": shapes}, figures=figures)


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
