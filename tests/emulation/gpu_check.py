"""``scripts.gpu.check`` with emulated parts, in a process of its own: python -m tests.emulation.gpu_check.

The GPU is emulated. On the CPU the sampler's kernels are, and nothing else.

... BUNDLE --device tensorrt:0 OPTIONS -- BUNDLE --device cuda:0 OPTIONS
"""

from __future__ import annotations

import sys
from itertools import groupby

import pytest
import typer
from outrider.engines.devices import CPU, CUDA
from typer.testing import CliRunner

from tests.emulation.install import emulate
from tests.emulation.kernels.host import sample_on_host


def use_small_sizes(patch: pytest.MonkeyPatch) -> None:
    """Measure rates by sizes for a host: a GPU's copies and products are too large for the one that plays it."""
    from scripts.gpu import machine

    for sizes in (machine._COPY_BYTES, machine._SIZES):
        patch.setitem(sizes, CUDA, min(sizes[CPU], 1 << 20))


def play_device(arguments: list[str]) -> None:
    """Play the GPU that a command checks, or the kernels of one that checks the host, until the process ends."""
    patch = pytest.MonkeyPatch()
    if CPU in arguments:
        sample_on_host(patch)
    else:
        emulate(patch)
        use_small_sizes(patch)


def main(arguments: list[str]) -> int:
    """Check after check; the exit code is that of the first that fails."""
    play_device(arguments)
    from scripts.gpu.check import main as check

    app = typer.Typer()
    app.command()(check)
    for is_end, part in groupby(arguments, lambda word: word == "--"):
        if is_end:
            continue
        result = CliRunner().invoke(app, list(part), catch_exceptions=False)
        print(result.output)
        if result.exit_code:
            return result.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
