"""Unigrams and bigrams of a corpus: their rows against counts by hand, what they draft, and the answers' law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import DrafterParts
from outrider.runtime.drafters.registry import build_drafters
from outrider.runtime.drafters.text import ngrams, suffix_array
from outrider.runtime.drafters.text.ngrams import (
    NUM_SUCCESSORS,
    UNIGRAM_SHARE,
    UNSEEN_SHARE,
    BigramDrafter,
    NgramEngine,
)
from outrider.runtime.drafters.text.suffix_array import Datastore, write_datastore
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import sequence_probs

from tests.engines.sampling.chosen_noise import law_of
from tests.mutants import assert_caught
from tests.runtime.drafters.model.test_model import row
from tests.runtime.drafters.test_laws import MAX_ERROR, Trailing
from tests.runtime.markov import LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

V = 200
RNG = np.random.default_rng(3)
# Token 0 has more successors than a row takes, token 199 none, and 198 does not occur.
TEXTS = [
    [token for second in range(1, 120) for token in (0, second)] + [0, 7, 0, 7, 0, 9],
    RNG.integers(0, 150, 300).tolist(),
    [150, 199],
    [5],
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    write_datastore(TEXTS, folder, vocab_size=V)
    return Datastore.open(folder, vocab_size=V)


def unigram() -> np.ndarray:
    counts = Counter(token for text in TEXTS for token in text)
    total = sum(counts.values())
    seen = np.array([counts[token] / total for token in range(V)])
    return (1.0 - UNSEEN_SHARE) * seen + UNSEEN_SHARE / V


def bigram(last: int) -> np.ndarray:
    pairs = Counter(b for text in TEXTS for a, b in pairwise(text) if a == last)
    best = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:NUM_SUCCESSORS]
    if not best:
        return unigram()
    probs = UNIGRAM_SHARE * unigram()
    for token, count in best:
        probs[token] += (1.0 - UNIGRAM_SHARE) * count / sum(count for _, count in best)
    return probs


def span(slot: int, tokens: tuple[int, ...], num_logits: int) -> Span:
    return Span(slot=slot, start=3, tokens=tokens, num_logits=num_logits)


@pytest.mark.parametrize("order", [1, 2])
def test_rows_are_the_distributions_that_counting_gives(store: Datastore, order: int) -> None:
    engine = NgramEngine(store, order)
    tokens = tuple(range(V))
    logits = engine.extend([span(0, (0, 5), 1), span(1, (), 0), span(2, tokens, V)])
    assert logits.shape == (3, V, V) and logits.dtype == np.float32
    expected = {last: unigram() if order == 1 else bigram(last) for last in tokens}
    assert np.allclose(np.exp(logits[0, 0]), expected[5], atol=1e-7)
    for last in tokens:
        assert np.allclose(np.exp(logits[2, last]), expected[last], atol=1e-7)
        assert expected[last].sum() == pytest.approx(1.0) and np.isfinite(logits[2, last]).all()


def test_a_row_is_the_same_however_often_it_is_asked_for(store: Datastore) -> None:
    engine = NgramEngine(store, 2)
    first = engine.extend([span(0, (0,), 1)]).copy()
    engine.extend([span(0, (7,), 1)])
    assert np.array_equal(engine.extend([span(0, (0,), 1)]), first)


def drafter_of(store: Datastore) -> BigramDrafter:
    sampler = CpuSampler(max_batch=3, max_gamma=6, vocab_size=V)
    return BigramDrafter(DrafterParts(draft=None, sampler=sampler, vocab_size=V, chunk=4), store)


def test_greedy_drafts_are_the_most_frequent_successors(store: Datastore) -> None:
    rows = [row(0, [3] * 50 + [0]), row(1, [1], gamma=0), row(2, [9, 0], gamma=1)]
    first, last = drafter_of(store).propose(rows, [0, 2])
    chain = [0]
    for _ in range(3):
        chain.append(int(bigram(chain[-1]).argmax()))
    assert first.tokens == tuple(chain[1:]) and last.tokens == (chain[1],)
    assert not first.is_sampled


def test_the_draft_models_cache_stays_as_it_is(store: Datastore) -> None:
    (draft,) = drafter_of(store).propose([row(0, [4, 0], num_computed=1, temperature=1.0)], [0])
    assert len(draft.tokens) == 3 and draft.is_sampled
    assert draft.num_computed is None


def test_a_source_is_none_of_its_business(store: Datastore) -> None:
    """Of a model with an encoder, nothing is read, and the row still has it to read for its draft model."""
    asked = replace(row(0, [4, 0]), source=tuple(range(100)), num_computed=-1)
    (draft,) = drafter_of(store).propose([asked], [0])
    assert len(draft.tokens) == 3 and draft.num_computed is None


@pytest.mark.parametrize("has_corpus", [True, False])
def test_a_server_with_a_corpus_and_a_sampler_on_the_host_has_them(
    has_corpus: bool, tmp_path: Path
) -> None:
    write_datastore(TEXTS, tmp_path / "store", vocab_size=V)
    config = DraftingConfig(datastore=str(tmp_path / "store") if has_corpus else "")
    host = CpuSampler(max_batch=1, max_gamma=6, vocab_size=V)

    class OnADevice:
        """Samples where the logits are, and draws no children."""

        propose, judge = host.propose, host.judge

    for sampler in (host, OnADevice()):
        parts = DrafterParts(draft=None, sampler=sampler, vocab_size=V, chunk=4, config=config)
        found = {"unigram", "bigram"} & set(build_drafters(parts))
        assert found == ({"unigram", "bigram"} if has_corpus and sampler is host else set())


TABLE = np.array([[0.3, 0.7], [0.8, 0.2]])


def answer(
    noise: object, name: str, drafting: DraftingConfig, *, is_block: bool
) -> tuple[int, tuple[int, ...]]:
    """Tokens that were drafted, and those of an answer of three tokens, drafted two at a time."""

    def target(prefix: tuple[int, ...]) -> np.ndarray:
        return np.log(TABLE[prefix[-1]]).astype(np.float32)

    engines = ServedEngines(
        target=ScriptedEngine(target, replace(limits(2), max_batch=1)),
        draft=None,
        sampler=Trailing(noise, vocab_size=2),
        max_gamma=2,
    )
    config = ServerConfig(prefill_chunk=2, block_verification=is_block, drafting=drafting)
    worker = Worker(engines, config=config, decoder=LetterDecoder())
    events: list[object] = []
    params = SpeculationParams(drafter=name, gamma=2)
    worker.submit(
        spec("a", (0, 1, 0), max_tokens=3, temperature=1.0, speculation=params), events.append
    )
    while worker.run_step():
        pass
    steps = [event for event in events if isinstance(event, Progressed)]
    num_drafted = sum(len(step.trace.draft_tokens) for step in steps)
    return num_drafted, tuple(token.token for step in steps for token in step.tokens)


def test_counts_of_parts_are_those_of_the_whole(
    store: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [int((store.tokens == token).sum()) for token in range(store.vocab_size)]
    for together in (1, 3, len(store.tokens)):
        monkeypatch.setattr(suffix_array, "COUNTED_TOGETHER", together)
        assert store.counts().tolist() == whole


@pytest.mark.usefixtures("corpora_opened_once")
@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("name", ["unigram", "bigram"])
def test_answers_have_the_targets_law(name: str, is_block: bool, tmp_path: Path) -> None:
    write_datastore([[0, 1, 0, 1, 1, 0, 0, 1]], tmp_path / "store", vocab_size=2)
    drafting = DraftingConfig(datastore=str(tmp_path / "store"))
    most = 0

    def run(noise: object) -> tuple[int, ...]:
        nonlocal most
        num_drafted, tokens = answer(noise, name, drafting, is_block=is_block)
        most = max(most, num_drafted)
        return tokens

    found = law_of(run)
    assert most >= 2
    assert (
        distance(found, sequence_probs(lambda prefix: TABLE[prefix[-1] if prefix else 0], 3))
        < MAX_ERROR
    )


MUTANTS = {
    "the unigram's share is not added to successors": (
        "* seen + UNIGRAM_SHARE * unigram[ids]",
        "* seen",
        lambda store: test_rows_are_the_distributions_that_counting_gives(store, 2),
    ),
    "any successors instead of the most frequent": (
        "np.argsort(-counts",
        "np.argsort(counts",
        lambda store: test_rows_are_the_distributions_that_counting_gives(store, 2),
    ),
    "a token that nothing follows has a tenth of a distribution": (
        "self._base if len(ids) else self._log_unigram",
        "self._base",
        lambda store: test_rows_are_the_distributions_that_counting_gives(store, 2),
    ),
    "tokens that do not occur are impossible": (
        " + UNSEEN_SHARE / store.vocab_size",
        "",
        lambda store: test_rows_are_the_distributions_that_counting_gives(store, 1),
    ),
    "the first of a span's tokens, not the last": (
        "span.tokens[len(span.tokens) - span.num_logits :]",
        "span.tokens[: span.num_logits]",
        lambda store: test_rows_are_the_distributions_that_counting_gives(store, 2),
    ),
    "the draft model's cache is said to hold what it never read": (
        "replace(one, num_computed=None)",
        "one",
        lambda store: test_the_draft_models_cache_stays_as_it_is(store),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, store: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, killer = MUTANTS[name]
    with np.errstate(divide="ignore"):
        assert_caught(monkeypatch, ngrams, old, new, lambda: killer(store))
