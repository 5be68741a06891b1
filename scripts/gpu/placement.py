"""Where ONNX Runtime's CUDA provider puts the graphs of bundles, and what it launches: a table, without a GPU.

    python -m scripts.gpu.placement BUNDLE ...              # a table in Markdown
    python -m scripts.gpu.placement BUNDLE ... --json FILE  # and everything that was found
    python -m scripts.gpu.placement BUNDLE ... --code FILE  # and which of the provider's code was used

The provider is the real one, of the onnxruntime-gpu wheel; CUDA's libraries are stubs
(``scripts.gpu.stubs.environment``). Graphs are those that the engine opens on a CUDA device; each is opened as
the engine opens it, then run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.engines.base import BundleError, SpeculativeError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import DEVICE_FILE

from scripts.gpu.stubs.environment import NoEnvironmentError, make_environment, variables

if TYPE_CHECKING:
    from scripts.gpu.stubs.provider import Placement, Run, StubDevice

Sizes = Mapping[str, int]

# What graphs call their dimensions.
_SIZES = {
    "wanted": 1,
    "capacity": 256,
    "length": 64,
    "memory": 128,
    "kept": 2,
}
_GAMMA = 4
# Rows and tokens: a step, a verification, one of a batch, and a prefill.
_SHAPES = ((1, 1), (1, 5), (8, 5), (1, 128))
# Of a server: what decides which code of the provider is used.
SERVED_SHAPES = (
    *((rows, tokens) for rows in (1, 2, 3, 4, 6, 8, 12, 16) for tokens in range(1, 10)),
    *((1, tokens) for tokens in (16, 17, 32, 64, 128, 129, 200)),
)
_HEADS = (
    "graph",
    "nodes on device",
    "on the host",
    "Memcpy",
    "host inputs",
    "recorded",
    "copies in",
    "waits",
)


def place_bundle(
    bundle: Bundle, device: StubDevice, rows_and_tokens: Sequence[tuple[int, int]] = _SHAPES
) -> Iterator[Placement]:
    """Place every graph that CUDA would run of a bundle, and run it at some rows and tokens."""
    from scripts.gpu.stubs.provider import Placement, place

    name = bundle.root.name
    shapes = [_SIZES | {"batch": rows, "tokens": tokens} for rows, tokens in rows_and_tokens]
    for entry in (bundle.manifest.target, bundle.manifest.draft):
        paths, refused = _opened(bundle, entry, device) if entry is not None else ([], "")
        if refused and not paths and entry is not None:
            yield Placement(f"{name}/{entry.path}", refused=refused)
        for path in paths:
            yield place(path, f"{name}/{path.parent.name}/{path.name}", shapes, device)


def record_pair(bundle: Bundle, device: StubDevice) -> str:
    """Say what became of a round of a bundle's models that was recorded as one CUDA graph."""
    from scripts.gpu.stubs.provider import record_round

    manifest = bundle.manifest
    if manifest.draft is None or manifest.text2text is not None:
        return "no round of two decoders"
    draft, target = (
        bundle.model_path(model).with_name(DEVICE_FILE)
        for model in (manifest.draft, manifest.target)
    )
    try:
        events = record_round(draft, target, _SIZES | {"batch": 1}, _GAMMA, device)
    except SpeculativeError as error:
        return f"a round of gamma {_GAMMA} cannot be one CUDA graph: {error}"
    kinds = Counter(event.split()[0] for event in events)
    uploads = sum(event.startswith("copy host_to_device") for event in events)
    return (
        f"a round of gamma {_GAMMA} is one CUDA graph: {kinds['launch'] + kinds['product']} kernels and products, "
        f"{kinds['copy']} copies, {uploads} of them from the host, {kinds['allocate']} allocations, "
        f"{kinds['replay']} replay"
    )


def _opened(bundle: Bundle, entry: ModelEntry, device: StubDevice) -> tuple[list[Path], str]:
    """Return the graphs that the engine opens of a model, up to the first that it refuses, and why it does."""
    from outrider.engines.accelerators.onnx.device_plan import open_on_device

    from scripts.gpu.stubs.provider import watching

    with watching() as watched:
        try:
            open_on_device(bundle, entry, device, with_trees=True).close()
        except SpeculativeError as error:
            return watched.paths, str(error)
    return watched.paths, ""


def render(placements: Sequence[Placement]) -> str:
    """Return the table, one line per graph; under a shape, how much work a run gives to the device."""
    shapes = [f"{rows} x {tokens}" for rows, tokens in _SHAPES]
    lines = [[*_HEADS, *shapes], ["---"] * (len(_HEADS) + len(shapes))]
    for one in placements:
        operators = Counter(node.split()[0] for node in one.on_host)
        on_host = ", ".join(f"{count} {name}" for name, count in sorted(operators.items()))
        problem = one.refused or one.failure or one.why_not_recorded
        runs = {(run.sizes["batch"], run.sizes["tokens"]): run for run in one.runs}
        cells = [one.graph, str(one.on_device), on_host or "0", str(one.num_memcpys)]
        cells += [", ".join(one.host_inputs) or "0", problem or "yes"]
        for counts in ([run.num_uploads for run in one.runs], [run.num_waits for run in one.runs]):
            cells.append(str(max(counts)) if counts else "")
        lines.append([*cells, *(_cell(runs.get(shape)) for shape in _SHAPES)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(run: Run | None) -> str:
    if run is None:
        return ""
    return ", ".join(filter(None, (str(run.num_submissions), run.attention)))


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Exported directories.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write what was found.")
    ] = None,
    code: Annotated[
        Path | None, typer.Option(help="Run all shapes of a server, and write which code was used.")
    ] = None,
) -> None:
    """Place the graphs of bundles on the real CUDA provider over stub libraries."""
    if os.environ.get("LD_LIBRARY_PATH") != variables()["LD_LIBRARY_PATH"]:
        try:
            make_environment()
        except NoEnvironmentError as error:
            raise typer.BadParameter(str(error)) from error
        command = [sys.executable, "-m", "scripts.gpu.placement", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, env=variables()).returncode)
    from scripts.gpu.stubs.provider import StubDevice

    device, shapes = StubDevice(), _SHAPES if code is None else SERVED_SHAPES
    try:
        loaded = [load_bundle(path) for path in bundles]
        found = [one for bundle in loaded for one in place_bundle(bundle, device, shapes)]
        rounds = [(bundle, record_pair(bundle, device)) for bundle in loaded]
    except BundleError as error:
        raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    print(render(found))
    for bundle, events in rounds:
        print(f"{bundle.root.name}: {events}")
    if code is not None:
        code.write_text(json.dumps(device.used_code()), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
