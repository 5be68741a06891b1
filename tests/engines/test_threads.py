"""Threads where nobody says: physical cores, within affinity and the container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from outrider.engines.devices import threads_of


def machine(root: Path, siblings: list[str], quota: str | None) -> Path:
    """Files of a machine whose processor n shares a core with ``siblings[n]``."""
    for number, text in enumerate(siblings):
        folder = root / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    if quota is not None:
        (root / "fs" / "cgroup").mkdir(parents=True)
        (root / "fs" / "cgroup" / "cpu.max").write_text(f"{quota}\n")
    return root


@pytest.mark.parametrize(
    ("siblings", "quota", "allowed", "threads"),
    [
        (["0", "1", "2", "3"], None, {0, 1, 2, 3}, 4),
        (["0-1", "0-1", "2-3", "2-3"], "max 100000", {0, 1, 2, 3}, 2),
        (["0,2", "1,3", "0,2", "1,3"], None, {0, 2, 3}, 2),
        (["0", "1", "2", "3"], "250000 100000", {0, 1, 2, 3}, 2),
        (["0", "1", "2", "3"], "50000 100000", {0, 1, 2, 3}, 1),
        (["0", "1", "2", "3"], "800000 100000", {0, 1, 2}, 3),
        (["0", "1"], "nonsense", {0, 1}, 2),
        ([], None, {0, 1, 5}, 3),
    ],
)
def test_a_core_has_one_thread(
    siblings: list[str],
    quota: str | None,
    allowed: set[int],
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    system = machine(tmp_path, siblings, quota)
    assert threads_of(0, system) == threads
    assert threads_of(7, system) == 7
