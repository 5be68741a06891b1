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
    Failed,
    Finished,
    RequestSpec,
    SpeculationParams,
    SpeculationReport,
)
from outrider.runtime.loop.worker import Worker
from outrider.runtime.offline.rig import Answer
from outrider.runtime.serving.tokenizer import TokenizersCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Answers of some requests, and the time they took.

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
    answers = [Answer() for _ in prompts]
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        spec = RequestSpec(
            internal_id=str(index),
            request_id=str(index),
            prompt_tokens=tuple(prompt),
            params=SamplingParams(temperature=temperature),
            seed=index,
            max_tokens=num_tokens,
            speculation=SpeculationParams(drafter=drafter, gamma=gamma),
        )
        worker.submit(spec, answer)
    began = time.perf_counter()
    while worker.run_step():
        pass
    seconds = time.perf_counter() - began
    for one in answers:
        if isinstance(one.end, Failed):
            raise one.end.error
    return Served(
        answers=[answer.tokens for answer in answers],
        reports=[one.end.report for one in answers if isinstance(one.end, Finished)],
        num_steps=sum(worker.snapshot().host_fallback_reasons.values()),
        seconds=seconds,
    )
