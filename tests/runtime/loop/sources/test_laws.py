"""The law of answers to a source, by enumeration of all noise, over a real pair with an encoder each."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from outrider.engines.base import EngineLimits, FloatArray, Source, Span
from outrider.engines.reference.torch_engine import TorchEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import completed, emitted_probs, sequence_probs
from transformers import T5Config, T5ForConditionalGeneration

from tests.engines.sampling.test_candidates import walked
from tests.runtime.drafters.test_laws import Trailing
from tests.runtime.markov import LetterDecoder, spec
from tests.runtime.oracle.laws import distance

MAX_ERROR = 1e-6
SOURCE, PREFIX = (1, 0, 1, 1, 0, 1, 0), (1,)


class Sized(Trailing):
    """Over a vocabulary of any size."""

    def __init__(self, noise, vocab_size: int) -> None:
        CpuSampler.__init__(self, max_batch=1, max_gamma=4, vocab_size=vocab_size, noise=noise)
        self._trail = noise.trail


class Remembering(TorchEngine):
    """Computes each text behind each source once: the walk asks for the same ones thousands of times."""

    def __init__(self, seed: int, vocab_size: int, max_nodes: int) -> None:
        torch.manual_seed(seed)
        config = T5Config(
            vocab_size=vocab_size, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        limits = EngineLimits(
            max_batch=1, max_context=12, max_extend=8, vocab_size=vocab_size, max_source=8,
            max_tree_nodes=max_nodes,
        )  # fmt: skip
        super().__init__(T5ForConditionalGeneration(config), limits)
        self._known: dict[object, FloatArray] = {}

    def _logits_of(self, tokens, parents=None, source=()):
        key = (tokens, parents, source)
        if key not in self._known:
            self._known[key] = super()._logits_of(tokens, parents, source)
        return self._known[key]

    def probs_behind(self, answer: tuple[int, ...]) -> np.ndarray:
        """Return [V] float64 probabilities of the token behind an answer."""
        self.read([Source(slot=0, tokens=SOURCE)])
        span = Span(slot=0, start=0, tokens=(*PREFIX, *answer), num_logits=1)
        row = self.extend([span])[0, 0].astype(np.float64)
        weights = np.exp(row - row.max())
        probs: np.ndarray = weights / weights.sum()
        return probs


@cache
def engines(vocab_size: int, max_nodes: int) -> tuple[Remembering, Remembering]:
    return Remembering(5, vocab_size, max_nodes), Remembering(6, vocab_size, max_nodes)


def answer(noise, params: SpeculationParams, sizes: tuple[int, int], num_tokens: int):
    target, draft = engines(*sizes)
    config = DraftingConfig(
        lookup_min_ngram=1, tree_nodes=6, min_prob=0.02, min_node_prob=0.01, suffix_factor=4.0
    )
    worker = Worker(
        ServedEngines(
            target=target,
            draft=draft,
            sampler=Sized(noise, sizes[0]),
            max_gamma=4,
        ),
        config=ServerConfig(drafting=config),
        decoder=LetterDecoder(),
    )
    events: list[object] = []
    request = spec(
        "a", PREFIX, source_tokens=SOURCE, max_tokens=num_tokens, temperature=1.0,
        speculation=params,
    )  # fmt: skip
    worker.submit(request, events.append)
    while worker.run_step():
        pass
    drafted = sum(len(e.trace.draft_tokens) for e in events if isinstance(e, Progressed))
    return drafted, tuple(t.token for e in events if isinstance(e, Progressed) for t in e.tokens)


CASES = {
    "chains": (SpeculationParams(drafter="model", gamma=1), (3, 0), 2),
    "blocks": (SpeculationParams(drafter="model", gamma=2, verifies_block=True), (2, 0), 3),
    "trees": (SpeculationParams(drafter="tree", gamma=1, branching=(2,)), (3, 8), 2),
    "point masses": (SpeculationParams(drafter="lookup", gamma=1), (3, 0), 2),
    "trees of point masses": (SpeculationParams(drafter="suffix", gamma=1), (3, 8), 2),
    "lenient": (
        SpeculationParams(drafter="model", gamma=1, mode=ExactnessMode.LENIENT, lenience=0.5),
        (3, 0),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_to_a_source_have_the_targets_law(name: str) -> None:
    params, sizes, num_tokens = CASES[name]
    num_drafted = 0

    def run(noise):
        nonlocal num_drafted
        drafted, tokens = answer(noise, params, sizes, num_tokens)
        num_drafted += drafted
        return tokens

    found = walked(run)
    target, draft = engines(*sizes)
    wanted = sequence_probs(target.probs_behind, num_tokens)
    if params.mode is ExactnessMode.LENIENT:
        exact = wanted
        rounds = emitted_probs(draft.probs_behind, target.probs_behind, 1, lenience=params.lenience)
        wanted = completed(rounds, target.probs_behind, num_tokens)
        assert distance(wanted, exact) > 1e-3, "a pair this close proves nothing"
    assert num_drafted > 0
    assert sum(found.values()) == pytest.approx(1.0, abs=MAX_ERROR)
    assert distance(found, wanted) < MAX_ERROR


def test_the_pair_reads_its_source() -> None:
    """Both models answer another source otherwise, and not as each other."""
    rows = [one.probs_behind(()) for one in engines(3, 0)]
    others = []
    for one in engines(3, 0):
        one.read([Source(slot=0, tokens=SOURCE[::-1][1:])])
        span = Span(slot=0, start=0, tokens=PREFIX, num_logits=1)
        others.append(one.extend([span])[0, 0])
    for row, other in zip(rows, others, strict=True):
        weights = np.exp(other - other.max())
        assert np.abs(row - weights / weights.sum()).max() > 1e-3
    assert np.abs(rows[0] - rows[1]).max() > 1e-2
