"""Folders to write in, made while others clean up."""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from outrider.export import scratch
from outrider.export.scratch import scratch_folder

PREFIX = ".bundle.export-"


def test_a_leftover_is_removed_and_a_folder_in_use_is_not(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}left").mkdir()
    with scratch_folder(tmp_path, PREFIX) as used, scratch_folder(tmp_path, PREFIX) as other:
        assert set(tmp_path.iterdir()) == {used, other}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_another_took_for_a_leftover_is_made_again(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, lock = tempfile.mkdtemp, fcntl.flock

    def clean_up() -> None:
        monkeypatch.undo()
        with scratch_folder(tmp_path, PREFIX):
            pass

    def make_and_clean_up(**given: Any) -> str:
        made = make(**given)
        clean_up()
        return made

    def clean_up_and_lock(file: int, kind: int) -> None:
        clean_up()
        lock(file, kind)

    if moment == "before it is opened":
        monkeypatch.setattr(tempfile, "mkdtemp", make_and_clean_up)
    else:
        monkeypatch.setattr(fcntl, "flock", clean_up_and_lock)
    with scratch_folder(tmp_path, PREFIX) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_leftover_that_cannot_be_opened_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, or one that another export removes at this moment."""
    left, open_plainly = tmp_path / f"{PREFIX}left", os.open
    left.mkdir()

    def refuse(path: Path, flags: int) -> int:
        if path == left:
            raise PermissionError
        return open_plainly(path, flags)

    monkeypatch.setattr(scratch.os, "open", refuse)
    with scratch_folder(tmp_path, PREFIX) as folder:
        assert set(tmp_path.iterdir()) == {left, folder}
