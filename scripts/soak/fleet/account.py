"""An account of requests to several replicas: each ends once, in one of a few ways, and none is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider import CallError, Client, Overloaded, RequestRefused, Unavailable
from outrider.client import build_request

from scripts.soak.run import broken_answer
from scripts.soak.traffic import Job, Outcome, Palette, draw_job, send

SILENT_S = 120.0
"""A request that has not ended after so long is silent."""
BAD: Sequence[dict[str, Any]] = (
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"model": "nobody"},
    {"max_tokens": 1 << 30},
    {"stop": [""]},
)


class Kind(StrEnum):
    """What is asked."""

    GENERATE = "generate"
    BAD = "a bad request"
    TOKENISE = "tokenise"


class Ending(StrEnum):
    """How a request ended; the last two must not happen."""

    FINISHED = "finished"
    REFUSED = "refused with a reason"
    UNAVAILABLE = "unavailable"
    LEFT = "left by its client"
    CUT = "cut short by its client's wish"
    SILENT = "silent"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Errand:
    """One request: a job of ``scripts.soak.traffic`` or, without one, a text to tokenise."""

    name: str
    kind: Kind
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What became of an errand; ``problem`` says what is wrong with it."""

    errand: Errand
    ending: Ending
    outcome: Outcome | None = None
    problem: str = ""


def draw_errand(number: int, palette: Palette, rng: random.Random) -> Errand:
    """Return an errand of a drawn kind; equal numbers and generators draw equal ones."""
    name = f"errand-{number}"
    kind = rng.choices((Kind.GENERATE, Kind.BAD, Kind.TOKENISE), (80, 10, 10))[0]
    if kind is Kind.TOKENISE:
        return Errand(name, kind)
    if kind is Kind.BAD:
        request = build_request(rng.choice(palette.prompts), **rng.choice(BAD))
        job = Job(request=request)
    else:
        job = draw_job(number, palette, rng)
    job.request.request_id = name
    return Errand(name, kind, job)


async def perform(client: Client, errand: Errand) -> Record:
    """Ask, and return what came of it; never raises."""
    try:
        async with asyncio.timeout(SILENT_S):
            if errand.job is not None:
                return judged(errand, await send(client, errand.job))
            tokens = await client.tokenize(f"def {errand.name}(self):")
    except TimeoutError:
        return Record(errand, Ending.SILENT, problem=f"{errand.name}: no end in {SILENT_S:.0f} s")
    except CallError as error:
        return _of_error(errand, error)
    return Record(errand, Ending.FINISHED if tokens else Ending.BROKEN)


def judged(errand: Errand, outcome: Outcome) -> Record:
    """Return the record of a streamed answer."""
    error = outcome.error
    if outcome.was_left:
        return Record(errand, Ending.LEFT, outcome)
    if isinstance(error, Unavailable | Overloaded) and len(outcome.finishes) <= 1:
        return _of_error(errand, error, outcome)
    if errand.kind is Kind.BAD:
        if isinstance(error, RequestRefused) and error.reason and not outcome.tokens:
            return Record(errand, Ending.REFUSED, outcome)
        return Record(errand, Ending.BROKEN, outcome, f"{errand.name}: not refused, {error!r}")
    if problem := broken_answer(outcome):
        return Record(errand, Ending.BROKEN, outcome, problem)
    return Record(errand, Ending.FINISHED if outcome.finishes else Ending.CUT, outcome)


def _of_error(errand: Errand, error: CallError, outcome: Outcome | None = None) -> Record:
    if isinstance(error, Unavailable):
        return Record(errand, Ending.UNAVAILABLE, outcome)
    if error.reason:
        return Record(errand, Ending.REFUSED, outcome)
    return Record(errand, Ending.BROKEN, outcome, f"{errand.name}: {error!r}")


@dataclass(slots=True)
class Account:
    """All records of a run."""

    records: list[Record] = field(default_factory=list)
    _awaited: list[tuple[float, asyncio.Event]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Note what became of a request."""
        self.records.append(record)
        for count, event in self._awaited:
            if len(self.records) >= count:
                event.set()

    async def reached(self, count: float) -> None:
        """Return once so many requests have ended."""
        event = asyncio.Event()
        self._awaited.append((count, event))
        if len(self.records) < count:
            await event.wait()

    @property
    def endings(self) -> Counter[str]:
        """Requests by kind and the way they ended, with the reason of an error."""
        return Counter(
            f"{one.errand.kind}: {one.ending}{_reason(one.outcome)}" for one in self.records
        )

    @property
    def finished(self) -> list[Outcome]:
        """Answers that came whole."""
        return [
            one.outcome for one in self.records if one.ending is Ending.FINISHED and one.outcome
        ]

    def problems(self, num_asked: int) -> list[str]:
        """Return what is wrong: requests without an end, with two, or with an end that must not be."""
        names = Counter(one.errand.name for one in self.records)
        found = [f"{name}: {count} ends" for name, count in names.items() if count > 1]
        if len(names) != num_asked:
            found.append(f"{num_asked} requests were made, {len(names)} ended")
        found += [one.problem for one in self.records if one.problem]
        return found


def answered_twice(logs: Iterable[Path]) -> list[str]:
    """Return the names of requests that replicas have finished more than once, by their audit logs."""
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    names = Counter(
        entry["request_id"]
        for entry in entries
        if entry["method"] == "Generate" and entry["code"] == "OK"
    )
    return sorted(name for name, count in names.items() if count > 1)


def _reason(outcome: Outcome | None) -> str:
    error = None if outcome is None else outcome.error
    return "" if error is None or not error.reason else f" ({error.reason})"
