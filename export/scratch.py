"""A folder to write in until the result is whole; what killed processes left behind is removed by the next one."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder beside the result and remove it at the end, unless it was renamed to be the result.

    Its maker holds a lock on it as long as the process lives, so a folder of this prefix without one is a leftover.
    """
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        if path.is_dir() and not path.is_symlink():
            _remove_leftover(path)
    folder, lock = _locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Until the lock is held another process may take the folder for a leftover.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_leftover(path: Path) -> None:
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:  # another user's, or removed meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:  # somebody writes in it
        pass
    finally:
        os.close(lock)
