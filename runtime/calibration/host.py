"""Measures the host's share of a step, sampling included: real steps of a worker whose engines answer at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from outrider.engines.base import EngineLimits
from outrider.engines.kv_cache import MIN_SPAN
from outrider.engines.reference.null import NullEngine
from outrider.engines.sampling.base import ExactnessMode, Sampler, SamplingParams
from outrider.runtime.calibration.fitting import fit_host
from outrider.runtime.calibration.timing import Clock, time_calls
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.core.text import Decoder
from outrider.runtime.gamma.costs import HostCosts, RowKind
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker

# The host's time is taken as linear in rows and in draft tokens: two points of each, gamma 0 being one.
ROWS, GAMMA = (1, 8), 4
STEPS = 3  # timed of each kind, rows and gamma: 36 in all, which take far less time than the engines' calls
LOGITS_STD = 3.0  # about a trained model's, so that as many candidates are kept
KINDS = {  # temperature and mode of a request of the kind
    RowKind.GREEDY: (0.0, ExactnessMode.MAX_ACCEPT),
    RowKind.SAMPLED: (1.0, ExactnessMode.MAX_ACCEPT),
    RowKind.STABLE: (1.0, ExactnessMode.SEED_STABLE),
}


def measure_host(
    limits: EngineLimits, sampler: Sampler, decoder: Decoder, max_gamma: int, clock: Clock
) -> HostCosts:
    """Return the costs of steps whose engines take no time; the draft is always right, so that all of it is judged.

    Sampler and decoder are those that will serve; ``limits`` are the target's.
    """
    noise = np.random.default_rng(0).normal(scale=LOGITS_STD, size=limits.vocab_size)
    gammas = sorted({0, min(GAMMA, max_gamma)})
    wanted = max(MIN_SPAN, gammas[-1] + 1)
    # A read is the engine's time alone.
    limits = replace(limits, max_source=0)
    engine = NullEngine(limits, noise.astype(np.float32), max_wanted=wanted)
    all_rows = sorted({min(rows, limits.max_batch) for rows in ROWS})
    samples = []
    for kind, rows, gamma in product(RowKind, all_rows, gammas):
        worker = Worker(
            ServedEngines(
                target=engine,
                draft=engine,
                sampler=sampler,
                max_gamma=max(gamma, 1),
            ),
            # Without an interval every call of run_step takes one step and sends its tokens.
            config=ServerConfig(max_running=rows),
            decoder=decoder,
        )
        for index in range(rows):
            worker.submit(_spec(kind, index, gamma), lambda event: None)
        # The first step, which is not counted, reads the prompts.
        (seconds,) = time_calls([worker.run_step], STEPS, clock).tolist()
        samples.append((kind, rows, gamma, seconds))
    return fit_host(samples)


def _spec(kind: RowKind, index: int, gamma: int) -> RequestSpec:
    """Return a request that goes on for longer than is timed."""
    temperature, mode = KINDS[kind]
    return RequestSpec(
        internal_id=str(index),
        request_id=str(index),
        prompt_tokens=(0,),
        params=SamplingParams(temperature=temperature),
        seed=index,
        max_tokens=(STEPS + 2) * (gamma + 1),
        speculation=SpeculationParams(drafter="model", gamma=gamma, mode=mode),
    )
