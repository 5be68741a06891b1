"""Reads files of authentication and TLS: none that others may write, no secret that others may read.

Errors name the option and never what a file holds. Knows nothing of what the files mean; nothing else knows of
modes and stamps.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from outrider.runtime.core.errors import ConfigError

MOST_BYTES = 4 << 20

Stamp: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""What changes when any of some files does."""


def read_file(key: str, path: Path, *, is_secret: bool = False) -> bytes:
    """Return a file's bytes.

    Args:
        key: name of the option, for errors.
        path: of a regular file; links are followed, as mounted secrets are links.
        is_secret: whether nobody but its owner and group may read it.

    Raises:
        ConfigError: it cannot be read, is no regular file or too large, or others may write it, or read the secret.
    """
    try:
        # Without O_NONBLOCK a named pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MOST_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(key, f"must be a readable file: {error.strerror}") from None
    if not stat.S_ISREG(mode) or len(data) > MOST_BYTES:
        raise ConfigError(key, f"must be a regular file of at most {MOST_BYTES >> 20} MiB")
    if mode & stat.S_IWOTH:
        raise ConfigError(key, "must not be a file that others can write: chmod o-w")
    if is_secret and mode & stat.S_IROTH:
        raise ConfigError(key, "must not be a file that others can read: chmod o-r")
    return data


def read_text(key: str, path: Path, *, is_secret: bool = False) -> str:
    """Return the text of a file, by the rules of ``read_file``."""
    try:
        return read_file(key, path, is_secret=is_secret).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(key, "must be UTF-8 text") from None


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Return what changes when any of the files is written, replaced or removed, or others may read it."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # The time of the last change of any kind tells what the others miss, such as a new owner.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mode, *times)
