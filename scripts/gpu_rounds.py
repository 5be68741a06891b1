"""Rounds on a device against rounds on the host, over the same engines: tokens, copies and times."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines import open_pair
from engines.base import SpeculativeError
from engines.bundle import TOKENIZER_FILE, Bundle
from engines.laws import SamplingLaw
from engines.pair import DEVICE, HOST, Pair
from runtime.core.config import ServerConfig
from runtime.core.params import Event, Progressed, RequestSpec, SpeculationParams
from runtime.tokenizer import TokenizersCodec
from runtime.worker import Worker

GAMMA = 4
PROMPT_TOKENS = 16
GREEDY_AGREEMENT = 0.995


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsCheck:
    """What rounds on the device came to.

    Attributes:
        missing: why there are none, in words; the rest is then 0.
        num_equal: greedy tokens like those of the host's rounds.
        num_compared: tokens of all answers.
        copies_per_step: from the device to the host, in steps that decoded.
        waits_per_step: of the host for the device, likewise.
        device_step_s: mean seconds of a step.
        host_step_s: of the same steps where the host samples.
    """

    missing: str = ""
    num_equal: int = 0
    num_compared: int = 0
    copies_per_step: float = 0.0
    waits_per_step: float = 0.0
    device_step_s: float = 0.0
    host_step_s: float = 0.0

    @property
    def has_passed(self) -> bool:
        """Whether there are rounds, of the promised tokens, with one copy and one wait a step."""
        return (
            not self.missing
            and self.copies_per_step == self.waits_per_step == 1.0
            and self.num_equal >= GREEDY_AGREEMENT * self.num_compared
        )


def check_rounds(bundle: Bundle, device: str, *, num_prompts: int, num_tokens: int) -> RoundsCheck:
    """Greedy answers to random prompts, drafted by the bundle's draft model where it has one."""
    try:
        on_device = open_pair(bundle, device=device, sampler=DEVICE)
    except SpeculativeError as error:
        return RoundsCheck(missing=str(error))
    assert on_device.memory is not None
    _serve(bundle, on_device, num_prompts, num_tokens)
    traffic = on_device.memory.traffic
    before = (traffic.num_to_host, traffic.num_waits)
    found, steps, device_s = _serve(bundle, on_device, num_prompts, num_tokens)
    copies, waits = (traffic.num_to_host - before[0], traffic.num_waits - before[1])
    on_device.close()
    on_host = open_pair(bundle, device=device, sampler=HOST)
    _serve(bundle, on_host, num_prompts, num_tokens)
    expected, _, host_s = _serve(bundle, on_host, num_prompts, num_tokens)
    on_host.close()
    return RoundsCheck(
        num_equal=sum(
            ours == theirs
            for pair in zip(found, expected, strict=True)
            for ours, theirs in zip(*pair, strict=True)
        ),
        num_compared=num_prompts * num_tokens,
        copies_per_step=copies / steps,
        waits_per_step=waits / steps,
        device_step_s=device_s,
        host_step_s=host_s,
    )


def _serve(
    bundle: Bundle, pair: Pair, num_prompts: int, num_tokens: int
) -> tuple[list[list[int]], int, float]:
    """Tokens of each answer, steps that decoded, and mean seconds of a step."""
    worker = Worker(
        target=pair.target,
        draft=pair.draft,
        sampler=pair.sampler,
        rounds=pair.rounds,
        config=ServerConfig(
            max_running=pair.target.limits.max_batch,
            max_queued=num_prompts,
            queue_timeout_s=math.inf,
        ),
        max_gamma=bundle.manifest.max_gamma,
        decoder=TokenizersCodec(bundle.root / TOKENIZER_FILE),
    )
    rng = np.random.default_rng(0)
    shape = (num_prompts, PROMPT_TOKENS)
    prompts: Sequence[list[int]] = rng.integers(0, pair.target.limits.vocab_size, shape).tolist()
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):

        def deliver(event: Event, answer: list[int] = answers[index]) -> None:
            if isinstance(event, Progressed):
                answer.extend(token.token for token in event.tokens)

        spec = RequestSpec(
            internal_id=str(index),
            request_id=str(index),
            prompt_tokens=tuple(prompt),
            law=SamplingLaw(temperature=0.0),
            seed=0,
            max_tokens=num_tokens,
            speculation=SpeculationParams(
                drafter="model" if pair.draft is not None else "none", gamma=GAMMA
            ),
        )
        worker.submit(spec, deliver)
    began, num_steps = time.perf_counter(), 0
    while worker.run_step():
        num_steps += 1
    seconds = time.perf_counter() - began
    return answers, sum(worker.snapshot().host_reasons.values()), seconds / num_steps


def render(check: RoundsCheck) -> list[str]:
    """Lines of Markdown."""
    if check.missing:
        return [f"* rounds on the device: NONE ({check.missing})"]
    return [
        f"* rounds on the device: {'passed' if check.has_passed else 'FAILED'}; greedy tokens like "
        f"the host's {check.num_equal}/{check.num_compared}; per step {check.copies_per_step:.2f} "
        f"copies to the host and {check.waits_per_step:.2f} waits, "
        f"{1e3 * check.device_step_s:.3f} ms (host sampling: {1e3 * check.host_step_s:.3f} ms)"
    ]
