"""The first half hour on a GPU: three commands of nine minutes, each of which is worth its time alone.

    python -m scripts.gpu.first.run 1 --out $OUT    # the sampler's kernels and PyTorch, without ONNX Runtime's provider
    python -m scripts.gpu.first.run 2 --out $OUT    # the provider: checks and times of the demo pair
    python -m scripts.gpu.first.run 3 --out $OUT    # a pair of 1B parameters, beside onnxruntime-genai

Each part runs in a process of its own with a limit. ``first-N.json`` is written again after each, with what failed and
what was not reached by name; ``first-N.toml`` has the defaults that follow (``scripts.gpu.first.decide``).
``scripts.gpu.first.carry`` packs what the machine lacks. With ``--device cpu`` all of it runs on the host, on shapes
for one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider.engines.devices import parse_device

from scripts.gpu.first.decide import as_toml, decide
from scripts.gpu.first.job import Job, Part, Parts
from scripts.gpu.machine import describe_machine
from scripts.gpu.processes import run_apart

NINE_MINUTES_S = 540.0
NUMBERS = (1, 2, 3)


def parts_of(number: int) -> Parts:
    """Return a command's parts; the first one's need the fewest packages."""
    if number == 1:
        from scripts.gpu.first.bare import PARTS

        return PARTS
    from scripts.gpu.first.provider import CHECKS, PAIRS

    return CHECKS if number == 2 else PAIRS


def run_command(number: int, job: Job, out: Path, limit_s: float) -> dict[str, Any]:
    """Run a command's parts, and write after each what was found.

    Args:
        number: of ``NUMBERS``.
        job: what is checked.
        out: folder for two files.
        limit_s: of all parts; one that would begin behind it is not reached.
    """
    began_s, parts = time.monotonic(), parts_of(number)
    machine = run_apart(partial(describe_machine, job.device), limit_s)
    found: dict[str, Any] = {"machine": machine.value or {"failure": machine.failure}}
    report: dict[str, Any] = {"command": number, "found": found, "failed": {}, "seconds": {}}
    for name, (most_s, part) in parts.items():
        left_s = limit_s - (time.monotonic() - began_s)
        waiting = [other for other in parts if other not in found and other not in report["failed"]]
        report["not_reached"] = waiting
        _write(report, out)
        if left_s <= 0:
            break
        typer.echo(f"{name} ...")
        part_began_s = time.monotonic()
        outcome = run_apart(partial(_find, part, job), min(most_s, left_s))
        report["seconds"][name] = round(time.monotonic() - part_began_s, 1)
        if outcome.value is None:
            report["failed"][name] = outcome.failure
        else:
            found[name] = outcome.value
        report["not_reached"] = [other for other in waiting if other != name]
        _write(report, out)
    return report


def _find(part: Part, job: Job) -> Any:
    return plain(part(job))


def plain(value: Any) -> Any:
    """Return a value as JSON has it; numbers that are none, and infinite ones, are None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write(report: Mapping[str, Any], out: Path) -> None:
    name = out / f"first-{report['command']}"
    text = json.dumps(plain(report), indent=1, allow_nan=False)
    name.with_suffix(".json").write_text(text, encoding="utf-8")
    name.with_suffix(".toml").write_text(as_toml(decide(report["found"])), encoding="utf-8")


def main(
    number: Annotated[int, typer.Argument(min=1, max=NUMBERS[-1], help="Of the command.")],
    out: Annotated[Path, typer.Option(help="Folder for what is found.")],
    carried: Annotated[Path, typer.Option(help="Folder of what was carried.")] = Path(".first"),
    work: Annotated[Path, typer.Option(help="Folder for what is made.")] = Path("build/first"),
    device: Annotated[str, typer.Option(help="As outrider serve takes it.")] = "cuda:0",
    limit_s: Annotated[float, typer.Option(min=1.0, help="Seconds of all parts.")] = NINE_MINUTES_S,
    small: Annotated[bool, typer.Option(help="Shapes for a machine without a GPU.")] = False,
) -> None:
    """Run a command; the exit code says whether a part failed or was not reached."""
    where = parse_device(device)
    if where is None:
        raise typer.BadParameter("--device auto: name the device that is checked")
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    job = Job(device=where, carried=carried.absolute(), work=work.absolute(), is_small=small)
    report = run_command(number, job, out, limit_s)
    typer.echo(json.dumps(plain(report["found"])))
    typer.echo((out / f"first-{number}.toml").read_text(encoding="utf-8"), nl=False)
    for name, reason in report["failed"].items():
        typer.echo(f"{name}: {reason}", err=True)
    if report["failed"] or report["not_reached"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
