"""Mixed traffic for the soak: requests with a bit of everything, sent, and what their clients saw."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from outrider import CallError, Client
from outrider.client import build_request
from outrider.v1 import inference_pb2 as wire

MODES = (
    wire.EXACTNESS_MODE_MAX_ACCEPT,
    wire.EXACTNESS_MODE_SEED_STABLE,
    wire.EXACTNESS_MODE_LENIENT,
)


class Fate(StrEnum):
    """The client's part in how a request ends."""

    FINISH = "read to the end"
    CANCEL = "cancelled by the client"
    ABORT = "ended by Abort"
    EXPIRE = "short deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Choices that requests are drawn from; ``stops`` are texts likely to occur in answers."""

    prompts: Sequence[str]
    stops: Sequence[str]
    drafters: Sequence[str] = ("model", "lookup", "none")
    max_gamma: int = 8
    max_tokens: int = 24
    max_beams: int = 4
    longest_deadline_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request and what becomes of it; ``cut_after`` counts responses, for CANCEL and ABORT."""

    request: wire.GenerateRequest
    fate: Fate = Fate.FINISH
    cut_after: int = 0
    deadline_s: float | None = None

    @property
    def is_determined(self) -> bool:
        """True where plain decoding of the same request must give the same tokens."""
        mode = self.request.speculation.mode
        sampling = self.request.sampling
        is_greedy = sampling.HasField("temperature") and sampling.temperature == 0.0
        return mode == MODES[1] or (is_greedy and mode != MODES[2])

    def plain(self) -> Job:
        """The same request with speculation off, read to the end."""
        request = build_request(self.request)
        request.request_id += "-plain"
        request.speculation.enabled = False
        return Job(request=request)


@dataclass(slots=True)
class Outcome:
    """Everything that a client received for one request."""

    job: Job
    tokens: list[wire.Token] = field(default_factory=list)
    text: str = ""
    finishes: list[wire.Finish] = field(default_factory=list)
    error: CallError | None = None
    was_left: bool = False

    @property
    def ids(self) -> list[int]:
        """Token ids that arrived."""
        return [token.id for token in self.tokens]


def draw_job(number: int, palette: Palette, rng: random.Random) -> Job:
    """A request with a bit of everything; equal numbers and generators draw equal jobs."""
    mode = rng.choices(MODES, (4, 4, 1))[0]
    speculation: dict[str, Any] = {
        "drafter": rng.choice(palette.drafters),
        "gamma": rng.randint(0, palette.max_gamma),
        "mode": mode,
    }
    if mode == wire.EXACTNESS_MODE_LENIENT:
        speculation["lenience"] = rng.choice((0.2, 0.5, 1.0))
    options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.0, 0.5, 1.0))}
    if rng.random() < 0.3:
        options["top_k"] = rng.randint(1, 20)
    if rng.random() < 0.3:
        options["top_p"] = rng.uniform(0.5, 1.0)
    if rng.random() < 0.3:
        options |= {"repetition_penalty": rng.uniform(0.8, 1.5), "presence_penalty": rng.uniform(-1, 1),
                    "frequency_penalty": rng.uniform(-1, 1)}  # fmt: skip
    if rng.random() < 0.2:
        options["no_repeat_ngram_size"] = rng.randint(1, 4)
    if rng.random() < 0.25:
        options["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.25:
        options["stop"] = rng.sample(tuple(palette.stops), 1)
    has_trace = rng.random() < 0.2
    if rng.random() < 0.07:
        has_trace, speculation, options = False, *draw_search(palette, rng)
    request = build_request(
        rng.choice(palette.prompts), request_id=f"soak-{number}", seed=rng.getrandbits(63),
        max_tokens=rng.randint(1, palette.max_tokens), return_trace=has_trace,
        speculation=speculation, **options,
    )  # fmt: skip
    fate = rng.choices(tuple(Fate), (80, 8, 4, 8))[0]
    deadline_s = rng.uniform(0.0, palette.longest_deadline_s) if fate is Fate.EXPIRE else None
    return Job(request=request, fate=fate, cut_after=rng.randint(1, 4), deadline_s=deadline_s)


def draw_search(palette: Palette, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Speculation and other options of a beam search for its best completion."""
    num_beams = rng.randint(2, palette.max_beams)
    speculation = {
        "gamma": rng.randint(0, palette.max_gamma),
        "mode": rng.choice(MODES[:2]),
    }
    options = {
        "num_beams": num_beams,
        "temperature": 0.0,
        "length_penalty": rng.choice((0.0, 1.0)),
        "early_stopping": rng.random() < 0.5,
    }
    return speculation, options


async def send(client: Client, job: Job) -> Outcome:
    """Stream one request as its job says, and note everything that arrives."""
    outcome = Outcome(job)
    stream = client.generate(job.request, timeout_s=job.deadline_s)
    async with aclosing(cast("AsyncGenerator[wire.GenerateResponse]", stream)) as responses:
        try:
            for count in itertools.count(1):
                response = await anext(responses, None)
                if response is None:
                    break
                outcome.tokens += response.tokens
                outcome.text += response.text
                if response.HasField("finish"):
                    outcome.finishes.append(response.finish)
                if count == job.cut_after and job.fate is Fate.ABORT:
                    await client.abort(job.request.request_id)
                elif count == job.cut_after and job.fate is Fate.CANCEL:
                    outcome.was_left = True
                    break
        except CallError as error:
            outcome.error = error
    return outcome


async def drive(
    client: Client,
    jobs: Iterable[Job],
    num_streams: int,
    on_done: Callable[[int], None] = lambda num_done: None,
) -> list[Outcome]:
    """Keep ``num_streams`` requests under way until the jobs run out.

    Args:
        client: of the server to drive.
        jobs: taken one by one, each when a stream becomes free.
        num_streams: requests under way at a time.
        on_done: called after each request, with the number that have ended.
    """
    waiting, outcomes = iter(jobs), list[Outcome]()

    async def one_stream() -> None:
        for job in waiting:
            outcomes.append(await send(client, job))
            on_done(len(outcomes))

    await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    return outcomes
