"""Pairs of scripted models with encoders, and a worker around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from outrider.engines.base import EngineError, FloatArray, Source
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.params import SpeculationParams

from tests.runtime.markov import Harness, limits

MAX_SOURCE = 24
GREEDY = (0.0, ExactnessMode.MAX_ACCEPT)
SHARED_NOISE = (1.0, ExactnessMode.SEED_STABLE)
LogitsOf = Callable[[tuple[int, ...], tuple[int, ...]], FloatArray]


def copying_logits(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
    """S3, target: the source over and over, with the token after each third one out of place."""
    place = len(prefix) - 1
    logits = np.zeros(10, dtype=np.float32)
    logits[(source[place % len(source)] + (place % 4 == 3)) % 10] = 8.0
    return logits


def erring_logits(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
    """S3, draft: the source as it is, but wrong wherever the length is a multiple of five."""
    place = len(prefix) - 1
    logits = np.zeros(10, dtype=np.float32)
    logits[(source[place % len(source)] + (len(prefix) % 5 == 0)) % 10] = 8.0
    return logits


def mixed(seed: int, *, like: int | None = None) -> LogitsOf:
    """S4: an order-1 chain that the whole of the source chooses; ``like`` mixes in another one's."""

    @cache
    def row_of(chain: int, last: int) -> FloatArray:
        row = np.random.default_rng((seed, chain, last)).normal(size=4)
        if like is not None:
            row = 0.5 * row + np.random.default_rng((like, chain, last)).normal(size=4)
        return (2.0 * row).astype(np.float32)

    def logits_of(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
        # Every token and its place count.
        chain = sum((place + 1) * (token + 1) for place, token in enumerate(source)) % 97
        return row_of(chain, prefix[-1])

    return logits_of


PAIRS: dict[str, tuple[int, LogitsOf, LogitsOf]] = {
    "S3": (10, copying_logits, erring_logits),
    "S4": (4, mixed(1), mixed(2, like=1)),
}


def sourced(
    pair: str = "S4",
    *,
    max_batch: int = 5,
    target: ScriptedEngine | None = None,
    draft: ScriptedEngine | None = None,
    num_nodes: int = 0,
    **settings: object,
) -> Harness:
    """Return a harness around a pair that reads sources of up to ``MAX_SOURCE`` tokens."""
    vocab_size, target_logits, draft_logits = PAIRS[pair]
    bounds = replace(
        limits(vocab_size, max_batch=max_batch), max_source=MAX_SOURCE, max_tree_nodes=num_nodes
    )
    return Harness(
        target=target or ScriptedEngine(target_logits, bounds),
        draft=draft or ScriptedEngine(draft_logits, bounds),
        max_batch=max_batch,
        **{"read_tokens": 32, "prefill_chunk": 12, **settings},
    )


def bounds_of(pair: str, *, max_batch: int = 5, max_source: int = MAX_SOURCE):
    return replace(limits(PAIRS[pair][0], max_batch=max_batch), max_source=max_source)


def source_of(index: int, vocab_size: int) -> tuple[int, ...]:
    """Return the source of a request by its number: 1..``MAX_SOURCE`` tokens."""
    rng = np.random.default_rng((11, index))
    length = int(rng.integers(1, MAX_SOURCE + 1))
    return tuple(rng.integers(0, vocab_size, size=length).tolist())


PREFIXES: Sequence[tuple[int, ...]] = ((0,), (1, 2), (3,), (0, 3, 1), (2,) * 14)
"""Decoder prefixes: a start token alone, one with a language, and answers that were begun."""


def stable(drafter: str) -> tuple[float, SpeculationParams]:
    """Return a temperature and settings under which every drafter's answer is that of plain decoding."""
    mode = ExactnessMode.SEED_STABLE
    return 1.0, SpeculationParams(drafter=drafter, gamma=3, mode=mode)


@cache
def answer(pair: str, index: int, temperature: float, mode: ExactnessMode) -> list[int]:
    """Return the tokens of a request alone, without speculation."""
    harness = sourced(pair)
    submit(harness, pair, index, temperature, SpeculationParams(is_enabled=False, mode=mode))
    harness.run()
    return harness.tokens(str(index))


def submit(
    harness: Harness,
    pair: str,
    index: int,
    temperature: float,
    speculation: SpeculationParams,
    label: str = "",
    **options: object,
) -> None:
    """Submit the request of a number."""
    harness.submit(
        f"{label}{index}",
        PREFIXES[index % len(PREFIXES)],
        source_tokens=source_of(index, PAIRS[pair][0]),
        seed=index,
        temperature=temperature,
        speculation=speculation,
        **{"max_tokens": 11 + index % 5, **options},
    )


POISON = (3, 3, 3)


class Poisoned(ScriptedEngine):
    """Raises where the poisonous source is read."""

    def __init__(self) -> None:
        super().__init__(PAIRS["S4"][1], bounds_of("S4"))

    def read(self, sources: Sequence[Source]) -> None:
        if POISON in [source.tokens for source in sources]:
            for source in sources:
                self._sources[source.slot] = self._slots[source.slot] = ()
            raise EngineError("poison")
        super().read(sources)
