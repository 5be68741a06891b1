"""Where the server warns of integer sums that overflow, and that ONNX Runtime on this machine bears it out."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.engines.onnx.integer_sums import may_overflow

from tests.export.weights.integer_sums import overflow


def test_the_library_agrees_on_this_machine() -> None:
    assert may_overflow() == overflow()


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "fpu avx2 fma", True),
        ("x86_64", "fpu avx2 avx_vnni", False),
        ("x86_64", "fpu avx2 avx512_vnni", False),
        ("aarch64", "fpu avx2", False),
    ],
)
def test_a_processor_is_judged_by_its_flags(
    tmp_path: Path, machine: str, flags: str, expected: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: any\nflags\t\t: {flags}\n\n")
    assert may_overflow(machine, cpuinfo) == expected


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert not may_overflow("x86_64", tmp_path / "missing")
