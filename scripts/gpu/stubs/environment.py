"""Makes the environment in which ONNX Runtime's real CUDA provider opens graphs without a GPU.

It lies in build/cuda: the onnxruntime-gpu wheel of the version that requirements.txt pins for the CPU, and the
stub libraries compiled from the C files beside this one. Both are kept between calls. A process of the environment
is this Python with both before everything else.

    python -m scripts.gpu.stubs.environment    # makes it; says in one line why it cannot be made
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "cuda"
_SOURCES = Path(__file__).parent
_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
# The names that the provider and ONNX Runtime look for; all lead to one file.
_NAMES = (
    "libcuda.so.1",
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcurand.so.10",
    "libcudnn.so",
    "libcudnn.so.9",
)
_STUBS = "libstubs.so"
_CUDA_NAME = re.compile(r"(?:__cuda|cuda|cublas|curand|cu)[A-Z]\w*")
_CUDNN_NAME = re.compile(rb"\0(cudnn[A-Z]\w*)(?=\0)")
_DOWNLOAD_SECONDS = 600


class NoEnvironmentError(Exception):
    """The environment cannot be made here; the message says why, in one line."""


def make_environment() -> None:
    """Make what is missing of the environment.

    Raises:
        NoEnvironmentError: there is no C compiler, or the wheel cannot be had.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("nm") is None:
        raise NoEnvironmentError("no C compiler (cc and nm) to build the stub CUDA libraries with")
    version = _pinned_version()
    site = FOLDER / f"onnxruntime-gpu-{version}"
    if not (site / _PROVIDER).is_file():
        _install(version, site)
    _link("site", site)
    hashed = sha256()
    for file in (
        Path(__file__),
        *sorted(_SOURCES.glob("*.[ch]")),
        site / "onnxruntime" / "__init__.py",
    ):
        hashed.update(file.read_bytes())
    libraries = FOLDER / f"stubs-{hashed.hexdigest()[:16]}"
    if not libraries.is_dir():
        _compile(compiler, site / _PROVIDER, libraries)
    _link("lib", libraries)


def variables() -> dict[str, str]:
    """Return the variables of a process in the environment, instead of this process's own."""
    paths = [FOLDER / "site", ROOT / "build" / "stage", ROOT]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": str(FOLDER / "lib"),
    }


def _pinned_version() -> str:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    found = re.search(r"^onnxruntime==(\S+)", text, re.MULTILINE)
    assert found is not None, "requirements.txt pins no onnxruntime"
    return found[1]


def _install(version: str, site: Path) -> None:
    """Install the wheel alone: its libraries are the stubs, the rest is this Python's."""
    partial = site.with_name(f"{site.name}.partial-{os.getpid()}")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    options = ("--no-deps", "--retries", "1", "--only-binary", ":all:", "--target", str(partial))
    try:
        done = subprocess.run(
            [*command, *options, f"onnxruntime-gpu=={version}"],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            raise NoEnvironmentError(f"no wheel onnxruntime-gpu=={version}: {' '.join(reason)}")
        _put(partial, site, _PROVIDER)
    except subprocess.TimeoutExpired:
        raise NoEnvironmentError(
            f"no wheel onnxruntime-gpu=={version}: pip took over {_DOWNLOAD_SECONDS} s"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _compile(compiler: str, provider: Path, libraries: Path) -> None:
    """Compile the stubs, with an answer of 0 to every call of the provider that has none of its own."""
    partial = libraries.with_name(f"{libraries.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    rest = partial / "rest.c"
    lines = [
        f'__attribute__((weak)) int {name}(void) {{ stub_note("default {name}"); return 0; }}\n'
        for name in sorted(_called(provider))
    ]
    rest.write_text('#include "events.h"\n' + "".join(lines), encoding="utf-8")
    sources = [str(file) for file in (*sorted(_SOURCES.glob("*.c")), rest)]
    flags = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", f"-I{_SOURCES}")
    done = subprocess.run(
        [compiler, *flags, "-o", str(partial / _STUBS), *sources], capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(partial)
        raise NoEnvironmentError(
            f"{compiler} does not build the stubs: {done.stderr.strip()[:400]}"
        )
    for name in _NAMES:
        (partial / name).symlink_to(_STUBS)
    _put(partial, libraries, _STUBS)


def _put(made: Path, place: Path, file: str) -> None:
    """Rename a folder that was made to its place, unless another process was first and its ``file`` is there."""
    try:
        made.replace(place)
    except OSError:
        if not (place / file).is_file():
            raise
        shutil.rmtree(made)


def _called(provider: Path) -> set[str]:
    """Return the names of CUDA's libraries that the provider links to or looks up."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(provider)], capture_output=True, text=True, check=True
    )
    words = (line.split()[-1].split("@")[0] for line in listed.stdout.splitlines())
    linked = {word for word in words if _CUDA_NAME.fullmatch(word)}
    return linked | {name.decode() for name in _CUDNN_NAME.findall(provider.read_bytes())}


def _link(name: str, target: Path) -> None:
    link = FOLDER / name
    if link.is_symlink() and link.readlink() == Path(target.name):
        return
    new = FOLDER / f"{name}.{os.getpid()}"
    new.symlink_to(target.name)
    new.replace(link)


def main() -> int:
    """Make the environment and print where it lies."""
    try:
        make_environment()
    except NoEnvironmentError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    print(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
