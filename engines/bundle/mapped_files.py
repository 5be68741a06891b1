"""Takes the weights that a library has mapped from files into memory of the process's own.

ONNX Runtime maps each tensor of a data file. It repacks most of them and unmaps those, and computes from the mapping of
the others (embeddings, norms, tables of angles) as long as it serves. Whoever writes to the file then changes answers,
and who truncates it ends the process. So once a model is open, what is still mapped is copied into a file in memory,
without a name, which takes the mapping's place at its address. The library sees the same bytes, and nobody else can
open them. That takes as much memory as those tensors have, once for all graphs of a model; a copy of the whole file
would take all of it beside the repacked tensors.

Linux alone says what is mapped; where memory is too small, files stay mapped and ``still_mapped`` says which: their
stamps must then be watched.

Source: memfd_create(2); mmap(2), MAP_FIXED; proc(5), /proc/pid/maps; Control Group v2, memory.max.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_DELETED = " (deleted)"
_MAP_FIXED = 0x10  # Python's mmap does not name it.
# Left to the rest of the process and of the machine.
_MARGIN_BYTES = 64 << 20


class MappedRange(NamedTuple):
    """A range of addresses over a file: [start, end), from ``offset`` of the file on."""

    path: Path
    start: int
    end: int
    offset: int


def can_tell() -> bool:
    """Return whether the system says what is mapped."""
    return _MAPS.exists()


def still_mapped(paths: Collection[Path]) -> list[MappedRange]:
    """Return the ranges of the process over files; none on systems that do not say."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    wanted = {str(path): path for path in paths}
    return list(_ranges(lines, wanted))


def _ranges(lines: list[str], wanted: dict[str, Path]) -> Iterator[MappedRange]:
    for line in lines:
        span, mode, offset, _, _, *name = line.split(maxsplit=5)
        path = wanted.get(name[0].removesuffix(_DELETED)) if name else None
        if path is not None and mode.endswith("p"):
            start, end = (int(address, 16) for address in span.split("-"))
            yield MappedRange(path, start, end, int(offset, 16))


def take_mapped(paths: Collection[Path]) -> int:
    """Move what is mapped of files into memory of the process, and return the bytes that stay mapped.

    Where memory is too small, nothing is moved.
    """
    ranges = still_mapped(paths)
    wanted = sum(one.end - one.start for one in ranges)
    free = free_bytes()
    if wanted and (free is None or wanted + _MARGIN_BYTES > free):
        log.info("%d MiB of weights stay mapped: too little memory is free", wanted >> 20)
        return wanted
    try:
        for path in {one.path for one in ranges}:
            ours = [one for one in ranges if one.path == path]
            copy = os.memfd_create(path.name)
            try:
                _fill(copy, path, ours)
                for one in ours:
                    _put_in_place(copy, one)
            finally:
                os.close(copy)
    except OSError as error:
        log.info("weights stay mapped: %s", error)
    return sum(one.end - one.start for one in still_mapped(paths))


def free_bytes(
    memory: Path = _MEMORY, groups: Path = _GROUPS, own_group: Path = _OWN_GROUP
) -> int | None:
    """Return the memory that the process may still take; None where the system does not say.

    Args:
        memory: file in which Linux keeps what is free.
        groups: where control groups are mounted; the process's own, or one around it, may have less.
        own_group: file in which Linux says which group is the process's own.
    """
    try:
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    path = _own_group(own_group)
    # Outside a name space of control groups the path is the whole machine's, and may not be mounted here.
    around = (groups.joinpath(*path[:depth]) for depth in range(len(path) + 1))
    return int(min(free, *map(_left_in, around)))


def _own_group(file: Path) -> tuple[str, ...]:
    """Return the parts of the path of the process's control group; none where the system does not say."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    return tuple(path.strip("/").split("/"))


def _left_in(group: Path) -> float:
    """Return the bytes that a control group may still take; infinite without a limit."""
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The file cache gives way.
        used -= int(counts["inactive_file"])
    except (OSError, KeyError, ValueError):
        return math.inf
    return math.inf if most == "max" else int(most) - used


def _fill(copy: int, path: Path, ranges: Collection[MappedRange]) -> None:
    """Copy ranges of a file to their places in a file in memory.

    Raises:
        OSError: the file has fewer bytes by now, or there is no memory.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.ftruncate(copy, size)
        for offset, end in {(one.offset, one.offset + one.end - one.start) for one in ranges}:
            os.lseek(copy, offset, os.SEEK_SET)
            # The file may end within a range's last page.
            while (done := os.lseek(copy, 0, os.SEEK_CUR)) < min(end, size):
                if not os.sendfile(copy, file.fileno(), done, min(end, size) - done):
                    raise OSError(f"{path.name}: ends too early")


def _put_in_place(copy: int, one: MappedRange) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    size = one.end - one.start
    if library.mmap(one.start, size, access, kind, copy, one.offset) != one.start:
        raise OSError(ctypes.get_errno(), "memory cannot take the place of a mapping")
