"""Rounds on a device against rounds on the host, over the same engines: tokens, copies and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from outrider.engines.accelerators.device.pair_rounds import DeviceRounds
from outrider.engines.base import SpeculativeError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.opening import open_pair
from outrider.engines.pair import DEVICE, HOST, Pair

from scripts.gpu.serving import serve

GAMMA = 4
PROMPT_TOKENS = 16
GREEDY_AGREEMENT = 0.995


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsCheck:
    """Tokens, copies and times of rounds on the device.

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
        """True where rounds give the promised tokens with one copy and one wait a step."""
        return (
            not self.missing
            and self.copies_per_step == self.waits_per_step == 1.0
            and self.num_equal >= GREEDY_AGREEMENT * self.num_compared
        )


def check_rounds(
    bundle: Bundle, device: str, *, num_prompts: int, num_tokens: int, provider_options: Mapping[str, str]
) -> RoundsCheck:  # fmt: skip
    """Greedy answers to random prompts, drafted by the bundle's draft model where it has one."""
    given = {"provider_options": provider_options}
    try:
        on_device = open_pair(bundle, device=device, sampler=DEVICE, **given)
    except SpeculativeError as error:
        return RoundsCheck(missing=str(error))
    rounds = on_device.rounds
    assert isinstance(rounds, DeviceRounds)
    prompts = _prompts(on_device, num_prompts)
    batch = on_device.target.limits.max_batch
    gamma = min(GAMMA, bundle.manifest.max_gamma)
    sizes = {"gamma": gamma, "num_tokens": num_tokens, "batch": batch}
    serve(bundle, on_device, prompts, **sizes)
    traffic = rounds.device.traffic
    before = (traffic.num_to_host, traffic.num_waits)
    found = serve(bundle, on_device, prompts, **sizes)
    copies, waits = (traffic.num_to_host - before[0], traffic.num_waits - before[1])
    on_device.close()
    on_host = open_pair(bundle, device=device, sampler=HOST, **given)
    serve(bundle, on_host, prompts, **sizes)
    expected = serve(bundle, on_host, prompts, **sizes)
    on_host.close()
    return RoundsCheck(
        num_equal=sum(
            ours == theirs
            for pair in zip(found.answers, expected.answers, strict=True)
            for ours, theirs in zip(*pair, strict=True)
        ),
        num_compared=expected.num_tokens,
        copies_per_step=copies / found.num_steps,
        waits_per_step=waits / found.num_steps,
        device_step_s=found.seconds / found.num_steps,
        host_step_s=expected.seconds / expected.num_steps,
    )


def _prompts(pair: Pair, count: int) -> list[list[int]]:
    shape = (count, PROMPT_TOKENS)
    prompts: list[list[int]] = (
        np.random.default_rng(0).integers(0, pair.target.limits.vocab_size, shape).tolist()
    )
    return prompts


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
