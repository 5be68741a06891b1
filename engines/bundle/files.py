"""The files of a bundle, checked against its manifest."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outrider.engines.base import BundleError

MANIFEST_FILE = "manifest.json"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Fingerprint of one file; ``size`` in bytes, ``sha256`` in lower-case hexadecimal."""

    sha256: str
    size: int


def hash_files(root: Path) -> dict[str, FileEntry]:
    """Fingerprints of every file under ``root`` but the manifest, by POSIX path.

    Raises:
        BundleError: a link or special file lies in the folder.
    """
    return {name: fingerprint(root / name) for name in list_files(root)}


def list_files(root: Path) -> list[str]:
    """POSIX paths of all regular files but the manifest; refuses everything that is a link.

    Raises:
        BundleError: a link or special file lies in the folder.
    """
    names = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{name}: symbolic links and special files are refused")
        if status.st_nlink > 1:
            raise BundleError(f"{name}: hard links are refused; copy the file")
        if name != MANIFEST_FILE:
            names.append(name)
    return names


def fingerprint(path: Path) -> FileEntry:
    """Hash and size of one file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileEntry(sha256=digest.hexdigest(), size=size)


def check_inside(name: str) -> None:
    """Refuse a path that leaves the bundle.

    Raises:
        BundleError: naming the path.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.as_posix() != name:
        raise BundleError(f"{name}: the path leaves the bundle or is not in its plain form")


def check_file(root: Path, name: str, declared: FileEntry) -> None:
    """Refuse a file whose content is not the declared one.

    Raises:
        BundleError: naming the file.
    """
    size = (root / name).stat().st_size
    if size != declared.size:
        raise BundleError(f"{name}: {size} bytes, {MANIFEST_FILE} says {declared.size}")
    if fingerprint(root / name).sha256 != declared.sha256:
        raise BundleError(f"{name}: content differs from its sha256 in {MANIFEST_FILE}")
