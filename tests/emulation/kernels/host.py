"""The sampler's kernels on the host, from the source that a GPU runs: blocks of threads as fibers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError

from scripts.tools.results import ROOT

_HERE = Path(__file__).parent
_SOURCE = ROOT / "engines" / "accelerators" / "device" / "sampling" / "kernels" / "sampler.cu"
_PARTS = (_SOURCE, _HERE / "cuda_on_cpu.h", _HERE / "on_cpu.cpp")
# As NVIDIA's compiler is told: no contraction of floating point.
_OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE")


@cache
def library(threads: int = 64, *, source: Path = _SOURCE, options: tuple[str, ...] = ()) -> Path:
    """Shared library of the kernels with so many threads a block, made once per state of its sources.

    A test that asks for it where there is no C++ compiler is skipped.

    Raises:
        CalledProcessError: the C++ compiler refuses the source, whose ``stderr`` has its words.
    """
    texts = [path.read_bytes() for path in (source, *_PARTS[1:])]
    asked = f"{threads} {_OPTIONS} {options}".encode()
    name = hashlib.sha256(b"".join((*texts, asked))).hexdigest()[:16]
    path = ROOT / "build" / "kernels" / f"{name}.so"
    if not path.exists():
        if shutil.which("g++") is None:
            pytest.skip("no C++ compiler, so the sampler's kernels do not run here")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            includes = [f"-I{_HERE}", f"-I{source.parent}"]
            command = ["g++", *_OPTIONS, *options, f"-DTHREADS={threads}", *includes]
            command += ["-o", str(made), str(_PARTS[2])]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(made, path)
    return path


class HostKernels:
    """Implements ``engines.accelerators.device.sampling.kernels.launches.Kernels`` over the host's memory.

    ``order`` chooses the order in which threads go on: 0 as numbered, 1 backwards, any other at random.
    """

    def __init__(self, path: Path | None = None, *, order: int = 0) -> None:
        self._library = ctypes.CDLL(str(library() if path is None else path))
        self.order = order

    def launch(self, name: str, width: int, height: int, arguments: Sequence[int]) -> None:
        """Run a kernel."""
        slots = np.array(arguments, dtype=np.uint64)
        order = ctypes.c_ulonglong(self.order)
        address = ctypes.c_void_p(slots.ctypes.data)
        if not self._library.launch(name.encode(), width, height, address, order):
            raise EngineError(f"{name}: no such kernel")

    def close(self) -> None:
        """Nothing is held."""


def sample_on_host(patch: pytest.MonkeyPatch) -> None:
    """Let pairs on the CPU sample by these kernels where the device is asked for."""
    library()
    backend = "outrider.engines.accelerators.backends.HostBackend"
    patch.setattr(f"{backend}.why_no_sampler", lambda self, bundle, index: "")
    patch.setattr(f"{backend}._open_kernels", lambda self, memory: HostKernels())
