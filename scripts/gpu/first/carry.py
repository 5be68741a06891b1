"""What the three commands of the first half hour carry to a machine that has PyTorch and no network.

    python -m scripts.gpu.first.carry .first                                     # for the first command
    python -m scripts.gpu.first.carry .first --wheel onnxruntime_gpu-*.whl BUNDLE ...   # for all three

The folder gets the digests of the sampler's kernels on a CPU, the wheels that a machine with PyTorch lacks, and, where
onnxruntime-gpu's wheel for its Python is at hand, the CUDA provider cut to the code that graphs like the bundles' use:
which code that is, is found by running their graphs over stub libraries. It has to fit beside the project's own files,
which travel too. The commands to give are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from scripts.gpu import kernels
from scripts.gpu.package import SITE, unpack_wheel
from scripts.tools.results import ROOT

MOST_BYTES = 60_000_000
ARCHIVE = "site.tar.xz"
# Of what the commands import, what an image with PyTorch, Transformers and pytest lacks.
PACKAGES = (
    "msgspec", "grpcio-status", "grpcio-health-checking", "grpcio-reflection", "googleapis-common-protos", "optimum",
)  # fmt: skip
_PYTHON = "3.12"
_TAGS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")  # fmt: skip
_COMMAND = (
    "mkdir -p /tmp/first/site && tar -C /tmp/first -xJf {folder}/site.tar.xz; "
    "python3 -m pip install -q --no-index --no-deps --target /tmp/first/site --upgrade {folder}/wheels/*.whl; "
    "bash scripts/stage; PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=LAZY PYTHONPATH=/tmp/first/site:build/stage:. "
    "python3 -m scripts.gpu.first.run {number} --out $OUT --carried {folder} 2>&1 | tee $OUT/first-{number}.log"
)


def download(folder: Path) -> None:
    """Fetch the wheels that the machine lacks, for its Python."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--implementation", "cp", "-d", str(folder)]
    for tag in _TAGS:
        command += ["--platform", tag]
    subprocess.run([*command, *PACKAGES], check=True)


def used_code(bundles: list[Path]) -> tuple[list[int], int]:
    """Return which of the provider's code graphs like the bundles' use; see ``scripts.gpu.placement --code``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "used.json"
        command = [sys.executable, "-m", "scripts.gpu.placement", *map(str, bundles)]
        subprocess.run(
            [*command, "--code", str(file)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        ranks, total = json.loads(file.read_text(encoding="utf-8"))
    return ranks, total


def pack_provider(wheel: Path, bundles: list[Path], out: Path, architecture: int) -> None:
    """Pack what Python needs of onnxruntime-gpu's wheel, with the code that is used."""
    with tempfile.TemporaryDirectory(dir=out.parent) as made:
        site = Path(made) / SITE
        unpack_wheel(wheel, site, architecture, used_code(bundles))
        with tarfile.open(out, mode="w:xz", preset=9) as archive:
            archive.add(site, SITE)


def tree_bytes() -> int:
    """Bytes of the files of the project that travel: those that git knows, and has, and those it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in set(listed.split("\0")) if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the bytes of the project's files and of what is carried, by name."""
    carried = {
        path.name: sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        for path in sorted(folder.iterdir())
    }
    return {"the project": tree_bytes()} | carried


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to make, below the project's root.")],
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(help="Bundles in 16 bits whose graphs say which code is used."),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="onnxruntime_gpu-*.whl for the machine's Python.")
    ] = None,
    architecture: Annotated[int, typer.Option(help="Of its GPU, for example 90.")] = 90,
    few: Annotated[bool, typer.Option(help="Few digests, for a trial.")] = False,
) -> None:
    """Write the folder and print the commands; the exit code says whether all of it may travel."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels.write(folder / "kernels.json", few)
    if not (folder / "wheels").is_dir():
        download(folder / "wheels")
    if wheel is not None:
        if not bundles:
            raise typer.BadParameter("--wheel wants bundles, whose graphs say which code is used")
        pack_provider(wheel, bundles, folder / ARCHIVE, architecture)
    sizes = sizes_of(folder)
    for name, size in sizes.items():
        typer.echo(f"{size / 1e6:6.1f} MB  {name}")
    for number in (1, 2, 3) if (folder / ARCHIVE).exists() else (1,):
        typer.echo(f"\ncommand {number}: {_COMMAND.format(folder=folder, number=number)}")
    if sum(sizes.values()) > MOST_BYTES:
        typer.echo(f"more than {MOST_BYTES / 1e6:.0f} MB in all", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
