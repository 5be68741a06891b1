"""Compares whole completions of a real pair with speculation and without."""

from __future__ import annotations

import math
from collections import Counter

from outrider.engines.bundle.manifest import TOKENIZER_FILE, Bundle
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import Event, Failed, Progressed, RequestSpec, SpeculationParams
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TokenizersCodec
from outrider.runtime.verify.chi_square import homogeneity
from outrider.runtime.verify.report import Check

NUM_FIRST_TOKENS = 3


def check_pair(
    bundle: Bundle, pair: Pair, prompt: tuple[int, ...], num_samples: int, seed: int
) -> list[Check]:
    """Return a check per position of the first tokens of completions, with speculation against without."""
    drafter = "lookup" if pair.draft is None else "model"
    with_drafts = SpeculationParams(drafter=drafter, gamma=min(4, bundle.manifest.max_gamma))
    alone = SpeculationParams(is_enabled=False)
    sides = [
        _completions(bundle, pair, prompt, params, range(first, first + num_samples))
        for params, first in ((with_drafts, seed), (alone, seed + num_samples))
    ]
    return [
        Check(
            name=f"pair: token {k + 1} with {drafter} drafts, against the target alone",
            num_draws=2 * num_samples,
            p_value=homogeneity(*(Counter(tokens[k] for tokens in side) for side in sides)),
        )
        for k in range(NUM_FIRST_TOKENS)
    ]


def _completions(
    bundle: Bundle, pair: Pair, prompt: tuple[int, ...], params: SpeculationParams, seeds: range
) -> list[tuple[int, ...]]:
    worker = _worker(bundle, pair, num_queued=len(seeds), num_tokens=len(prompt))
    receivers = [_Receiver() for _ in seeds]
    for seed, receiver in zip(seeds, receivers, strict=True):
        spec = RequestSpec(
            internal_id=str(seed),
            request_id=str(seed),
            prompt_tokens=prompt,
            params=SamplingParams(),
            seed=seed,
            max_tokens=NUM_FIRST_TOKENS,
            speculation=params,
        )
        worker.submit(spec, receiver)
    while worker.run_step():
        pass
    if error := next((r.error for r in receivers if r.error is not None), None):
        raise error
    return [tuple(receiver.tokens) for receiver in receivers]


def _worker(bundle: Bundle, pair: Pair, *, num_queued: int, num_tokens: int) -> Worker:
    """Return a worker whose queue takes ``num_queued`` prompts of ``num_tokens`` tokens, without a time limit."""
    num_rows = pair.target.limits.max_batch
    return Worker(
        target=pair.target,
        draft=pair.draft,
        sampler=pair.sampler,
        rounds=pair.rounds,
        config=ServerConfig(
            max_running=num_rows,
            max_queued=num_queued,
            max_queued_tokens=num_queued * num_tokens,
            queue_timeout_s=math.inf,
        ),
        max_gamma=bundle.manifest.max_gamma,
        decoder=TokenizersCodec(bundle.read(TOKENIZER_FILE)),
    )


class _Receiver:
    """Collects the tokens of one completion, or its error."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self.tokens.extend(token.token for token in event.tokens)
        elif isinstance(event, Failed):
            self.error = event.error
