"""What serves a device that is not the CPU alone: an add-on's backend, found by the device's kind.

A backend is a class without arguments, registered as an entry point of the group ``outrider.engines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outrider.engines.addons import load_addon
from outrider.engines.base import Engine
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.pair import Pair

GROUP = "outrider.engines"
Which = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How engines are opened; a backend ignores what it has no use for.

    Attributes:
        num_threads: of the pool that all engines of the process share; 0: as many as there are physical cores.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the graphs that verify trees too, where bundle and backend have them.
        provider_options: of ONNX Runtime's CUDA provider, as it documents them.
    """

    num_threads: int = 0
    max_batch: int | None = None
    with_trees: bool = False
    provider_options: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Engines and samplers on devices of one kind. ``index`` is the device's number among its kind."""

    def why_not(self, bundle: Bundle, index: int) -> str:
        """Say why a device cannot serve a bundle; empty where it can."""
        ...

    def why_no_sampler(self, bundle: Bundle, index: int) -> str:
        """Say why a bundle's rounds cannot be sampled on a device; empty where they can."""
        ...

    def open_engine(
        self, bundle: Bundle, entry: ModelEntry, which: Which, index: int, options: EngineOptions
    ) -> Engine:
        """Return one model of a bundle, ready to extend.

        Raises:
            BundleError: a graph or a plan does not fit the manifest.
            EngineError: the library cannot load it.
        """
        ...

    def open_pair(self, bundle: Bundle, index: int, options: EngineOptions, *, reason: str) -> Pair:
        """Return target, draft and sampler over one device; ``reason`` says why the rounds are sampled there.

        Raises:
            BundleError: a graph or a plan does not fit the manifest.
            EngineError: the library cannot load it.
        """
        ...


def load_backend(kind: str) -> Backend:
    """Return the backend of a kind of devices.

    Raises:
        NotInstalledError: there is none.
    """
    backend: Backend = load_addon(GROUP, kind)()
    return backend
