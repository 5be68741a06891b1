"""Where ONNX Runtime's CUDA provider puts the graphs of bundles, and what it launches: a table, without a GPU.

    python -m scripts.gpu.placement BUNDLE ...              # a table in Markdown
    python -m scripts.gpu.placement BUNDLE ... --json FILE  # and everything that was found

The provider is the real one, of the onnxruntime-gpu wheel; CUDA's libraries are stubs
(``scripts.gpu.stubs.environment``). Graphs are those that the engine opens on a CUDA device, and the sampler's; each
is opened as the engine opens it, then run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.manifest import Bundle, ModelEntry, load_bundle
from outrider.engines.device.sampling.tensors import NUM_ANSWERS, SAMPLER_FOLDER

from scripts.gpu.stubs.environment import NoEnvironmentError, make_environment, variables

if TYPE_CHECKING:
    from scripts.gpu.stubs.provider import Placement, Run, StubDevice

Sizes = Mapping[str, int]

_INSIDE = "OUTRIDER_CUDA_STUBS"
_POSITIONS = 5
# What graphs call their dimensions.
_SIZES = {
    "wanted": 1,
    "capacity": 256,
    "positions": _POSITIONS,
    "answers": NUM_ANSWERS + _POSITIONS,
    "kept": 2,
    "num_seen": 64,
    "num_biases": 8,
    "num_allowed": 8,
    "num_ends": 2,
    "num_bad": 2,
    "prefix": 2,
}
# Rows and tokens: a step, a verification, one of a batch, and a prefill.
_SHAPES = ((1, 1), (1, 5), (8, 5), (1, 128))
# Parts of kernels' names, in the order in which they are looked for.
_ATTENTION = {
    "cudnn plan": "cuDNN",
    "flash": "Flash",
    "attention_kernel_batched_impl": "memory-efficient",
    "oftmax": "unfused",
}


def place_bundle(bundle: Bundle, device: StubDevice, seen: set[bytes]) -> Iterator[Placement]:
    """Place every graph that CUDA would run of a bundle, but for sampler graphs that were seen before."""
    from scripts.gpu.stubs.provider import place

    name = bundle.root.name
    shapes = [_SIZES | {"batch": rows, "tokens": tokens} for rows, tokens in _SHAPES]
    for entry in (bundle.manifest.target, bundle.manifest.draft):
        for path in _opened(bundle, entry, device) if entry is not None else ():
            yield place(path, f"{name}/{path.parent.name}/{path.name}", shapes, device)
    for path in sorted((bundle.root / SAMPLER_FOLDER).glob("*.onnx")):
        content = path.read_bytes()
        if content not in seen:
            seen.add(content)
            yield place(path, f"{name}/{SAMPLER_FOLDER}/{path.name}", shapes[2:3], device)


def _opened(bundle: Bundle, entry: ModelEntry, device: StubDevice) -> list[Path]:
    """Return the graphs that the engine opens of a model, up to the first that is refused."""
    from outrider.engines.onnx.device_plan import open_on_device

    from scripts.gpu.stubs.provider import watching

    with watching() as watched:
        try:
            open_on_device(bundle, entry, device, with_trees=True).close()
        except EngineError as error:
            print(f"{bundle.root.name}/{entry.path}: {error}", file=sys.stderr)
    return watched.paths


def attention_of(run: Run) -> str:
    """Name the kind of attention that a run launched; "-" if none."""
    for part, kind in _ATTENTION.items():
        if any(part in kernel for kernel in run.kernels):
            return kind
    return "-"


def render(placements: Sequence[Placement]) -> str:
    """Return the table, one line per graph."""
    heads = ["graph", "nodes on device", "on the host", "Memcpy", "host inputs", "recorded"]
    shapes = [f"{rows} x {tokens}" for rows, tokens in _SHAPES]
    lines = [" | ".join([*heads, *shapes]), "|".join(["---"] * (len(heads) + len(shapes)))]
    for one in placements:
        operators = sorted(node.split()[0] for node in one.on_host)
        cells = [
            one.graph,
            str(one.on_device),
            f"{len(operators)}: {', '.join(operators)}" if operators else "0",
            str(one.num_memcpys),
            ", ".join(one.host_inputs) or "0",
            "yes" if one.records else one.refused or one.why_not_recorded or one.failure,
        ]
        runs = {(run.sizes["batch"], run.sizes["tokens"]): run for run in one.runs}
        for shape in _SHAPES:
            run = runs.get(shape)
            cells.append(f"{run.num_submissions}, {attention_of(run)}" if run is not None else "")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Exported directories.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write what was found.")
    ] = None,
) -> None:
    """Place the graphs of bundles on the real CUDA provider over stub libraries."""
    if _INSIDE not in os.environ:
        try:
            make_environment()
        except NoEnvironmentError as error:
            raise typer.BadParameter(str(error)) from error
        command = [sys.executable, "-m", "scripts.gpu.placement", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, env=variables() | {_INSIDE: "1"}).returncode)
    from scripts.gpu.stubs.provider import StubDevice

    device, seen = StubDevice(), set[bytes]()
    try:
        found = [one for path in bundles for one in place_bundle(load_bundle(path), device, seen)]
    except BundleError as error:
        raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    typer.run(main)
