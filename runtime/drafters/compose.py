"""The drafters of one server by name, single ones and those composed of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from outrider.runtime.core.drafting import parse_drafter
from outrider.runtime.core.errors import RequestError
from outrider.runtime.drafters.base import (
    Drafter,
    DrafterCapabilities,
    DrafterParts,
    Guesser,
    Need,
    Outcome,
    Proposer,
)
from outrider.runtime.drafters.fallback import FallbackDrafter
from outrider.runtime.drafters.model.cascade import CascadeDrafter

MAX_COMPOSED = 256
"""Composites kept; callers may spell many thousands."""
NONE = "none"
"""The drafter that proposes nothing."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Drafters(Mapping[str, Proposer]):
    """Proposers by name; composed ones are made when first asked for.

    ``model/lookup`` and ``lookup+model`` share the single drafters' state, so a request may change
    between them. Each single drafter is given outcomes and ends once.
    """

    def __init__(self, single: Mapping[str, Drafter], parts: DrafterParts) -> None:
        self._single = dict(single)
        self._parts = parts
        self._composed: dict[str, Proposer] = {}
        self._members: dict[str, tuple[Drafter, ...]] = {}
        self._capabilities: dict[str, DrafterCapabilities] = {}

    def __getitem__(self, name: str) -> Proposer:
        """Return the proposer of a name.

        Raises:
            KeyError: there is none.
        """
        found = self._single.get(name) or self._composed.get(name)
        if found is None:
            found = self._compose(name)
            _keep(self._composed, name, found)
        return found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of single drafters."""
        return iter(self._single)

    def __len__(self) -> int:
        """Return the number of single drafters."""
        return len(self._single)

    @property
    def guessers(self) -> tuple[str, ...]:
        """Return the names that may stand behind "model/"."""
        return tuple(name for name, one in self._single.items() if one.capabilities.is_guesser)

    def members(self, name: str) -> tuple[Drafter, ...]:
        """Return the single drafters a name is composed of, each once."""
        found = self._members.get(name)
        if found is None:
            names = [n for part in parse_drafter(name) for n in (part.inner, part.name) if n]
            found = tuple(self._single[n] for n in dict.fromkeys(names))
            _keep(self._members, name, found)
        return found

    def capabilities(self, name: str) -> DrafterCapabilities:
        """Return the capabilities of a name's members together."""
        found = self._capabilities.get(name)
        if found is None:
            each = [member.capabilities for member in self.members(name)]
            found = each[0] if len(each) == 1 else _together(each)
            _keep(self._capabilities, name, found)
        return found

    def uses_model(self, name: str) -> bool:
        """Return whether proposing under a name may call the draft model."""
        return Need.DRAFT_MODEL in self.capabilities(name).needs

    def usable(self, name: str) -> str | None:
        """Return the canonical name of the parts that this server has, in their order; None if it has none.

        Names of drafters that always propose the same have one canonical name. It leaves out caps that no draft
        reaches, and "none" beside other parts.
        """
        try:
            parts = [part for part in parse_drafter(name) if part.uncapped in self]
        except RequestError:
            return None
        most = self._parts.max_gamma
        proposing = [
            part.uncapped if part.most is None or part.most >= most else str(part)
            for part in parts
            if part.name != NONE
        ]
        return "+".join(proposing) or (NONE if parts else None)

    def asked(self, name: str) -> tuple[str, ...]:
        """Return the parts of a name that its last ``propose`` asked, without caps; the last may have failed."""
        found = self[name]
        if isinstance(found, FallbackDrafter):
            return _uncapped(name)[: found.num_asked]
        return (name,)

    def without(self, name: str, parts: Collection[str]) -> str | None:
        """Return a chain of fallbacks without some of its parts, named without caps; None if none are left."""
        left = [str(part) for part in parse_drafter(name) if part.uncapped not in parts]
        return "+".join(left) or None

    def without_model(self, name: str) -> str | None:
        """Return a chain of fallbacks without parts that need the draft model; None if none are left."""
        left = [
            str(part)
            for part in parse_drafter(name)
            if Need.DRAFT_MODEL not in self._single[part.name].capabilities.needs
        ]
        return "+".join(left) or None

    def observe(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Give the members of a name the outcomes of its drafts."""
        for member in self.members(name):
            if member.capabilities.wants_outcomes:
                member.observe(outcomes)

    def forget(self, key: str) -> None:
        """Drop all that drafters keep of a request that has ended."""
        for drafter in self._single.values():
            try:
                drafter.forget(key)
            except BaseException as raised:  # the request ends all the same
                as_error(raised)
                logger.exception("a drafter failed to forget a request")

    def _compose(self, name: str) -> Proposer:
        try:
            parts = parse_drafter(name)
        except RequestError as error:
            raise KeyError(name) from error
        part = parts[0]
        if len(parts) > 1 or part.most is not None:
            members = [(self[part.uncapped], part.most) for part in parts]
            return FallbackDrafter(members, share=self._parts.config.fallback_share)
        guesser = self._single.get(part.inner or "")
        if part.name != "model" or self._parts.draft is None or not isinstance(guesser, Guesser):
            raise KeyError(name)
        return CascadeDrafter(self._parts, guesser)


@lru_cache(maxsize=MAX_COMPOSED)
def _uncapped(name: str) -> tuple[str, ...]:
    return tuple(part.uncapped for part in parse_drafter(name))


def _together(each: Sequence[DrafterCapabilities]) -> DrafterCapabilities:
    return DrafterCapabilities(
        needs=frozenset[Need]().union(*(one.needs for one in each)),
        proposes_trees=any(one.proposes_trees for one in each),
        is_sampled=any(one.is_sampled for one in each),
        num_choices=max(one.num_choices for one in each),
        wants_outcomes=any(one.wants_outcomes for one in each),
    )


def _keep(kept: dict[str, T], name: str, thing: T) -> None:
    """Keep what can be made again; two threads may do so at once."""
    if len(kept) >= MAX_COMPOSED:
        kept.clear()
    kept[name] = thing


def as_error(raised: BaseException) -> Exception:
    """Return what somebody's code raised as an error that ends no thread, SystemExit among them.

    Raises:
        KeyboardInterrupt: it was one, so the user asked for the end.
    """
    if isinstance(raised, KeyboardInterrupt):
        raise raised
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{type(raised).__name__} was raised, which would have ended the thread")
    error.__cause__ = raised
    return error
