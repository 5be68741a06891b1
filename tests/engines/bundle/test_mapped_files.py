"""What engines compute from is what was hashed, whatever happens to the files afterwards."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError, Engine, Span
from outrider.engines.bundle import mapped_files
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.mapped_files import free_bytes, still_mapped, take_mapped
from outrider.engines.opening import open_engine

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped")
CHAIN = Span(slot=0, start=0, tokens=(3, 5, 7, 9), num_logits=4)
TREE = Span(slot=0, start=0, tokens=(3, 5, 7, 9), num_logits=4, parents=(0, 0, 1))


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """Loaded through ".." and a link: the system calls its files otherwise."""
    shutil.copytree(tiny_bundle, tmp_path / "bundles" / "bundle")
    (tmp_path / "link").symlink_to(tmp_path / "bundles")
    return load_bundle(tmp_path / "bundles" / ".." / "link" / "bundle")


@contextmanager
def opened(bundle: Bundle) -> Iterator[Engine]:
    engine = open_engine(bundle, "target", with_trees=True)
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine) -> list[bytes]:
    """Bits of a chain and of a tree: each has a graph of its own, over the same file."""
    found = [engine.extend([span])[0].copy() for span in (CHAIN, TREE)]
    return [np.ascontiguousarray(logits).tobytes() for logits in found]


def data_file(bundle: Bundle) -> Path:
    return bundle.root / "target" / "model.onnx.data"


@linux
def test_weights_may_be_overwritten_and_truncated_under_an_engine(bundle: Bundle) -> None:
    path = data_file(bundle)
    with opened(bundle) as engine:
        before = answers(engine)
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(os.urandom(size))
        assert answers(engine) == before
        os.truncate(path, 0)
        assert answers(engine) == before
        assert not bundle.is_mapped()


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("other"))
    path.with_name("other").replace(path)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [rewrite, replace, shorten, Path.unlink])
@pytest.mark.parametrize("name", ["model.onnx.data", "model.onnx", "tree.onnx"])
def test_a_file_changed_between_hash_and_load_is_refused(
    bundle: Bundle, change: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change comes when all graphs are open, so that the library itself has nothing to say."""
    take = mapped_files.take_mapped

    def change_and_take(paths: list[Path]) -> int:
        change(bundle.root / "target" / name)
        return take(paths)

    monkeypatch.setattr("outrider.engines.bundle.bundle.take_mapped", change_and_take)
    with pytest.raises(BundleError, match=rf"target/{name}: changed after it was hashed"):
        open_engine(bundle, "target", with_trees=True)


@linux
def test_where_memory_is_too_small_files_stay_mapped(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "free_bytes", lambda: 1 << 20)
    with opened(bundle):
        assert bundle.is_mapped()
        paths = [bundle.root / name for name in bundle.stamps]
        (path,) = {one.path for one in still_mapped(paths)}
        assert path == data_file(bundle)
        monkeypatch.undo()
        assert take_mapped(paths) == 0


def test_what_is_free_is_what_machine_and_group_leave(tmp_path: Path) -> None:
    memory, group, own = (tmp_path / name for name in ("meminfo", "group", "own"))
    assert free_bytes(memory, group, own) is None
    memory.write_text("MemTotal:  9000 kB\nMemAvailable:   4000 kB\n")
    assert free_bytes(memory, group, own) == 4000 << 10
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert free_bytes(memory, group, own) == 4000 << 10
    (group / "memory.max").write_text("3500000\n")
    assert free_bytes(memory, group, own) == 1_000_000


@pytest.mark.parametrize(
    ("path", "free"),
    [("/", 900), ("/system.slice/a.service", 300), ("/system.slice", 600), ("/../b/c", 900)],
)
def test_the_groups_around_a_service_leave_what_is_free(
    tmp_path: Path, path: str, free: int
) -> None:
    memory, groups, own = (tmp_path / name for name in ("meminfo", "groups", "own"))
    memory.write_text("MemAvailable: 4000 kB\n")
    own.write_text(f"1:name=systemd:/other\n0::{path}\n")
    for name, most in (("", 1000), ("system.slice", 700), ("system.slice/a.service", 400)):
        (groups / name).mkdir(parents=True)
        (groups / name / "memory.max").write_text(f"{most}\n")
        (groups / name / "memory.current").write_text("150\n")
        (groups / name / "memory.stat").write_text("inactive_file 50\n")
    assert free_bytes(memory, groups, own) == free
