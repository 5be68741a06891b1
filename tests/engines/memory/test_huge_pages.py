"""Memory that was allocated lies on huge pages where somebody asks for it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from outrider.engines.memory.huge_pages import (
    huge_page_bytes,
    private_blocks,
    use_everywhere,
)

PAGE = huge_page_bytes()
needs_huge_pages = pytest.mark.skipif(not PAGE, reason="this system has no huge pages")


def allocate(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Private memory, every page touched, and the address of its first whole block."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(range(256)) * (num_bytes // 256))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -(-address // PAGE) * PAGE


def huge_bytes(address: int) -> int:
    """Bytes on huge pages in the mapping that holds an address."""
    is_it, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            is_it = start <= address < end
        elif is_it and first == "AnonHugePages:":
            found = 1024 * int(rest[0])
    return found


@needs_huge_pages
def test_all_that_is_allocated_is_moved_and_keeps_its_bytes() -> None:
    memory, address = allocate(8 * PAGE)
    assert address in private_blocks(PAGE)
    assert use_everywhere() >= 1
    assert huge_bytes(address) >= PAGE
    assert memory[:] == bytes(range(256)) * (8 * PAGE // 256)


@pytest.mark.parametrize(
    ("enabled", "size"),
    [
        ("always madvise [never]", 0),
        ("always [madvise] never", 4096),
        ("[always] madvise never", 4096),
    ],
)
def test_an_operator_may_want_none(tmp_path: Path, enabled: str, size: int) -> None:
    (tmp_path / "enabled").write_text(enabled)
    (tmp_path / "hpage_pmd_size").write_text("4096\n")
    assert huge_page_bytes(tmp_path) == size


def test_a_system_without_them_has_none(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path) == 0
    assert private_blocks(0) == set()
