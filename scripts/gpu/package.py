"""Parts for an isolated machine with a GPU: ONNX Runtime's CUDA provider cut to one kind of GPU, wheels and a bundle.

    python -m scripts.gpu.package BUNDLE WHEEL OUT --wheels DIR --architecture 90
    # there, with OUT/*: sha256sum -c SHA256SUMS && cat package.tar.xz.* | tar -xJ

WHEEL is onnxruntime-gpu's for that machine's Python. Its provider holds code for every GPU; that of other
architectures becomes zeros, which compress to nothing. ONNX Runtime's own library and its TensorRT provider are
left out: Python needs neither. CUDA's libraries are the machine's own, of PyTorch for example. Where the wheel is for
this Python, what was packed is unpacked once more and opens the bundle's graphs over stub libraries first.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.bundle.names import DEVICE_FILE

from scripts.gpu.stubs.environment import NoEnvironmentError, make_environment, variables
from scripts.tools.results import ROOT

PART_BYTES = 26 << 20
ARCHIVE = "package.tar.xz"
SITE = "site"
_LEFT_OUT = ("libonnxruntime.so", "libonnxruntime_providers_tensorrt.so")
_PROVIDER = "libonnxruntime_providers_cuda.so"
# A fat binary: magic, version, bytes of its head and of its entries; each entry begins with its kind, the bytes of
# its own head and of its code; at _ARCHITECTURE lies the architecture. Seen with CUDA 13's cuobjdump.
_MAGIC, _HEAD, _ENTRY = (
    struct.pack("<I", 0xBA55ED50),
    struct.Struct("<IHHQ"),
    struct.Struct("<HHIQ"),
)
_VERSION, _ARCHITECTURE = 1, 28
# Opens graphs as the engine does, on the provider that is found first.
_OPEN = """
import sys
from pathlib import Path
from outrider.engines.onnx.session import open_session
for path in map(Path, sys.argv[1:]):
    open_session(path, device="cuda")
    print("opened", path.name)
"""


def keep_architecture(
    data: bytearray, architecture: int, used: tuple[Sequence[int], int] | None = None
) -> int:
    """Zero the code of every other architecture in a library's fat binaries; return the bytes that were zeroed.

    Args:
        data: of the library.
        architecture: whose code stays.
        used: ranks of the fat binaries whose code stays, and how many there are, as
            ``scripts.gpu.placement --code`` finds them; None for all.

    Raises:
        ValueError: there is no code of that architecture, or not as many fat binaries.
    """
    zeroed = kept = 0
    codes = [*_codes(data)]
    binaries = sorted({binary for binary, *_ in codes})
    if used is not None and used[1] != len(binaries):
        raise ValueError(f"the provider has {len(binaries)} fat binaries, {used[1]} were expected")
    kept_binaries = set(binaries if used is None else (binaries[rank] for rank in used[0]))
    for binary, begin, size, found in codes:
        if found == architecture and binary in kept_binaries:
            kept += size
        else:
            data[begin : begin + size] = bytes(size)
            zeroed += size
    if not kept:
        raise ValueError(f"architecture {architecture}: the provider has no code for it")
    return zeroed


def _codes(data: bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Begin of its fat binary, begin, size and architecture of each piece of code."""
    place = data.find(_MAGIC)
    while place >= 0:
        _, version, head, size = _HEAD.unpack_from(data, place)
        end = place + 4
        if version == _VERSION and head == _HEAD.size and place + head + size <= len(data):
            entry, end = place + head, place + head + size
            while entry + _ARCHITECTURE + 4 <= end:
                _, _, own, code = _ENTRY.unpack_from(data, entry)
                (architecture,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE)
                yield place, entry + own, code, architecture
                entry += own + code
        place = data.find(_MAGIC, end)


def unpack_wheel(
    wheel: Path, site: Path, architecture: int, used: tuple[Sequence[int], int] | None = None
) -> None:
    """Unpack what Python needs of the wheel, with the provider cut; see ``keep_architecture``."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not Path(name).name.startswith(_LEFT_OUT)]
        packed.extractall(site, names)
    (provider,) = site.rglob(_PROVIDER)
    data = bytearray(provider.read_bytes())
    zeroed = keep_architecture(data, architecture, used)
    provider.write_bytes(data)
    typer.echo(f"{_PROVIDER}: {zeroed >> 20} of {len(data) >> 20} MiB are left out")


def write_parts(folder: Path, out: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """Pack a folder into parts of at most so many bytes, with their hashes beside them."""
    out.mkdir()
    parts = []
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:xz", preset=3, dereference=True) as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)
        file.seek(0)
        while piece := file.read(part_bytes):
            parts.append(out / f"{ARCHIVE}.{len(parts):02}")
            parts[-1].write_bytes(piece)
    lines = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return parts


def unpack_parts(out: Path, folder: Path) -> None:
    """Unpack the parts as the machine will."""
    with tempfile.TemporaryFile() as file:
        for part in sorted(out.glob(f"{ARCHIVE}.*")):
            file.write(part.read_bytes())
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:xz") as archive:
            archive.extractall(folder, filter="data")


def is_for_this_python(wheel: Path) -> bool:
    """Return whether a wheel's name says that it is for the Python that runs."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}" in wheel.stem.split("-")


def open_over_stubs(folder: Path) -> str:
    """Open the unpacked bundle's device graphs with the unpacked provider; return what was opened.

    Raises:
        NoEnvironmentError: stubs cannot be had here, or a graph cannot be opened.
    """
    graphs = list(map(str, sorted(folder.glob("bundle/*/device*.onnx"))))
    if not graphs:
        raise NoEnvironmentError(f"the bundle has no {DEVICE_FILE}; export it again")
    make_environment()
    own = os.pathsep.join(map(str, (folder / SITE, ROOT / "build" / "stage", ROOT)))
    command = [sys.executable, "-c", _OPEN, *graphs]
    done = subprocess.run(
        command, env=variables() | {"PYTHONPATH": own}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoEnvironmentError(
            f"the packed provider opens no graph: {done.stderr.strip()[-400:]}"
        )
    return done.stdout


def main(
    bundle: Annotated[Path, typer.Argument(help="Exported directory, with float16 weights.")],
    wheel: Annotated[Path, typer.Argument(help="onnxruntime_gpu-*.whl for that machine.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    wheels: Annotated[Path | None, typer.Option(help="Folder of further wheels to pack.")] = None,
    architecture: Annotated[int, typer.Option(help="Of its GPU, for example 90.")] = 90,
) -> None:
    """Write the parts; the last lines say whether they were opened here."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as made:
        folder = Path(made) / "package"
        unpack_wheel(wheel, folder / SITE, architecture)
        (folder / "bundle").symlink_to(bundle.absolute())
        if wheels is not None:
            (folder / "wheels").symlink_to(wheels.absolute())
        for part in write_parts(folder, out):
            typer.echo(f"{part.name}: {part.stat().st_size >> 20} MiB")
        if not is_for_this_python(wheel):
            typer.echo(f"not opened here: {wheel.name} is for another Python")
            return
        again = Path(made) / "again"
        unpack_parts(out, again)
        try:
            typer.echo(open_over_stubs(again).strip())
        except NoEnvironmentError as error:
            typer.echo(f"not opened over stubs: {error}")
            raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
