"""What was compiled is kept; a kept file that is damaged is made anew, and nobody fails to start over it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

SOURCE = """
from numba import int64

from outrider.engines.jit import njit_exact


@njit_exact(int64(int64))
def doubled(number: int) -> int:
    return 2 * number
"""
NAME = "kept_rules"

Load = Callable[[], int]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a module with one rule anew and calls it."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))

    def imported() -> int:
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        return int(importlib.import_module(NAME).doubled(21))

    return imported


def kept(tmp_path: Path) -> dict[str, bytes]:
    """Files kept of the rule, by kind: index and code."""
    return {one.suffix: one.read_bytes() for one in (tmp_path / "kept").rglob("*.nb?")}


def test_what_was_compiled_is_loaded(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert load() == 42
    before = kept(tmp_path)
    assert set(before) == {".nbi", ".nbc"}
    assert load() == 42
    assert kept(tmp_path) == before
    assert not caplog.records


@pytest.mark.parametrize("kind", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [b"", b"\x80", b"not a pickle", None])
def test_a_damaged_file_is_made_anew(
    kind: str,
    damage: bytes | None,
    load: Load,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """None cuts the file in half, as a full disk does."""
    load()
    (file,) = (tmp_path / "kept").rglob(f"*{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert load() == 42
    assert "what was kept of doubled cannot be used" in caplog.text
    caplog.clear()
    assert load() == 42
    assert not caplog.records
    assert set(kept(tmp_path)) == {".nbi", ".nbc"}


def test_a_damaged_file_that_cannot_be_replaced_costs_time_alone(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    load()
    (file,) = (tmp_path / "kept").rglob("*.nbc")
    file.write_bytes(b"")

    def refuse(source: object, destination: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    with caplog.at_level(logging.WARNING):
        assert load() == 42
    assert "compiled at every start: read-only" in caplog.text
    assert file.read_bytes() == b""


def test_a_function_that_cannot_be_compiled_is_an_error(load: Load, tmp_path: Path):
    (tmp_path / f"{NAME}.py").write_text(SOURCE.replace("2 * number", "number.nothing"))
    with pytest.raises(numba.TypingError):
        load()


CALLER = """
from numba import int64

from outrider.engines.jit import njit_exact
from {module} import {name}


@njit_exact(int64(int64))
def {caller}(number: int) -> int:
    return 1 + {name}(number)
"""


def test_a_function_is_compiled_anew_where_another_file_that_it_calls_has_changed(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = (NAME, "kept_callers", "kept_callers_of_callers")
    called = ("doubled", "more", "still_more")
    for at in (1, 2):
        text = CALLER.format(module=names[at - 1], name=called[at - 1], caller=called[at])
        (tmp_path / f"{names[at]}.py").write_text(text)

    def loaded() -> int:
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        return int(importlib.import_module(names[2]).still_more(5))

    assert loaded() == 12
    (tmp_path / f"{NAME}.py").write_text(SOURCE.replace("2 * number", "300 * number"))
    assert loaded() == 1502
    assert loaded() == 1502
