"""A pair of real size for a device: the demo pair widened, exported and, for TensorRT, built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outrider.engines.devices import TENSORRT, Device

from scripts.tools.results import ROOT

# What is measured needs no more; caches of longer contexts would only take memory.
_LIMITS = ("--max-context", "1024", "--max-batch", "8")
_WEIGHTS = "float16"


def pair_commands(name: str, work: Path, device: Device) -> list[list[str]]:
    """Commands, in order, that leave a bundle of a widened pair at ``work``/name.bundle.

    Args:
        name: of ``scripts.lab.widen.widen.PAIRS``.
        work: folder for checkpoints and bundle.
        device: TensorRT's needs plans.
    """
    checkpoints, bundle = work / name, work / f"{name}.bundle"
    cli = [sys.executable, "-m", "outrider.runtime.cli"]
    models = ["--target", str(checkpoints / "target"), "--draft", str(checkpoints / "draft")]
    export = [*cli, "export", *models, "--out", str(bundle), "--weights", _WEIGHTS, *_LIMITS]
    commands = [[sys.executable, "-m", "scripts.lab.widen.widen", name, str(checkpoints)], export]
    if device.kind == TENSORRT:
        commands.append([*cli, "build", str(bundle)])
    return commands


def make_pair(name: str, work: Path, device: Device) -> Path:
    """The bundle of a widened pair, made unless it is there.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why.
    """
    bundle = work / f"{name}.bundle"
    if not bundle.is_dir():
        for command in pair_commands(name, work, device):
            subprocess.run(command, cwd=ROOT, check=True)
    return bundle
