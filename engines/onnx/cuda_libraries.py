"""Says why ONNX Runtime's CUDA provider cannot start, having loaded the libraries it needs.

ONNX Runtime lists the provider wherever it was built with it. Where a library is missing it serves from the CPU
instead and says so only in its log; cuDNN it looks for when the first graph needs it, in the middle of a request.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import onnxruntime

# Both hold the package "onnxruntime"; pip writes one over the other.
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
# Before pull request 28958 of onnxruntime (June 2026) attention with lengths per row is masked from the wrong end.
_OLDEST = (1, 31)
# In the order in which they are loaded: the second takes names from the first.
_PROVIDER_FILES = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")
_CUDNN, _DRIVER = "libcudnn.so.9", "libcuda.so"


def why_two_packages() -> str:
    """Say that two distributions share the package that was imported; empty where it has one."""
    package = Path(onnxruntime.__file__).parent.resolve()
    owners = [name for name in _DISTRIBUTIONS if _folder_of(name) == package]
    if len(owners) < len(_DISTRIBUTIONS):
        return ""
    return (
        f"{' and '.join(owners)} are both installed, one over the other; "
        "uninstall both, then install outrider-server with [cpu] or [cuda], not with both"
    )


@cache
def why_not_loadable() -> str:
    """Load what the CUDA provider needs; say why it cannot run, in its loader's words, or nothing."""
    version = onnxruntime.__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        return f"onnxruntime-gpu {version} attends wrongly on CUDA; {wanted} or newer is needed"
    return _load(Path(onnxruntime.__file__).parent / "capi")


def _load(folder: Path) -> str:
    # It prints what it does not find, and loads what it does.
    with contextlib.redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls()
    host, provider = (folder / name for name in _PROVIDER_FILES)
    if not provider.is_file():
        return ""  # another system's names: the provider itself will say
    try:
        ctypes.CDLL(str(host), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(provider))
        ctypes.CDLL(_CUDNN)
    except OSError as error:
        is_driver = _DRIVER in str(error)
        remedy = "NVIDIA's driver" if is_driver else "outrider-server[cuda], which brings it"
        return f"{error}; install {remedy}"
    return ""


def _folder_of(name: str) -> Path | None:
    try:
        return Path(str(distribution(name).locate_file("onnxruntime"))).resolve()
    except PackageNotFoundError:
        return None
