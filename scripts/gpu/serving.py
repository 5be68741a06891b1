"""Requests through a worker over an open pair, without a server: tokens, reports, steps and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.bundle.manifest import TOKENIZER_FILE, Bundle
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import (
    Event,
    Failed,
    Finished,
    Progressed,
    RequestSpec,
    SpeculationParams,
    SpeculationReport,
)
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TokenizersCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What requests came to.

    Attributes:
        answers: tokens of each.
        reports: of each.
        num_steps: steps that decoded.
        seconds: of all steps together.
    """

    answers: list[list[int]]
    reports: list[SpeculationReport]
    num_steps: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.answers))


class Receiver:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.report: SpeculationReport | None = None

    def __call__(self, event: Event) -> None:
        """Take an event; a failure ends the check."""
        if isinstance(event, Progressed):
            self.tokens.extend(token.token for token in event.tokens)
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Finished):
            self.report = event.report


def serve(
    bundle: Bundle,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    gamma: int,
    num_tokens: int,
    batch: int,
    temperature: float = 0.0,
) -> Served:
    """Answer all prompts, ``batch`` at a time, drafted by the draft model where there is one."""
    worker = Worker(
        target=pair.target,
        draft=pair.draft,
        sampler=pair.sampler,
        rounds=pair.rounds,
        config=ServerConfig(max_running=batch, max_queued=len(prompts), queue_timeout_s=math.inf),
        max_gamma=bundle.manifest.max_gamma,
        decoder=TokenizersCodec(bundle.root / TOKENIZER_FILE),
    )
    drafter = "model" if pair.draft is not None and gamma else "none"
    receivers = [Receiver() for _ in prompts]
    for index, (prompt, receiver) in enumerate(zip(prompts, receivers, strict=True)):
        spec = RequestSpec(
            internal_id=str(index),
            request_id=str(index),
            prompt_tokens=tuple(prompt),
            params=SamplingParams(temperature=temperature),
            seed=index,
            max_tokens=num_tokens,
            speculation=SpeculationParams(drafter=drafter, gamma=gamma),
        )
        worker.submit(spec, receiver)
    began = time.perf_counter()
    while worker.run_step():
        pass
    seconds = time.perf_counter() - began
    return Served(
        answers=[receiver.tokens for receiver in receivers],
        reports=[receiver.report for receiver in receivers if receiver.report is not None],
        num_steps=sum(worker.snapshot().host_fallback_reasons.values()),
        seconds=seconds,
    )
