"""Parts of a bundle that become TensorRT plans, and the graph that each is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outrider.engines.accelerators.device.sources import read_part, read_profile
from outrider.engines.accelerators.device.tree_plans import (
    keep_part,
    keep_profile,
    tree_part,
    tree_profile,
)
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE, SourceEntry
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import KEEP_PATH_FILE, MODEL_FILE, TREE_FILE
from outrider.engines.bundle.plans import Profile, derive_profiles, source_capacity
from outrider.export.accelerators.tensorrt.graph import derive_graph, derive_read_graph
from outrider.export.accelerators.tensorrt.network import cache_updates, source_updates
from outrider.export.accelerators.tensorrt.trees import derive_keep_graph, derive_tree_graph

TARGET, DRAFT = MODELS = ("target", "draft")
TREES = "trees"
PARTS = (*MODELS, TREES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A graph to build a plan from, and what must be found in its parsed network.

    Attributes:
        graph: the file.
        num_attentions: attention layers.
        updates: names of tensors read and written in place.
    """

    graph: Path
    num_attentions: int = 0
    updates: frozenset[tuple[str, str]] = frozenset()


# Of (gamma, opt_batch): the shapes to build for, tuned for that gamma and that number of rows.
Profiles = Callable[[int, int], tuple[Profile, ...]]
# Of (folder, precision, capacity): the graph to parse, written into the folder where it had to be changed.
Derive = Callable[[Path, str, int], Derived]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """One graph of a bundle that plans are built from.

    Attributes:
        name: ``PlanEntry.part``.
        label: how the names of its plans begin.
        profiles: shapes that its plans are built for.
        derive: its graph for TensorRT's parser; raises BundleError where it cannot be derived.
        weights: storage of its weights in the bundle.
        own_capacity: of a cache that is no text's; 0 for that of texts.
    """

    name: str
    label: str
    profiles: Profiles
    derive: Derive
    weights: str
    own_capacity: int = 0


def _model_part(
    bundle: Bundle, model: ModelEntry, part: str, *, has_trees: bool = False
) -> PlanPart:
    """Return the part of a model that extends chains, or that verifies trees."""
    manifest = bundle.manifest
    file, write = (TREE_FILE, derive_tree_graph) if has_trees else (MODEL_FILE, derive_graph)

    def profiles(gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        if has_trees:
            return (tree_profile(manifest, model, opt_batch=opt_batch),)
        return derive_profiles(
            max_batch=manifest.max_batch,
            max_extend=manifest.max_extend,
            max_gamma=manifest.max_gamma,
            gamma=gamma,
            opt_batch=opt_batch,
        )

    def derive(folder: Path, precision: str, capacity: int) -> Derived:
        sources = 0 if model.source is None else source_capacity(model.source.max_source)
        write(
            bundle.model_path(model),
            folder / file,
            capacity=capacity,
            precision=precision,
            source_capacity=sources,
        )
        return Derived(
            graph=folder / file,
            num_attentions=(2 if sources else 1) * model.num_layers,
            updates=cache_updates(model.num_layers),
        )

    return PlanPart(
        name=tree_part(part) if has_trees else part,
        label=f"{part}-{PurePosixPath(file).stem}" if has_trees else part,
        profiles=profiles,
        derive=derive,
        weights=model.weights,
    )


def _read_part(bundle: Bundle, model: ModelEntry, source: SourceEntry, part: str) -> PlanPart:
    """Return the part that reads sources of a model."""

    def profiles(gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        return (read_profile(source, max_batch=bundle.manifest.max_batch, opt_batch=opt_batch),)

    def derive(folder: Path, precision: str, capacity: int) -> Derived:
        graph = folder / ENCODE_FILE
        path = bundle.encode_path(model)
        num_attentions = derive_read_graph(path, graph, capacity=capacity, precision=precision)
        updates = source_updates(model.num_layers)
        return Derived(graph=graph, num_attentions=num_attentions, updates=updates)

    return PlanPart(
        name=read_part(part),
        label=f"{part}-{PurePosixPath(ENCODE_FILE).stem}",
        profiles=profiles,
        derive=derive,
        weights=model.weights,
        own_capacity=source_capacity(source.max_source),
    )


def _keep_part(bundle: Bundle, model: ModelEntry, part: str) -> PlanPart:
    """Return the part that moves a kept path's tokens in the caches of a model, row by row."""

    def profiles(gamma: int, opt_batch: int) -> tuple[Profile, ...]:
        return (keep_profile(model),)

    def derive(folder: Path, precision: str, capacity: int) -> Derived:
        graph, source = folder / KEEP_PATH_FILE, bundle.keep_path_path(model)
        derive_keep_graph(source, graph, capacity=capacity, precision=precision)
        return Derived(graph=graph, updates=cache_updates(model.num_layers))

    return PlanPart(
        name=keep_part(part),
        label=f"{part}-{PurePosixPath(KEEP_PATH_FILE).stem}",
        profiles=profiles,
        derive=derive,
        weights=model.weights,
    )


def plan_parts(bundle: Bundle, wanted: Sequence[str]) -> tuple[PlanPart, ...]:
    """Return the parts of a bundle to build plans of.

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
    chosen = wanted or MODELS
    for part, model in models.items():
        if part in chosen and model.states is not None:
            raise BundleError(f"part {part!r}: {bundle.why_no_device(model, '')}")
    parts = [_model_part(bundle, model, part) for part, model in models.items() if part in chosen]
    parts += [
        _read_part(bundle, model, model.source, part)
        for part, model in models.items()
        if part in chosen and model.source is not None
    ]
    for part, model in with_trees.items() if TREES in chosen else ():
        parts.append(_model_part(bundle, model, part, has_trees=True))
        parts.append(_keep_part(bundle, model, part))
    return tuple(parts)
