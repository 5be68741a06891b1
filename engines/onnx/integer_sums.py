"""Whether ONNX Runtime's integer products overflow on this processor, as w8a8's do on x64 without VNNI."""

from __future__ import annotations

import platform
from pathlib import Path

OVERFLOW = (
    "w8a8 on a processor without VNNI: ONNX Runtime's integer sums overflow there and answers lose more than they "
    "should; export with --weights int8"
)


def may_overflow(machine: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether ONNX Runtime (1.31.1) adds two products of 8 bits in 16 bits here.

    Args:
        machine: as of ``platform.machine``; default: this one.
        cpuinfo: what Linux says of the processor; where there is no such file nothing is known, and the answer is no.
    """
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return False
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    return flags is not None and not {"avx512_vnni", "avx_vnni"} & set(flags)
