"""What of a bundle becomes a TensorRT plan, and the graph that each part is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from outrider.engines.base import BundleError
from outrider.engines.bundle.manifest import (
    KEEP_PATH_FILE,
    MODEL_FILE,
    TREE_FILE,
    Bundle,
    ModelEntry,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from outrider.engines.bundle.plans import Profile, derive_profiles
from outrider.engines.device.sampling.plans import SAMPLER_PRECISION, sampler_parts, sampler_profile
from outrider.engines.device.sampling.tensors import (
    KEPT_ROWS,
    NEW_KEPT_ROWS,
    SAMPLER_FOLDER,
    keeps_rows,
)
from outrider.engines.device.tree_plans import keep_part, keep_profile, tree_part, tree_profile
from outrider.engines.kv_cache import cache_names
from outrider.export.tensorrt.graph import derive_graph
from outrider.export.tensorrt.trees import derive_keep_graph, derive_tree_graph

TARGET, DRAFT = MODELS = ("target", "draft")
TREES = "trees"
PARTS = (*MODELS, SAMPLER_FOLDER, TREES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A graph to build a plan from, and what must be found in its parsed network.

    Attributes:
        graph: the file.
        num_attentions: attention layers, each with two caches updated in place.
        updates: names of further tensors read and written in place.
    """

    graph: Path
    num_attentions: int = 0
    updates: frozenset[tuple[str, str]] = frozenset()


class PlanPart(Protocol):
    """One part of a bundle."""

    @property
    def name(self) -> str:
        """``PlanEntry.part``."""
        ...

    @property
    def has_cache(self) -> bool:
        """Whether there is a plan per capacity of the cache."""
        ...

    @property
    def weights(self) -> str:
        """Storage of its weights in the bundle; empty where it has none."""
        ...

    def precision(self, asked: str) -> str:
        """Precision of its plans where one is asked for."""
        ...

    def stem(self, precision: str, capacity: int) -> str:
        """How its plans are called."""
        ...

    def profiles(self, *, gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        """Shapes that its plans are built for, tuned for a gamma and a number of rows."""
        ...

    def derive(self, folder: Path, *, precision: str, capacity: int) -> Derived:
        """Its graph, written into a folder where it has to be changed.

        Raises:
            BundleError: it cannot be.
        """
        ...


class _CachedPart:
    """A part that runs over the caches of a model."""

    has_cache = True
    file = MODEL_FILE

    def __init__(self, bundle: Bundle, model: ModelEntry, part: str) -> None:
        self.name = part
        self._bundle, self._model, self._part = bundle, model, part

    @property
    def weights(self) -> str:
        """Storage of the model's weights."""
        return self._model.weights

    def precision(self, asked: str) -> str:
        """As asked."""
        return asked

    def stem(self, precision: str, capacity: int) -> str:
        """Model, what is done with it, precision and capacity."""
        kind = "" if self.file == MODEL_FILE else f"-{PurePosixPath(self.file).stem}"
        return f"{self._part}{kind}-{precision}-{capacity}"


class ModelPart(_CachedPart):
    """A model: chains of tokens in, logits out."""

    def profiles(self, *, gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        """Steps, verification and prefill."""
        manifest = self._bundle.manifest
        return derive_profiles(
            max_batch=manifest.max_batch,
            max_extend=manifest.max_extend,
            max_gamma=manifest.max_gamma,
            gamma=gamma,
            opt_batch=opt_batch,
        )

    def derive(self, folder: Path, *, precision: str, capacity: int) -> Derived:
        """The canonical graph, rewritten."""
        graph, source = folder / self.file, self._bundle.model_path(self._model)
        derive_graph(source, graph, capacity=capacity, precision=precision)
        return Derived(graph=graph, num_attentions=self._model.num_layers)


class TreePart(_CachedPart):
    """The same model for trees of tokens."""

    file = TREE_FILE

    def __init__(self, bundle: Bundle, model: ModelEntry, part: str) -> None:
        super().__init__(bundle, model, part)
        self.name = tree_part(part)

    def profiles(self, *, gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        """Trees; how large they are, no gamma says."""
        return (tree_profile(self._bundle.manifest, self._model, opt_batch=opt_batch),)

    def derive(self, folder: Path, *, precision: str, capacity: int) -> Derived:
        """The canonical graph with the inputs of trees, rewritten."""
        graph, source = folder / self.file, self._bundle.model_path(self._model)
        derive_tree_graph(source, graph, capacity=capacity, precision=precision)
        return Derived(graph=graph, num_attentions=self._model.num_layers)


class KeepPart(_CachedPart):
    """The move of a kept path's tokens in the caches of a model."""

    file = KEEP_PATH_FILE

    def __init__(self, bundle: Bundle, model: ModelEntry, part: str) -> None:
        super().__init__(bundle, model, part)
        self.name = keep_part(part)

    def profiles(self, *, gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        """Paths of one row."""
        return (keep_profile(self._model),)

    def derive(self, folder: Path, *, precision: str, capacity: int) -> Derived:
        """The bundle's graph over caches of one capacity and type."""
        graph, source = folder / self.file, self._bundle.keep_path_path(self._model)
        derive_keep_graph(source, graph, capacity=capacity, precision=precision)
        layers = self._model.num_layers
        names = (
            cache_names(layers, key_name, value_name),
            cache_names(layers, new_key_name, new_value_name),
        )
        return Derived(graph=graph, updates=frozenset(zip(*names, strict=True)))


class SamplerPart:
    """A graph of the sampler."""

    has_cache = False
    weights = ""

    def __init__(self, bundle: Bundle, file: str) -> None:
        self.name = file
        self._bundle = bundle

    def precision(self, asked: str) -> str:
        """Samplers have one."""
        return SAMPLER_PRECISION

    def stem(self, precision: str, capacity: int) -> str:
        """Name of the graph."""
        return PurePosixPath(self.name).stem

    def profiles(self, *, gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        """Positions of a step."""
        return (sampler_profile(self._bundle.manifest, gamma=gamma, opt_batch=opt_batch),)

    def derive(self, folder: Path, *, precision: str, capacity: int) -> Derived:
        """The bundle's graph as it is."""
        updates = frozenset({(KEPT_ROWS, NEW_KEPT_ROWS)} if keeps_rows(self.name) else ())
        return Derived(graph=self._bundle.root / SAMPLER_FOLDER / self.name, updates=updates)


def plan_parts(bundle: Bundle, wanted: Sequence[str]) -> tuple[PlanPart, ...]:
    """Parts of a bundle to build plans of.

    Args:
        bundle: verified.
        wanted: of ``PARTS``; empty for all that the bundle has but trees.

    Raises:
        BundleError: there is no such part, or the bundle lacks it.
    """
    manifest = bundle.manifest
    for part in wanted:
        if part not in PARTS:
            raise BundleError(f"part {part!r}: must be one of {', '.join(PARTS)}")
    models = {TARGET: manifest.target}
    if manifest.draft is not None:
        models[DRAFT] = manifest.draft
    elif DRAFT in wanted:
        raise BundleError(f"part {DRAFT!r}: the bundle has no draft model")
    with_trees = {part: model for part, model in models.items() if model.max_tree_nodes}
    if TREES in wanted and not with_trees:
        raise BundleError(f"part {TREES!r}: no model of the bundle takes trees; export it again")
    chosen = wanted or (*MODELS, SAMPLER_FOLDER)
    parts: list[PlanPart] = [
        ModelPart(bundle, model, part) for part, model in models.items() if part in chosen
    ]
    if SAMPLER_FOLDER in chosen:
        parts += [SamplerPart(bundle, file) for file in sampler_parts(manifest)]
    for part, model in with_trees.items() if TREES in chosen else ():
        parts += [TreePart(bundle, model, part), KeepPart(bundle, model, part)]
    return tuple(parts)
