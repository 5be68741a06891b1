"""What people see of the server beside answers: metrics, options, settings; and the mistakes that tests plant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from outrider.runtime.cli.main import app
from outrider.runtime.core.settings import named_of
from outrider.runtime.serving.settings import ServeOptions

from scripts.list_metrics import all_metrics, full_name, labels_by_name
from tests.export.certificate.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]


def metrics() -> dict[str, Any]:
    """Return types and labels of all metrics by name."""
    every = all_metrics()
    labels = labels_by_name(every)
    return {
        full_name(one): {"type": one.type, "labels": [*labels.get(one.name, ())]}
        for one in every.registry.collect()
    }


def options(command: Any, name: str = "outrider") -> Iterator[tuple[str, Any]]:
    """Yield options of a command and of those under it: their names, default and variable."""
    for one in command.params:
        spelled = " ".join((*one.opts, *one.secondary_opts))
        yield f"{name} {spelled}", [repr(one.default), one.required, one.envvar]
    for below, one in getattr(command, "commands", {}).items():
        yield from options(one, f"{name} {below}")


def settings() -> dict[str, str]:
    """Return the defaults of the settings that have no options of their own."""
    limits, drafting = (named_of(ServeOptions(), table) for table in ("limits", "drafting"))
    found = {one.name: one.value for one in limits}
    found |= {f"drafting.{one.name}": one.value for one in drafting}
    return {name: repr(value) for name, value in found.items()}


def mutants() -> list[str]:
    """Return the ids of all tests that plant a mistake."""
    files = sorted((ROOT / "tests").rglob("test_*mutations.py"))
    # Twice quiet, as by the project's own options, pytest tells counts alone.
    alone = ["-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", *alone]
    done = subprocess.run(
        [*asked, *map(str, files)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    return sorted([*found, *(f"certificate[{name}]" for name in MISTAKES)])


def surface() -> dict[str, Any]:
    """Return all of it."""
    return {
        "metrics": metrics(),
        "options": dict(options(typer.main.get_command(app))),
        "settings": settings(),
        "mutants": mutants(),
    }
