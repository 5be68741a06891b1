"""Names of devices, the order in which ``auto`` looks for one, what accelerators serve, a CPU's threads and its sums.

Pure but for the last two; what is present is asked through the probes that ``engines`` gives.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.engines.base import EngineError

CPU, CUDA, TENSORRT, AUTO = "cpu", "cuda", "tensorrt", "auto"
# Fastest first; the CPU is always there.
PREFERENCE = (TENSORRT, CUDA)

# Where Linux tells of cores and of limits.
_SYSTEM = Path("/sys")

OVERFLOW = (
    "w8a8 on a processor without VNNI: ONNX Runtime's integer sums overflow there and answers lose more than they "
    "should; export with --weights int8"
)

_FORM = re.compile(rf"({CUDA}|{TENSORRT})(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Device:
    """A backend and the number of its GPU."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        """As a user writes it."""
        return self.kind if self.kind == CPU else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The device that serves, and why, in words."""

    device: Device
    reason: str


def parse_device(text: str) -> Device | None:
    """Device of a text such as "cuda:1"; None for "auto".

    Raises:
        EngineError: it is no device; says which forms there are.
    """
    if text == AUTO:
        return None
    if text == CPU:
        return Device(CPU)
    match = _FORM.fullmatch(text)
    if match is None:
        raise EngineError(f"device {text!r}: must be cpu, cuda[:N], tensorrt[:N] or auto")
    return Device(match[1], int(match[2] or 0))


def choose(text: str, probes: Mapping[str, Callable[[int], str]]) -> Choice:
    """The device asked for, or the best that is present.

    Args:
        text: as ``parse_device`` takes it.
        probes: for each kind of ``PREFERENCE``, why the GPU of a number cannot serve; empty text
            where it can.

    Raises:
        EngineError: it is no device, or the one asked for cannot serve.
    """
    asked = parse_device(text)
    if asked is not None:
        missing = probes[asked.kind](asked.index) if asked.kind != CPU else ""
        if missing:
            raise EngineError(f"device {asked}: {missing}")
        return Choice(asked, "asked for")
    reasons: list[str] = []
    for kind in PREFERENCE:
        missing = probes[kind](0)
        if not missing:
            better = "".join(f"; no {reason}" for reason in reasons)
            return Choice(Device(kind), f"the best that is present{better}")
        reasons.append(f"{kind} ({missing})")
    return Choice(Device(CPU), "".join(f"no {reason}; " for reason in reasons).rstrip("; "))


def threads_of(asked: int, system: Path = _SYSTEM) -> int:
    """Return ``asked``, or for 0 the physical cores that affinity and the container's limit leave this process.

    Two threads of one core share its multipliers: a second one makes a product no faster. ``system`` is where Linux
    tells of cores; what cannot be read there limits nothing.
    """
    if asked:
        return asked
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    folder = system / "devices" / "system" / "cpu"
    cores = {
        _text(folder / f"cpu{one}" / "topology" / "thread_siblings_list") or str(one)
        for one in allowed
    }
    # "max 100000", or microseconds of processor time in each so many of the clock.
    quota, _, period = _text(system / "fs" / "cgroup" / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        return max(1, min(len(cores), int(quota) // int(period)))
    return len(cores)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def integer_sums_overflow(
    machine: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")
) -> bool:
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
