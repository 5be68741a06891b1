"""How add-ons are found: by the entry points of what is installed."""

from pathlib import Path

import pytest
from outrider.engines.addons import NotInstalledError, load_addon

GROUP = "outrider.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put distributions with entry points where Python finds them."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(**entries: str) -> None:
        for distribution, line in entries.items():
            info = tmp_path / f"{distribution}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[{GROUP}]\n{line}\n")

    return install


def test_an_add_on_is_a_module_or_an_object_of_one(install):
    install(one="here = pathlib:Path", two="module = pathlib")
    assert load_addon(GROUP, "here") is Path
    assert load_addon(GROUP, "module").Path is Path


@pytest.mark.parametrize(
    ("entries", "refusal"),
    [
        ({}, rf"here: is not installed: no distribution has it in {GROUP}"),
        ({"one": "here = pathlib", "two": "here = os"}, "here: must be one distribution's: 2 have"),
        ({"one": "here = outrider.gone"}, "here: is not installed: No module named 'outrider.gone"),
    ],
)
def test_one_that_is_missing_is_refused_by_name(install, entries, refusal):
    install(**entries)
    with pytest.raises(NotInstalledError, match=refusal):
        load_addon(GROUP, "here")


def test_a_missing_library_is_named_as_such(install):
    """The command line says which extra brings it."""
    install(one="here = no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_addon(GROUP, "here")
