"""What add-ons make of an export beside the core's graphs; entry points of the group ``outrider.exporters``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from outrider.engines.addons import NotInstalledError, load_addon

GROUP = "outrider.exporters"


class DeviceGraphs(Protocol):
    """A module that derives the graphs of accelerators from a finished canonical graph."""

    def derive_device_graphs(self, path: Path, precision: str, *, with_trees: bool) -> None:
        """Write them beside the canonical graph at ``path``, with those for trees if wanted.

        ``precision``, of caches and products, is "float32", "float16" or "bfloat16".

        Raises:
            BundleError: the graph has none of that precision.
        """
        ...

    def drop_device_graphs(self, path: Path) -> None:
        """Remove those beside the canonical graph at ``path``, where there are any."""
        ...


def device_graphs() -> DeviceGraphs | None:
    """Return the add-on that derives graphs of accelerators; None where it is not installed."""
    found: DeviceGraphs | None = _installed("device_graphs")
    return found


def plan_builder() -> Any:
    """Return the module that builds TensorRT plans; it has ``BuildOptions`` and ``build_plans``.

    Raises:
        NotInstalledError: there is none.
    """
    return load_addon(GROUP, "tensorrt")


def _installed(name: str) -> Any:
    try:
        return load_addon(GROUP, name)
    except NotInstalledError:
        return None
