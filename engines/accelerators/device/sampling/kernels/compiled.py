"""The sampler's kernels on a CUDA device, compiled for it by NVIDIA's compiler when a server starts: two seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
from cuda.bindings import driver, nvrtc
from outrider.engines.accelerators.device.cuda import CudaDevice
from outrider.engines.base import EngineError

log = logging.getLogger(__name__)

_SOURCE: Final = "sampler.cu"
_THREADS: Final = 1024
# Contraction and fast functions would change bits, which are those of the same source on a CPU.
_OPTIONS: Final = ("--std=c++17", "--fmad=false", f"-DTHREADS={_THREADS}")
_MAX_ARGUMENTS: Final = 32


def why_no_compiler(compute_capability: str) -> str:
    """Say why kernels cannot be compiled here for a GPU; empty where they can, and then they are."""
    try:
        known = _checked(nvrtc.nvrtcGetSupportedArchs())
        if int(compute_capability.replace(".", "")) not in known:
            return f"the compiler of CUDA kernels knows no compute capability {compute_capability}"
        compile_kernels(compute_capability)
    except (RuntimeError, EngineError) as error:  # the library is loaded when it is first called
        return f"no compiler of CUDA kernels: {str(error).splitlines()[0]}"
    return ""


@cache
def compile_kernels(compute_capability: str) -> bytes:
    """Return the kernels' code for a GPU.

    Args:
        compute_capability: of the GPU, such as "9.0".

    Raises:
        EngineError: the compiler refuses, in its own words.
    """
    source = (
        files("outrider.engines.accelerators.device.sampling.kernels")
        .joinpath(_SOURCE)
        .read_bytes()
    )
    began_s = time.monotonic()
    program = _checked(nvrtc.nvrtcCreateProgram(source, _SOURCE.encode(), 0, [], []))
    options = [f"--gpu-architecture=sm_{compute_capability.replace('.', '')}", *_OPTIONS]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status):
        said = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, said)
        raise EngineError(
            f"{_SOURCE}: {said.decode(errors='replace').strip()[:500] or status.name}"
        )
    code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    log.info("the sampler's kernels were compiled in %.1f s", time.monotonic() - began_s)
    return code


class CudaKernels:
    """Implements ``engines.accelerators.device.sampling.kernels.launches.Kernels`` on a device's stream.

    Raises:
        EngineError: they cannot be compiled or loaded.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        code = compile_kernels(device.compute_capability)
        device.make_current()
        self._library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        self._functions: dict[str, Any] = {}
        # Eight bytes an argument, of which a narrower one takes the first; CUDA copies them when it is called.
        self._slots = np.zeros(_MAX_ARGUMENTS, dtype=np.uint64)
        begin, size = self._slots.ctypes.data, self._slots.itemsize
        self._addresses = begin + size * np.arange(_MAX_ARGUMENTS, dtype=np.uint64)

    def launch(self, name: str, width: int, height: int, arguments: Sequence[int]) -> None:
        """Enqueue a kernel; see ``Kernels.launch``."""
        self._device.make_current()
        function = self._functions.get(name)
        if function is None:
            kernel = _checked(driver.cuLibraryGetKernel(self._library, name.encode()))
            function = self._functions[name] = driver.CUfunction(int(kernel))
        self._slots[: len(arguments)] = arguments
        blocks = (width, height, 1, _THREADS, 1, 1)
        stream, addresses = self._device.stream, self._addresses.ctypes.data
        _checked(driver.cuLaunchKernel(function, *blocks, 0, stream, addresses, 0))

    def close(self) -> None:
        """Unload them."""
        self._functions.clear()
        _checked(driver.cuLibraryUnload(self._library))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise EngineError(f"CUDA: {status.name}")
    return values[0] if values else None
