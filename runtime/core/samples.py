"""Several completions of one prompt: the requests of a group, one per completion, and their seeds.

All of a group are the same but for their seeds, which are derived from that of the first. So a completion is what a
request alone gets with its seed, and the first is what it gets with the group's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from outrider.runtime.core.params import RequestSpec

SAMPLE_STREAM = 9
"""Half of the key that seeds are drawn under. The noise of draws has other streams: ``engines.sampling.noise``."""


def samples_of(spec: RequestSpec) -> tuple[RequestSpec, ...]:
    """Return the requests of a group by index, ``spec`` first; ``spec`` alone where it asks for one completion."""
    return (
        spec,
        *(
            replace(
                spec,
                internal_id=f"{spec.internal_id}.{index}",
                seed=sample_seed(spec.seed, index),
                sample=index,
            )
            for index in range(1, spec.num_samples)
        ),
    )


def sample_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of a group's completion; that of the first is the group's.

    Source: Salmon et al. 2011, Philox 4x64 as numpy has it: the first word of key (seed, stream) and counter index.
    """
    if index == 0:
        return seed
    key = np.array([seed, SAMPLE_STREAM], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=index).random_raw())
