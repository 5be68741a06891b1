"""An exported pair's beam searches: Transformers' on the checkpoint, and the same bits beside others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import BeamAnswer
from outrider.runtime.core.params import BeamParams
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tests.addons import needs_accelerators
from tests.runtime.markov import spec
from tests.runtime.pair import PairHarness

PROMPTS = ((5, 200, 31, 77), (400,), tuple(range(60, 80)))
GREEDY = SamplingParams(temperature=0.0, end_token_ids=(1,))


@pytest.fixture(scope="module")
def model(tiny_checkpoints: tuple[Path, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=needs_accelerators)])
def harness(request: pytest.FixtureRequest, tiny_bundle: Path) -> Iterator[PairHarness]:
    harness = PairHarness(tiny_bundle, request.param, max_running=4)
    yield harness
    harness.close()


def transformers_beams(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    beams: BeamParams,
    max_tokens: int,
    end: int,
    **bans: object,
) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and scores, best first, of ``generate``."""
    config = GenerationConfig(
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        do_sample=False,
        max_new_tokens=max_tokens,
        length_penalty=beams.length_penalty,
        early_stopping="never" if beams.is_exhaustive else beams.stops_early,
        eos_token_id=end,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **bans,
    )
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    answers = []
    for row, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        length = row.index(end) + 1 if end in row else len(row)
        answers.append((tuple(row[:length]), score))
    return answers


def answers(
    harness: PairHarness, requests: list[tuple[tuple[int, ...], BeamParams, int, int]]
) -> list[tuple[BeamAnswer, ...]]:
    """What searches that are served together find."""
    for index, (prompt, beams, max_tokens, end) in enumerate(requests):
        params = SamplingParams(temperature=0.0, end_token_ids=(end,))
        harness.submit(spec(str(index), prompt, beams=beams, max_tokens=max_tokens, params=params))
    harness.run()
    snapshot = harness.worker.snapshot()
    assert snapshot.num_free_slots == snapshot.num_slots
    return [harness.finished(str(index)).beams for index in range(len(requests))]


@pytest.mark.parametrize("harness", ["host"], indirect=True)
@pytest.mark.parametrize(
    ("num_beams", "stopping"), [(2, "early"), (3, "by bound"), (4, "never"), (4, "by bound")]
)
def test_the_answers_are_those_of_transformers(
    harness: PairHarness, model: PreTrainedModel, num_beams: int, stopping: str
) -> None:
    """The end token is one that a search without it meets, so that hypotheses finish."""
    num_ended = 0
    for prompt, penalty in zip(PROMPTS, (1.0, -0.5, 2.0), strict=True):
        beams = BeamParams(
            num_beams=num_beams,
            num_results=num_beams,
            length_penalty=penalty,
            stops_early=stopping == "early",
            is_exhaustive=stopping == "never",
        )
        end = transformers_beams(model, prompt, BeamParams(num_beams=2), 4, end=1)[0][0][-1]
        expected = transformers_beams(model, prompt, beams, 8, end)
        (found,) = answers(harness, [(prompt, beams, 8, end)])
        assert [answer.tokens for answer in found] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(
            [answer.score for answer in found], [score for _, score in expected], atol=1e-4
        )
        num_ended += sum(answer.stop == end for answer in found)
    assert num_ended > 0


@pytest.mark.parametrize("harness", ["host"], indirect=True)
def test_bans_are_those_of_transformers(harness: PairHarness, model: PreTrainedModel) -> None:
    """What a search finds first is then banned: its end too early, and a pair of its tokens."""
    beams = BeamParams(num_beams=3, num_results=3)
    prompt = PROMPTS[0]
    free = transformers_beams(model, prompt, beams, 6, end=1)[0][0]
    word, end = free[2:4], free[0]
    bans = {"bad_words_ids": [list(word)], "min_new_tokens": 3}
    expected = transformers_beams(model, prompt, beams, 6, end, **bans)
    params = SamplingParams(temperature=0.0, end_token_ids=(end,), bad_words=(word,), min_tokens=3)
    harness.submit(spec("banned", prompt, beams=beams, max_tokens=6, params=params))
    harness.run()
    found = harness.finished("banned").beams
    assert [answer.tokens for answer in found] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    np.testing.assert_allclose([answer.score for answer in found], scores, atol=1e-4)
    assert found[0].tokens != free


@pytest.mark.parametrize("harness", ["host"], indirect=True)
@pytest.mark.parametrize(("size", "num_allowed"), [(1, 24), (2, 6), (3, 3)])
def test_ngrams_that_are_not_repeated_are_those_of_transformers(
    harness: PairHarness, model: PreTrainedModel, size: int, num_allowed: int
) -> None:
    """Few tokens are allowed, so that a search has to repeat itself; the prompt's own count too."""
    beams = BeamParams(num_beams=3, num_results=3)
    allowed = tuple(range(40, 40 + num_allowed))
    prompt = (*PROMPTS[0], *allowed[:3])
    bans = {"suppress_tokens": sorted({*range(512)} - {*allowed})}
    free = transformers_beams(model, prompt, beams, 12, 1, **bans)
    expected = transformers_beams(model, prompt, beams, 12, 1, no_repeat_ngram_size=size, **bans)
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=allowed, no_repeat_ngram_size=size, end_token_ids=(1,)
    )
    harness.submit(spec(str(size), prompt, beams=beams, max_tokens=12, params=params))
    harness.run()
    found = harness.finished(str(size)).beams
    assert [answer.tokens for answer in found] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    np.testing.assert_allclose([answer.score for answer in found], scores, atol=1e-4)
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in free]


def test_neighbours_change_no_bit(harness: PairHarness) -> None:
    cases = [
        (PROMPTS[index % 3], BeamParams(num_beams=num_beams, num_results=num_beams), 12, 1)
        for index, (num_beams, _) in enumerate(product((1, 2, 3, 4), range(5)))
    ]
    plain = {case[:2]: answers(harness, [case])[0] for case in dict.fromkeys(cases)}
    alone = harness.answers([spec("alone", PROMPTS[0], max_tokens=60, temperature=1.0, gamma=3)])
    harness.submit(spec("beside", PROMPTS[0], max_tokens=60, temperature=1.0, gamma=3))
    together = answers(harness, cases)
    for found, case in zip(together, cases, strict=True):
        assert found == plain[case[:2]]
    assert harness.tokens("beside") == alone[0]


def test_one_beam_that_stops_early_is_greedy_decoding(harness: PairHarness) -> None:
    beams = BeamParams(num_beams=1, stops_early=True)
    for prompt in PROMPTS:
        (greedy,) = harness.answers([spec("greedy", prompt, max_tokens=12, params=GREEDY)])
        (found,) = answers(harness, [(prompt, beams, 12, 1)])
        assert found[0].tokens == greedy
