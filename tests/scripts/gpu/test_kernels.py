"""Digests of the kernels' answers: the same for the same source however its threads run, others for another source."""

from __future__ import annotations

from pathlib import Path

from outrider.engines.accelerators.device.base import HostDevice

from scripts.gpu.kernels import Batches, digests, launch_times
from tests.emulation.kernels.host import _SOURCE, HostKernels, library

FEW = Batches(6, 50, 6, 3)


def test_digests_are_those_of_the_source(tmp_path: Path) -> None:
    expected = [*digests(HostKernels, HostDevice(), FEW)]
    assert len(set(expected)) == FEW.count
    many = library(256)
    assert [*digests(lambda: HostKernels(many, order=7), HostDevice(), FEW)] == expected
    source = tmp_path / _SOURCE.name
    text = _SOURCE.read_text(encoding="utf-8")
    assert "settings[sLenience]" in text
    source.write_text(text.replace("settings[sLenience]", "0.99f"), encoding="utf-8")
    other = library(64, source=source)
    assert [*digests(lambda: HostKernels(other), HostDevice(), FEW)] != expected


def test_every_kernel_is_timed() -> None:
    lines = [*launch_times(HostKernels(), HostDevice(), 50, 2, 3)]
    assert len(lines) == 4
    assert all(name in line for line in lines for name in ("propose", "test_drafts", "answer"))
