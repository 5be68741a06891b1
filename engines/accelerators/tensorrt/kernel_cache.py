"""Kernels that TensorRT-RTX compiled for a GPU: shared by all contexts of an engine, and kept for the next start."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engines.bundle.plans import Machine

if TYPE_CHECKING:
    import tensorrt as trt

log = logging.getLogger(__name__)


def kernel_file(root: Path, machine: Machine) -> Path:
    """File of a machine's kernels, beside the bundle as its step costs are."""
    flavour, version, capability = machine
    return root.with_name(f"{root.name}.kernels") / f"{flavour}-{version}-sm{capability}"


class KernelCache:
    """One runtime cache for every context that is made; ``save`` keeps what was compiled."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept = b""
        self._cache: trt.IRuntimeCache | None = None

    def attach(self, config: trt.IRuntimeConfig) -> None:
        """Let contexts of a configuration take their kernels from here, and leave them here."""
        if self._cache is None:
            cache: trt.IRuntimeCache = config.create_runtime_cache()
            self._kept = self._file.read_bytes() if _is_own(self._file) else b""
            # Left aside where another driver or version wrote it: all is compiled again.
            if self._kept and not cache.deserialize(self._kept):
                log.info("%s: of another driver or GPU; kernels are compiled again", self._file)
            self._cache = cache
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the file where kernels were compiled that it lacks; where it cannot be written, the log says so."""
        if self._cache is None:
            return
        cache: trt.IRuntimeCache = self._cache
        found: trt.IHostMemory = cache.serialize()
        data = bytes(found)
        if data == self._kept:
            return
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.touch(mode=0o600)
            partial.write_bytes(data)
            partial.replace(self._file)
        except OSError as error:
            log.warning("kernels are compiled at every start: %s", error)
            with suppress(OSError):
                partial.unlink()
        self._kept = data


def _is_own(file: Path) -> bool:
    """Whether a file is this user's, and nobody else can write it: kernels are code, and no manifest has their hash."""
    if not file.is_file():
        return False
    found = file.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
