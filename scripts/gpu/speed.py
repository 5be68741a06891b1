"""Speculation on against off on a device, beside the formula's prediction and the engine calls alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.engines.pair import Pair
from outrider.runtime.offline.speed import num_trials
from outrider.runtime.oracle.analysis import walltime_factor
from outrider.runtime.serving.tokenizer import TokenizersCodec

from scripts.gpu.serving import Served, serve
from scripts.gpu.times import CONTEXT, fill, time_call
from scripts.tools.common import code_prompts

# Of the generalised Theorem 3.8 (Leviathan et al. 2023).
LEAST_SHARE = 0.9
# Of a step beside its engine calls.
ALLOWED_OVERHEAD = 0.05
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One cell.

    Attributes:
        pair: name of the bundle.
        batch: rows.
        gamma: draft tokens per step.
        temperature: of all requests.
        off_tokens_per_s: without speculation; median of interleaved rounds, as below.
        on_tokens_per_s: with it.
        alpha_hat: accepted over trials reached.
        predicted: speed-up by alpha_hat and the costs of the engines' calls, timed alone.
        overhead: seconds of a speculative step over those of its engine calls, less 1: sampling,
            planning and committing.
    """

    pair: str
    batch: int
    gamma: int
    temperature: float
    off_tokens_per_s: float
    on_tokens_per_s: float
    alpha_hat: float
    predicted: float
    overhead: float

    @property
    def speedup(self) -> float:
        """On over off."""
        return self.on_tokens_per_s / self.off_tokens_per_s

    @property
    def reaches_prediction(self) -> bool:
        """True where the speed-up is at least ``LEAST_SHARE`` of the predicted one."""
        return self.speedup >= LEAST_SHARE * self.predicted

    @property
    def is_lean(self) -> bool:
        """True where the runtime adds at most ``ALLOWED_OVERHEAD`` to its engine calls."""
        return self.overhead <= ALLOWED_OVERHEAD


def measure_speed(
    bundle: Bundle, pair: Pair, *, gammas: Sequence[int], batches: Sequence[int], temperature: float,
    num_prompts: int, num_tokens: int, repeats: int,
) -> list[Speed]:  # fmt: skip
    """Return every cell; needs a pair with a draft model.

    Args:
        bundle: of the pair.
        pair: open on the device.
        gammas: draft tokens per step.
        batches: rows; more than the pair has slots for are cut.
        temperature: of all requests.
        num_prompts: per row.
        num_tokens: of each answer.
        repeats: timed calls of the engines alone, per shape.
    """
    codec = TokenizersCodec(bundle.root / TOKENIZER_FILE)
    vocab_size = pair.target.limits.vocab_size
    room = pair.target.limits.max_context - num_tokens
    texts = [[token % vocab_size for token in codec.encode(text)] for text in code_prompts(64)]
    cells = []
    for batch in sorted({min(batch, pair.target.limits.max_batch) for batch in batches}):
        prompts = [text[:room] for text in texts[: num_prompts * batch]]
        sizes = {"num_tokens": num_tokens, "batch": batch, "temperature": temperature}
        runs: dict[int, list[Served]] = {gamma: [] for gamma in (0, *gammas)}
        for _ in range(_ROUNDS):
            for gamma, served in runs.items():
                served.append(serve(bundle, pair, prompts, gamma=gamma, **sizes))
        for gamma in gammas:
            reports = [report for served in runs[gamma] for report in served.reports]
            alpha_hat = sum(one.num_accepted for one in reports) / max(
                1, sum(map(num_trials, reports))
            )
            predicted, engines_s = _predicted(pair, batch, gamma, alpha_hat, repeats)
            step_s = statistics.median(one.seconds / one.num_steps for one in runs[gamma])
            cells.append(
                Speed(
                    pair=bundle.root.name, batch=batch, gamma=gamma, temperature=temperature,
                    off_tokens_per_s=_tokens_per_s(runs[0]), on_tokens_per_s=_tokens_per_s(runs[gamma]),
                    alpha_hat=alpha_hat, predicted=predicted, overhead=step_s / engines_s - 1.0,
                )
            )  # fmt: skip
    return cells


def _predicted(
    pair: Pair, batch: int, gamma: int, alpha_hat: float, repeats: int
) -> tuple[float, float]:
    """Return the formula's speed-up, and the seconds of a step's engine calls, which are timed alone."""
    assert pair.draft is not None
    context = min(CONTEXT, pair.target.limits.max_context - gamma - 1)
    for engine in (pair.target, pair.draft):
        fill(engine, batch, context)
    plain_s = time_call(pair.target, batch, 1, context, repeats)[1]
    verify_s = time_call(pair.target, batch, gamma + 1, context, repeats)[1]
    draft_s = time_call(pair.draft, batch, 1, context, repeats)[1]
    factor = walltime_factor(alpha_hat, gamma, draft_s / plain_s, verify_cost=verify_s / plain_s)
    return factor, gamma * draft_s + verify_s


def _tokens_per_s(runs: Sequence[Served]) -> float:
    return statistics.median(served.num_tokens / served.seconds for served in runs)
