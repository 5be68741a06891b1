"""Where the checkpoints of an export come from: folders, names on the Hub, and GGUF files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from outrider.export.gguf.folder import is_gguf, parts_of, write_folder
from outrider.export.hub import Located, is_name, locate
from outrider.export.progress import Progress
from outrider.export.scratch import scratch_folder


@contextmanager
def located(
    asked: Mapping[str, Path], parent: Path, progress: Progress
) -> Iterator[dict[str, Located]]:
    """Give the checkpoints' folders: as they are, fetched from the Hub, or made of GGUF files for as long.

    Args:
        asked: paths or names by "target" and "draft".
        parent: folder to make those of GGUF files in; made too where there are such.
        progress: of the export.

    Raises:
        BundleError: see ``hub.locate`` and ``gguf.folder.write_folder``.
    """
    if not any(map(is_gguf, asked.values())):
        yield {name: _located(name, path, progress) for name, path in asked.items()}
        return
    parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(parent, ".gguf-") as scratch:
        found = {}
        for name, path in asked.items():
            if is_gguf(path):
                progress.tell(f"{name}: reading {path.name}")
                found[name] = _unpacked(path, scratch / name)
            else:
                found[name] = _located(name, path, progress)
        yield found


def _located(name: str, path: Path, progress: Progress) -> Located:
    if is_name(path):
        progress.tell(f"{name}: fetching {path} from the Hub")
    found = locate(path)
    if found.source:
        progress.tell(f"{name}: {found.source}")
    return found


def _unpacked(path: Path, folder: Path) -> Located:
    """Return a folder made of a GGUF file; its source is the file's name and hash."""
    parts = parts_of(path)
    made = folder / path.name
    made.mkdir(parents=True)
    write_folder(path, made)
    digests = []
    for part in parts:
        with part.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return Located(made, f"{path.name}@sha256:{','.join(digests)}")
