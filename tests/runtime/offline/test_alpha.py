"""Alpha of real engines against the oracle, position by position."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import Engine, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import Prompt
from outrider.runtime.drafters.base import DraftRow
from outrider.runtime.drafters.chain import ChainDrafter
from outrider.runtime.drafters.text.ngrams import NgramEngine
from outrider.runtime.drafters.text.suffix_array import Datastore, write_datastore
from outrider.runtime.offline.alpha import Text, kept_of_token, measure_alphas, probs_of, text_of
from outrider.runtime.oracle.analysis import lenient_acceptance
from outrider.runtime.oracle.sampling import adjusted_probs
from outrider.runtime.oracle.verification import count_accepted_greedy

TOKENS = (7, 300, 12, 45, 45, 9, 300, 12, 45, 301, 7, 8)
NUM_PROMPT = 4
LENIENCES = (1.0, 0.5, 0.1)
Engines = tuple[Engine, Engine, Engine]


@pytest.fixture(scope="module")
def engines(tiny_bundle: Path) -> Iterator[Engines]:
    bundle = load_bundle(tiny_bundle)
    opened = [open_engine(bundle, name, max_batch=1) for name in ("target", "target", "draft")]
    yield opened[0], opened[1], opened[2]
    for engine in opened:
        engine.close()


def measured(target: Engine, draft: Engine | None, temperature: float, guessers=None):
    texts = [Text(TOKENS, NUM_PROMPT), Text(TOKENS[2:], 1)]
    drafts = {} if draft is None else {"model": draft}
    return measure_alphas(
        target, drafts, guessers or {}, texts, temperature, LENIENCES, lambda *step: None
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafted_by_itself_has_alpha_one(engines: Engines, temperature: float):
    (row,) = measured(engines[0], engines[1], temperature)
    assert row.num_positions == 8 + 9 and row.coverage == 1.0
    assert row.alpha == pytest.approx(1.0, abs=1e-12)
    assert row.lenient == pytest.approx(dict.fromkeys(LENIENCES, 1.0))
    assert row.rejection == pytest.approx(1.0, abs=1e-9) and row.most_tokens is None


def last_row(engine: Engine, tokens: tuple[int, ...]) -> np.ndarray:
    logits = engine.extend([Span(slot=0, start=0, tokens=tokens, num_logits=1)])
    return np.array(logits[0, 0], dtype=np.float64)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_alpha_is_the_mean_of_the_oracle_over_all_positions(engines: Engines, temperature: float):
    target, _, draft = engines
    (row,) = measured(target, draft, temperature)
    params = SamplingParams(temperature=temperature)
    none = np.zeros(0, dtype=np.int64)
    kept = {lenience: [] for lenience in LENIENCES}
    rejection = []
    for tokens, num_prompt in ((TOKENS, NUM_PROMPT), (TOKENS[2:], 1)):
        for position in range(num_prompt, len(tokens)):
            p_row, q_row = (last_row(engine, tokens[:position]) for engine in (target, draft))
            p, q = (adjusted_probs(one, params, none, 0) for one in (p_row, q_row))
            raw = adjusted_probs(p_row, SamplingParams(), none, 0)
            possible = p > 0.0
            rejection.append((q[possible] / p[possible]).min())
            for lenience in LENIENCES:
                if temperature == 0.0:
                    rows = np.stack([raw, raw])
                    one = count_accepted_greedy(np.array([q.argmax()]), rows, lenience=lenience)
                else:
                    one = lenient_acceptance(p, q, lenience)
                kept[lenience].append(one)
    expected = {lenience: float(np.mean(values)) for lenience, values in kept.items()}
    assert row.lenient == pytest.approx(expected, abs=1e-4)
    assert row.alpha == row.lenient[1.0] < 1.0
    assert row.rejection == pytest.approx(np.mean(rejection), abs=1e-4)
    assert row.rejection <= row.alpha and row.most_tokens == 1.0 / (1.0 - row.alpha)


class Unigram(ChainDrafter[list[int]]):
    """Proposes the most frequent token, of equally frequent ones the least: a baseline of the paper."""

    def new_state(self, row: DraftRow) -> list[int]:
        return []

    def push(self, state: list[int], tokens: list[int]) -> None:
        state += tokens

    def extend(self, state: list[int], drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        return (min(set(state), key=lambda token: (-state.count(token), token)),)


def test_a_drafter_without_a_model_is_a_point_mass_at_every_position(engines: Engines):
    target = engines[0]
    (row,) = measured(target, None, 1.0, {"unigram": Unigram()})
    params, none = SamplingParams(), np.zeros(0, dtype=np.int64)
    kept = []
    for tokens, num_prompt in ((TOKENS, NUM_PROMPT), (TOKENS[2:], 1)):
        for position in range(num_prompt, len(tokens)):
            seen = tokens[:position]
            most = min(set(seen), key=lambda token: (-seen.count(token), token))
            kept.append(adjusted_probs(last_row(target, seen), params, none, 0)[most])
    assert row.coverage == 1.0 and row.alpha == pytest.approx(np.mean(kept), abs=1e-6)
    assert row.rejection == 0.0, "the target has other tokens, which this one never draws"


def test_the_fast_probabilities_are_the_oracles():
    logits = np.random.default_rng(0).normal(scale=3.0, size=(5, 40))
    none = np.zeros(0, dtype=np.int64)
    for temperature in (0.0, 0.3, 1.0, 2.0):
        params = SamplingParams(temperature=temperature)
        oracle = [adjusted_probs(row, params, none, 0) for row in logits]
        np.testing.assert_allclose(probs_of(logits, temperature), oracle, atol=1e-12)


def test_a_greedy_target_keeps_what_the_oracle_keeps_ties_included():
    probs = np.array([0.4, 0.4, 0.15, 0.05])
    for lenience in (1.0, 0.5, 0.3, 0.1):
        for token in range(4):
            oracle = count_accepted_greedy(
                np.array([token]), np.stack([probs, probs]), lenience=lenience
            )
            assert kept_of_token(probs, token, lenience, is_greedy=True) == oracle
    point = np.eye(4)[2]
    assert kept_of_token(probs, 2, 1.0, is_greedy=False) == lenient_acceptance(probs, point, 1.0)
    assert kept_of_token(probs, 2, 0.1, is_greedy=False) == 1.0


def test_a_text_ends_with_its_first_end_token():
    assert text_of(Prompt((5, 1)), (7, 1, 8, 1), (1, 2)) == Text((5, 1, 7, 1), 2)
    assert text_of(Prompt((5, 1)), (7, 8), (1, 2)) == Text((5, 1, 7, 8), 2)


def test_an_ngram_model_is_judged_by_its_whole_distribution(engines: Engines, tmp_path: Path):
    """Of a point mass alpha would be p of its likeliest token; of a distribution it is the sum of min(p, q)."""
    target = engines[0]
    size = target.limits.vocab_size
    write_datastore([TOKENS, TOKENS[::-1]], tmp_path / "store", vocab_size=size)
    engine = NgramEngine(Datastore.open(tmp_path / "store", vocab_size=size), 2)
    texts = [Text(TOKENS, NUM_PROMPT)]
    (row,) = measure_alphas(target, {"bigram": engine}, {}, texts, 1.0, (1.0,), lambda *step: None)
    overlaps = []
    for position in range(NUM_PROMPT, len(TOKENS)):
        tokens = TOKENS[:position]
        params, none = SamplingParams(), np.zeros(0, dtype=np.int64)
        p = adjusted_probs(last_row(target, tokens), params, none, 0)
        overlaps.append(np.minimum(p, np.exp(last_row(engine, tokens))).sum())
    assert row.alpha == pytest.approx(np.mean(overlaps), abs=1e-6) and row.coverage == 1.0
