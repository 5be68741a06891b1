"""The drafters of one server by name, single ones and those composed of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from outrider.runtime.core.drafting import MAX_PHRASE, Part, parse_drafter
from outrider.runtime.core.errors import RequestError
from outrider.runtime.drafters.base import (
    Draft,
    Drafter,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Guesser,
    Need,
    Outcome,
    Proposer,
)
from outrider.runtime.drafters.model.cascade import CascadeDrafter

MAX_COMPOSED = 256
"""Composites kept; callers may spell many thousands."""
NONE = "none"
"""The drafter that proposes nothing."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FallbackDrafter:
    """Proposes the first draft that is expected to keep enough tokens, else the last one that is not empty.

    Args:
        parts: in the order they are asked, each with the tokens that it proposes at most, None for gamma. Their owner
            gives them outcomes and ends.
        share: a draft whose drafter says how many of its tokens it expects to be kept is taken at once if these are at
            least this share of the tokens that the next part may propose.

    Attributes:
        num_asked: parts that the last ``propose`` asked; where it raised, the last of them failed.

    Source: hybrid of suffix decoding and a draft model, Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), where
    the score of a continuation decides whether the model is asked.
    """

    def __init__(self, parts: Sequence[tuple[Proposer, int | None]], *, share: float) -> None:
        self._parts = tuple(parts)
        self._share = share
        self.num_asked = 0

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Return one draft per chosen slot, with the draft model's cache as the last part that was asked left it."""
        rows = list(live)
        found: dict[int, Draft] = {}
        open_slots = list(chosen)
        for place, (part, most) in enumerate(self._parts):
            self.num_asked = place + 1
            asked = rows if most is None else _capped(rows, open_slots, most)
            for slot, draft in zip(open_slots, part.propose(asked, open_slots), strict=True):
                if draft.num_computed is not None:
                    rows[slot] = replace(rows[slot], num_computed=draft.num_computed)
                if draft.tokens or slot not in found:
                    found[slot] = draft
            open_slots = [
                slot for slot in open_slots if self._asks_next(place, rows[slot], found[slot])
            ]
            if not open_slots:
                break
        return [_with_cache(found[slot], live[slot], rows[slot]) for slot in chosen]

    def _asks_next(self, place: int, row: DraftRow, draft: Draft) -> bool:
        if place + 1 == len(self._parts):
            return False
        if not draft.tokens or draft.expected is None:
            return not draft.tokens
        most = self._parts[place + 1][1]
        room = row.gamma if most is None else min(row.gamma, most)
        return draft.expected < self._share * room


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
        if not self._parts.has(Need.PLAIN_DRAFT_MODEL):
            return ()
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
        proposing = [
            part.uncapped if part.most is None or part.most >= self._longest(part) else str(part)
            for part in parts
            if part.name != NONE
        ]
        return "+".join(proposing) or (NONE if parts else None)

    def _longest(self, part: Part) -> int:
        """Return the tokens of a part's drafts at most."""
        lengthens = self._single[part.name].capabilities.lengthens
        return self._parts.max_gamma + (MAX_PHRASE if lengthens else 0)

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
        is_model = part.name == "model" and self._parts.has(Need.PLAIN_DRAFT_MODEL)
        if not is_model or not isinstance(guesser, Guesser):
            raise KeyError(name)
        return CascadeDrafter(self._parts, guesser)


def _capped(rows: Sequence[DraftRow], slots: Sequence[int], most: int) -> list[DraftRow]:
    capped = list(rows)
    for slot in slots:
        if (row := rows[slot]).depth > most:
            gamma = min(row.gamma, most)
            capped[slot] = replace(row, gamma=gamma, num_behind=most - gamma)
    return capped


def _with_cache(draft: Draft, before: DraftRow, after: DraftRow) -> Draft:
    """Return the draft with the pointer into the draft model's cache that a part left behind."""
    if draft.num_computed is not None or after.num_computed == before.num_computed:
        return draft
    return replace(draft, num_computed=after.num_computed)


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
        lengthens=any(one.lengthens for one in each),
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
