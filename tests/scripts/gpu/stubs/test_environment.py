"""Parts of the environment, made by two processes at once."""

from pathlib import Path

import pytest

from scripts.gpu.stubs.environment import _put


def test_who_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    first, second, place = (tmp_path / name for name in ("first", "second", "place"))
    for made in (first, second):
        made.mkdir()
        (made / "library").write_text(made.name)
        _put(made, place, "library")
    assert (place / "library").read_text() == "first"
    assert list(tmp_path.iterdir()) == [place]


def test_a_place_that_lacks_its_file_is_not_taken(tmp_path: Path) -> None:
    made, place = tmp_path / "made", tmp_path / "place"
    made.mkdir()
    place.mkdir()
    (place / "other").touch()
    with pytest.raises(OSError, match="not empty"):
        _put(made, place, "library")
