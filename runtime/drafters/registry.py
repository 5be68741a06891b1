"""The registry of drafters: one line each, and those that other packages register.

A package registers a class that implements ``outrider.runtime.drafters.base.Drafter`` under the entry-point
group ``outrider.drafters``; the entry point's name is the drafter's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from importlib import metadata

from outrider.runtime.core.drafting import AUTO, without_gone
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.drafters.base import Drafter, DrafterCapabilities, DrafterParts
from outrider.runtime.drafters.compose import Drafters
from outrider.runtime.drafters.guarded import guarded
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.model.tree import TreeDrafter
from outrider.runtime.drafters.none import NoDrafter
from outrider.runtime.drafters.phrases.lookahead import LookaheadDrafter
from outrider.runtime.drafters.phrases.ouroboros import OuroborosDrafter
from outrider.runtime.drafters.phrases.phrases import PhraseDrafter
from outrider.runtime.drafters.text.datastore import DatastoreDrafter
from outrider.runtime.drafters.text.lookup import LookupDrafter
from outrider.runtime.drafters.text.reference import ReferenceDrafter
from outrider.runtime.drafters.text.suffix import SuffixDrafter

__all__ = [
    "DRAFTER_NAMES",
    "ENTRY_POINTS",
    "Drafters",
    "any_proposes_trees",
    "build_drafters",
    "tuned_drafter",
]

ENTRY_POINTS = "outrider.drafters"

REGISTRY: Mapping[str, type[Drafter]] = {
    "model": ModelDrafter,
    "tree": TreeDrafter,
    "lookup": LookupDrafter,
    "reference": ReferenceDrafter,
    "datastore": DatastoreDrafter,
    "suffix": SuffixDrafter,
    "phrases": PhraseDrafter,
    "lookahead": LookaheadDrafter,
    "ouroboros": OuroborosDrafter,
    "none": NoDrafter,
}
DRAFTER_NAMES = tuple(REGISTRY)
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")

logger = logging.getLogger(__name__)


def build_drafters(parts: DrafterParts) -> Drafters:
    """Build every drafter whose needs these parts meet.

    Raises:
        ConfigError: a registered package cannot be loaded, is no drafter, or cannot be built.
    """
    foreign = _registered()
    single: dict[str, Drafter] = {}
    for name, kind in {**REGISTRY, **foreign}.items():
        if all(parts.has(need) for need in _capabilities(name, kind).needs):
            is_foreign = name in foreign
            single[name] = _build(name, kind, parts) if is_foreign else kind.from_parts(parts)
    return Drafters(single, parts)


def any_proposes_trees(names: Collection[str] | None = None) -> bool:
    """Return whether a registered drafter may propose trees, so that the target must verify them.

    With ``names`` those drafters alone are looked at; names of no drafter are passed over.

    Raises:
        ConfigError: as ``build_drafters``.
    """
    kinds = {**REGISTRY, **_registered()}
    asked = kinds.keys() if names is None else kinds.keys() & set(names)
    return any(_capabilities(name, kinds[name]).proposes_trees for name in asked)


def tuned_drafter(name: str) -> str:
    """Return the drafter that a bundle was tuned to, or what replaces it where this release has it no more."""
    current = without_gone(name)
    if current != name:
        logger.warning("the bundle's drafter %s is gone since 0.3: serving with %s", name, current)
    return current


def _build(name: str, kind: type[Drafter], parts: DrafterParts) -> Drafter:
    try:
        return guarded(kind, _capabilities(name, kind).needs, parts)
    except Exception as error:  # a foreign class may raise anything when it is built
        raise ConfigError(f"{ENTRY_POINTS}: {name}", "must be built by from_parts") from error


def _registered() -> dict[str, type[Drafter]]:
    """Drafters of third parties; the project's own names cannot be taken."""
    found: dict[str, type[Drafter]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        key = f"{ENTRY_POINTS}: {entry.name}"
        if not NAME.fullmatch(entry.name) or entry.name in {*REGISTRY, AUTO, *found}:
            raise ConfigError(key, f"must match {NAME.pattern} and be nobody else's name")
        try:
            kind = entry.load()
        except Exception as error:  # a foreign package may raise anything on import
            raise ConfigError(key, "must be importable") from error
        logger.info("drafter %s comes from %s", entry.name, entry.value)
        found[entry.name] = kind
    return found


def _capabilities(name: str, kind: type[Drafter]) -> DrafterCapabilities:
    methods = ("from_parts", "propose", "observe", "forget")
    capabilities: object = getattr(kind, "capabilities", None)
    if not isinstance(capabilities, DrafterCapabilities) or not all(
        hasattr(kind, method) for method in methods
    ):
        raise ConfigError(
            f"{ENTRY_POINTS}: {name}",
            f"must have capabilities (traits before 0.3), {', '.join(methods)}",
        )
    return capabilities
