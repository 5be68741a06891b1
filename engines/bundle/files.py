"""The files of a bundle, checked against its manifest.

What is hashed is an open file, not a path. Its stamp says later whether a path still leads to that file and whether
anybody has written to it since: writes, truncations and renames move ``changed_ns``, which no program can set. Only who
had mapped the file before, to write to it, can change it unseen.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from outrider.engines.base import BundleError
from outrider.engines.bundle.fields import Size, Text

MANIFEST_FILE = "manifest.json"
# Nobody reads it: a process that was killed while it wrote leaves it, and the next to write replaces it.
UNFINISHED_MANIFEST = MANIFEST_FILE + ".new"
# Over the manifest, which therefore cannot list it.
SIGNATURE_FILE = "manifest.sig"
_UNLISTED = (MANIFEST_FILE, UNFINISHED_MANIFEST, SIGNATURE_FILE, SIGNATURE_FILE + ".new")
# A path that became a link is refused; one that became a pipe does not block. Windows has none of the flags.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class FileStamp(NamedTuple):
    """Identity of a file and of its last change; sizes in bytes, times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Fingerprint of one file; ``size`` in bytes, ``sha256`` in lower-case hexadecimal."""

    sha256: Text
    size: Size


def hash_files(root: Path) -> dict[str, FileEntry]:
    """Fingerprints of every file under ``root`` but the manifest and its signature, by POSIX path.

    Raises:
        BundleError: a link or special file lies in the folder.
    """
    return {name: fingerprint(root / name) for name in list_files(root)}


def list_files(root: Path) -> list[str]:
    """POSIX paths of all regular files but the manifest and its signature; refuses everything that is a link.

    Raises:
        BundleError: a link or special file lies in the folder.
    """
    names = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            continue
        _refuse_links(name, status)
        if name not in _UNLISTED:
            names.append(name)
    return names


def _refuse_links(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{name}: symbolic links and special files are refused")
    if status.st_nlink > 1:
        raise BundleError(f"{name}: hard links are refused; copy the file")


def fingerprint(path: Path) -> FileEntry:
    """Hash and size of one file."""
    with path.open("rb") as file:
        return FileEntry(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())


@contextmanager
def open_plain(root: Path, name: str) -> Iterator[io.FileIO]:
    """Open a file of a bundle for reading.

    Raises:
        BundleError: the path is a link by now, a special file, or cannot be read.
    """
    try:
        file = io.FileIO(os.open(root / name, _OPEN_FLAGS))
    except OSError as error:
        raise BundleError(f"{name}: cannot be read: {error.strerror}") from error
    with file:
        _refuse_links(name, os.fstat(file.fileno()))
        yield file


def read_plain(root: Path, name: str, at_most: int = -1) -> bytes:
    """Return the content of a file of a bundle, or its first ``at_most`` bytes; raises as ``open_plain``."""
    with open_plain(root, name) as file:
        return file.read(at_most)


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file that was looked at."""
    return FileStamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def check_inside(name: str) -> None:
    """Refuse a path that leaves the bundle.

    Raises:
        BundleError: naming the path.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.as_posix() != name:
        raise BundleError(
            f"{name or '(empty)'}: the path leaves the bundle or is not in its plain form"
        )


def stamp_file(root: Path, name: str, declared: FileEntry) -> FileStamp:
    """Return the stamp of a file of the declared size, whose content nobody has looked at.

    Raises:
        BundleError: naming the file: another size.
    """
    with open_plain(root, name) as file:
        stamp = stamp_of(os.fstat(file.fileno()))
    check_size(name, stamp.size, declared)
    return stamp


def check_file(root: Path, name: str, declared: FileEntry) -> FileStamp:
    """Return the stamp of a file whose content is the declared one.

    Raises:
        BundleError: naming the file: another size or content, or written to meanwhile.
    """
    with open_plain(root, name) as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        check_size(name, stamp.size, declared)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if stamp_of(os.fstat(file.fileno())) != stamp:
            raise changed(name)
    check_digest(name, digest, declared)
    return stamp


def read_file(
    root: Path, name: str, declared: FileEntry, known: FileStamp | None = None
) -> tuple[bytes, FileStamp]:
    """Return the content and the stamp of a file: the very bytes that were hashed, or those of a file hashed before.

    Args:
        root: folder of the bundle.
        name: of the file.
        declared: its entry in the manifest.
        known: stamp of the file when its content was found to be the declared one.

    Raises:
        BundleError: naming the file: another size or content.
    """
    with open_plain(root, name) as file:
        before = stamp_of(os.fstat(file.fileno()))
        check_size(name, before.size, declared)
        data = file.read()
        after = stamp_of(os.fstat(file.fileno()))
    if not known == before == after:
        check_digest(name, hashlib.sha256(data).hexdigest(), declared)
    return data, after


def check_size(name: str, size: int, declared: FileEntry) -> None:
    """Refuse a file of another size than the declared one."""
    if size != declared.size:
        raise BundleError(f"{name}: {size} bytes, {MANIFEST_FILE} says {declared.size}")


def check_digest(name: str, digest: str, declared: FileEntry) -> None:
    """Refuse a content with another SHA-256 than the declared one."""
    if digest != declared.sha256:
        raise BundleError(f"{name}: content differs from its sha256 in {MANIFEST_FILE}")


def check_stamp(root: Path, name: str, stamp: FileStamp) -> None:
    """Refuse a path that does not lead to the file of a stamp as it was.

    Raises:
        BundleError: naming the file.
    """
    try:
        found = stamp_of((root / name).lstat())
    except OSError:  # gone
        raise changed(name) from None
    if found != stamp:
        raise changed(name)


def changed(name: str) -> BundleError:
    """The error of a file that was written to, moved or replaced after it was hashed."""
    return BundleError(f"{name}: changed after it was hashed; start again when nobody writes to it")
