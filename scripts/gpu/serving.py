"""Requests through a worker over an open pair, without a server: tokens, reports, steps and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Finished, SpeculationReport
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.timers import TimedEngine, TimedSampler
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
    bundle: Bundle, pair: Pair, prompts: Sequence[Sequence[int]], *, gamma: int, num_tokens: int, batch: int,
    temperature: float = 0.0,
) -> Served:  # fmt: skip
    """Answer all prompts, ``batch`` at a time, drafted by the draft model where there is one."""
    tokenizer = TokenizersCodec(bundle.root / TOKENIZER_FILE)
    worker = Worker(
        ServedEngines(
            target=pair.target,
            draft=pair.draft,
            sampler=pair.sampler,
            rounds=pair.rounds,
            max_gamma=bundle.manifest.max_gamma,
        ),
        config=ServerConfig(max_running=batch, max_queued=len(prompts), queue_timeout_s=math.inf),
        decoder=tokenizer,
    )
    # Its timers time nothing: the worker calls the pair itself, by whose types it knows a device.
    rig = Rig(
        bundle=bundle, target=TimedEngine(pair.target), draft=None, sampler=TimedSampler(pair.sampler),
        tokenizer=tokenizer, worker=worker,
    )  # fmt: skip
    drafter = "model" if pair.draft is not None and gamma else "none"
    speculation = SpeculationParams(drafter=drafter, gamma=gamma)
    params = SamplingParams(temperature=temperature)
    answers, seconds = rig.answer(prompts, params, speculation, num_tokens)
    while worker.run_step():
        pass
    return Served(
        answers=[answer.tokens for answer in answers],
        reports=[one.end.report for one in answers if isinstance(one.end, Finished)],
        num_steps=sum(worker.snapshot().host_fallback_reasons.values()),
        seconds=seconds,
    )
