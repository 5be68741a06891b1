"""The registry of drafters: one line each, and those that other packages register.

A package registers a class that implements ``outrider.runtime.drafters.base.Drafter`` under the entry-point
group ``outrider.drafters``; the entry point's name is the drafter's.

Such a drafter reports how many tokens of a row are in the draft model's cache. A wrong number would make the model read
text that is not there, or refuse the next call for all rows. So one that needs the model gets an engine that counts,
and others get none. A reported number is cut to the tokens that the slot holds. A drafter that changes rows it was not
asked for is switched off.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from operator import index
from typing import Self

from outrider.engines.base import Engine, EngineError, EngineLimits, FloatArray, Source, Span
from outrider.engines.spans import WithoutCopies, num_valid
from outrider.runtime.core.drafting import AUTO, without_gone
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.drafters.base import (
    Draft,
    Drafter,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Guesser,
    Need,
    Outcome,
)
from outrider.runtime.drafters.compose import Drafters
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.model.tree import TreeDrafter
from outrider.runtime.drafters.none import NoDrafter
from outrider.runtime.drafters.phrases.lookahead import LookaheadDrafter
from outrider.runtime.drafters.phrases.ouroboros import OuroborosDrafter
from outrider.runtime.drafters.phrases.phrases import PhraseDrafter
from outrider.runtime.drafters.text.datastore import DatastoreDrafter
from outrider.runtime.drafters.text.lookup import LookupDrafter
from outrider.runtime.drafters.text.ngrams import BigramDrafter, UnigramDrafter
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
    "unigram": UnigramDrafter,
    "bigram": BigramDrafter,
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
    """Build a drafter of another package, with the draft model if it needs it."""
    needs = _capabilities(name, kind).needs
    uses_model = Need.DRAFT_MODEL in needs or Need.DRAFT_TREES in needs
    engine = CountingEngine(parts.draft) if parts.draft is not None and uses_model else None
    try:
        inner = kind.from_parts(replace(parts, draft=engine))
        guard = GuardedGuesser if isinstance(inner, Guesser) else GuardedDrafter
    except Exception as error:  # a foreign class may raise anything when it is built
        raise ConfigError(f"{ENTRY_POINTS}: {name}", "must be built by from_parts") from error
    return guard(inner, {} if engine is None else engine.held)


@cache
def _installed(path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    """Return what packages on the path of imports register: a dozen files are read to know."""
    return tuple(metadata.entry_points(group=ENTRY_POINTS))


def _registered() -> dict[str, type[Drafter]]:
    """Drafters of third parties; the project's own names cannot be taken."""
    found: dict[str, type[Drafter]] = {}
    for entry in _installed(tuple(sys.path)):
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


class CountingEngine(WithoutCopies):
    """An engine that counts the tokens its slots hold after its calls. Only the worker moves, trims and frees slots.

    Attributes:
        held: by slot that was extended, its valid tokens; -1 where a source was read and no text since.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._starts: dict[int, int] = {}
        self.held: dict[int, int] = {}

    @property
    def limits(self) -> EngineLimits:
        """Return the capacities of the engine."""
        return self._engine.limits

    @property
    def is_row_invariant(self) -> bool:
        """Return whether the engine's rows are invariant."""
        return self._engine.is_row_invariant

    @property
    def packs_rows(self) -> bool:
        """Return whether the engine packs rows."""
        return self._engine.packs_rows

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Extend slots; where the engine fails, nothing is taken to be valid in them."""
        self.held.update((span.slot, 0) for span in spans)
        logits = self._engine.extend(spans)
        self._starts.update((span.slot, span.start) for span in spans)
        self.held.update((span.slot, num_valid(span)) for span in spans)
        return logits

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources; the slots' texts are empty, also where the engine fails."""
        # Less than the 0 of a row whose own source was read: it may be another one now.
        self.held.update((source.slot, -1) for source in sources)
        self._engine.read(sources)

    def first_start(self, slot: int) -> int:
        """Return the least start but 0 that a slot takes; see ``Engine.first_start``."""
        return self._engine.first_start(slot)

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Refuse: only the worker may."""
        raise EngineError("drafters share no sources")

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path; where the engine fails, nothing is taken to be valid in the slot."""
        self.held[slot] = 0
        self._engine.keep_path(slot, path)
        self.held[slot] = self._starts.get(slot, 0) + len(path)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Refuse: only the worker may."""
        raise EngineError("drafters move no slots")

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Refuse: only the worker may."""
        raise EngineError("drafters trim no caches")

    def close(self) -> None:
        """Refuse: only the worker may."""
        raise EngineError("drafters close no engines")


class GuardedDrafter:
    """A drafter whose reports are cut to what the only engine it was given counted in ``held``, by slot."""

    def __init__(self, inner: Drafter, held: dict[int, int]) -> None:
        self._inner = inner
        self._held = held

    @property
    def capabilities(self) -> DrafterCapabilities:
        """Return the inner drafter's."""
        return self._inner.capabilities

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Refuse: it is made of another one."""
        raise TypeError("a guarded drafter is made of another one")

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Return the inner drafter's drafts, checked.

        Raises:
            EngineError: the draft model failed, or rows it was not asked for lost what they had in it.
            TypeError: a token or a node is no integer.
        """
        held = self._held
        held.clear()
        drafts = self._inner.propose(live, chosen)
        for slot, row in enumerate(live):
            if slot not in chosen and held.get(slot, row.num_computed) < row.num_computed:
                raise EngineError(f"slot {slot}: a drafter that was not asked for it changed it")
        return [
            held_to(_in_ints(draft), live[slot], held, slot)
            for slot, draft in zip(chosen, drafts, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Call the inner drafter."""
        self._inner.observe(outcomes)

    def forget(self, key: str) -> None:
        """Call the inner drafter."""
        self._inner.forget(key)


class GuardedGuesser(GuardedDrafter):
    """A guarded drafter that is a ``Guesser`` too."""

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Call the inner drafter."""
        assert isinstance(self._inner, Guesser)
        return tuple(map(index, self._inner.guess(row, drafted, length)))


def _in_ints(draft: Draft) -> Draft:
    """Return the draft with tokens and nodes as Python's integers; numpy's are converted."""
    parents = draft.parents
    return replace(
        draft,
        tokens=tuple(map(index, draft.tokens)),
        parents=None if parents is None else tuple(map(index, parents)),
    )


def held_to(draft: Draft, row: DraftRow, held: Mapping[int, int], slot: int) -> Draft:
    """Cut a draft's report of the draft model's cache to what there is, and to slots that were touched.

    ``held`` has the valid tokens of each slot that was touched.
    """
    if slot not in held:
        return draft if draft.num_computed is None else replace(draft, num_computed=None)
    claimed = row.num_computed if draft.num_computed is None else draft.num_computed
    if claimed < 0:  # the source is still unread
        return replace(draft, num_computed=None)
    return replace(draft, num_computed=max(0, min(claimed, held[slot])))
