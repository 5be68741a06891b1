"""What exporting a model again would bring to a bundle that an older release made."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.names import DEVICE_FILE, GROUPED_FILE

_HALVES = ("float16", "bfloat16")
SERVER = "outrider-server"
"""The distribution whose version a manifest names from 0.3.0 on, among its ``versions``."""


def _has_blocks(manifest: Manifest) -> bool:
    models = (manifest.target, manifest.draft)
    return any(one is not None and one.weights in ("int8", "int4") for one in models)


def _has_device_graphs(manifest: Manifest) -> bool:
    target = manifest.target
    is_narrow = target.device_precision in _HALVES and manifest.text2text is None
    return is_narrow and f"{target.path}/{DEVICE_FILE}" in manifest.files


def _packs_rows(manifest: Manifest) -> bool:
    return f"{manifest.target.path}/{GROUPED_FILE}" in manifest.files


# By the release that brought it: the bundles that gain, and what.
_GAINS: tuple[tuple[tuple[int, ...], Callable[[Manifest], bool], str], ...] = (
    (
        (0, 3),
        _has_blocks,
        "a smaller bundle, nearer to its model: blocks are rounded by what a layer answers",
    ),
    (
        (0, 3),
        lambda manifest: _has_blocks(manifest) and _packs_rows(manifest),
        "a start on the CPU in three quarters of the time: blocks lie as ONNX Runtime takes them",
    ),
    (
        (0, 3),
        _packs_rows,
        "long prompts read faster on the CPU, where heads of queries share those of the cache",
    ),
    ((0, 3), _has_device_graphs, "half of the launches on CUDA"),
)


def gains_of_export(manifest: Manifest) -> tuple[str, ...]:
    """Return what the bundle lacks that this release's export gives, in words; empty where that is nothing."""
    named = manifest.versions.get(SERVER, "0")
    made_by = tuple(int(part) for part in named.split(".") if part.isdecimal())
    return tuple(gain for since, gains, gain in _GAINS if made_by < since and gains(manifest))
