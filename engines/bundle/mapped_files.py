"""Takes the weights that a library has mapped from files into memory of the process's own.

ONNX Runtime maps each tensor of a data file. It repacks most of them and unmaps those, and computes from the mapping of
the others (embeddings, norms, tables of angles) as long as it serves. Whoever writes to the file then changes answers,
and who truncates it ends the process. So once a model is open, each range that is still mapped is read into anonymous
memory, which takes the range's place and address (mremap): the library sees the same bytes, and nobody else does. It
takes as much memory as those tensors have, where a copy of the file would take all of it beside the repacked ones.

Linux alone says what is mapped; elsewhere, and where memory is too small, files stay mapped and ``still_mapped`` says
which: their stamps must then be watched.

Source: mremap(2), MREMAP_FIXED; proc(5), /proc/pid/maps; Control Group v2, memory.max.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_DELETED = " (deleted)"
_MAY_MOVE_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED; Python's mmap does not name them.
# Left to the rest of the process and of the machine.
_MARGIN_BYTES = 64 << 20


class MappedRange(NamedTuple):
    """A range of addresses over a file: [start, end), from ``offset`` of the file on."""

    path: Path
    start: int
    end: int
    offset: int


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
    """Move what is mapped of files into private memory, and return the bytes that stay mapped.

    Nothing may write to the ranges meanwhile. All of them are moved, or none where memory is too small.
    """
    ranges = still_mapped(paths)
    wanted = sum(one.end - one.start for one in ranges)
    free = free_bytes()
    if wanted and (free is None or wanted + _MARGIN_BYTES > free):
        log.info("%d MiB of weights stay mapped: too little memory is free", wanted >> 20)
        return wanted
    try:
        for one in ranges:
            _take(one)
    except OSError as error:
        log.info("weights stay mapped: %s", error)
    return sum(one.end - one.start for one in still_mapped(paths))


def free_bytes(memory: Path = _MEMORY, group: Path = _GROUP) -> int | None:
    """Return the memory that the process may still take; None where the system does not say.

    Args:
        memory: file in which Linux keeps what is free.
        group: folder of the process's control group, which may have less.
    """
    try:
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The file cache gives way.
        used -= int(counts["inactive_file"])
    except (OSError, KeyError, ValueError):
        return free
    return free if most == "max" else min(free, int(most) - used)


def _take(one: MappedRange) -> None:
    """Read a range's bytes from the file into memory that takes the range's place.

    Raises:
        OSError: the file has fewer bytes by now, or there is no memory.
    """
    size = one.end - one.start
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.mremap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_void_p),
    )
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = library.mmap(None, size, access, kind, -1, 0)
    if memory == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "no memory")
    try:
        _read(one, (ctypes.c_char * size).from_address(memory))
        if library.mremap(memory, size, size, _MAY_MOVE_TO, one.start) != one.start:
            raise OSError(ctypes.get_errno(), "the memory cannot be moved")
    except OSError:
        library.munmap(ctypes.c_void_p(memory), ctypes.c_size_t(size))
        raise


def _read(one: MappedRange, memory: ctypes.Array[ctypes.c_char]) -> None:
    # A range ends with a page, the file perhaps within it: the rest of the page is zeros in both.
    view, done = memoryview(memory).cast("B"), 0
    with one.path.open("rb", buffering=0) as file:
        wanted = min(one.end - one.start, os.fstat(file.fileno()).st_size - one.offset)
        while done < wanted:
            count = os.preadv(file.fileno(), [view[done:wanted]], one.offset + done)
            if not count:
                raise OSError(f"{one.path.name}: ends too early")
            done += count
