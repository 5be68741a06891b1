"""Folders of pages: whole or not there, wherever they lie."""

from pathlib import Path

import pytest
from outrider.runtime.offline.pages.page import filled


def test_files_come_to_a_folder_on_its_own_disk(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    (disk / "kept").touch()
    out.symlink_to(disk)
    with filled(out) as unfinished:
        assert unfinished.resolve().parent == disk
        (unfinished / "page").touch()
    assert {path.name for path in disk.iterdir()} == {"kept", "page"}


def test_a_folder_that_was_not_filled_is_as_it_was(tmp_path: Path) -> None:
    for out in (tmp_path / "new" / "out", tmp_path):
        with pytest.raises(ZeroDivisionError), filled(out) as unfinished:
            (unfinished / "page").touch()
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]
