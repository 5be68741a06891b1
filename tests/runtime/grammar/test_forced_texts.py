"""What a constraint forces: where a grammar leaves one text, its usual tokens alone, and no other spelling of it.

Two laws are enumerated over a vocabulary in which texts have several spellings: that of a mask of every token whose
bytes the grammar allows, and the one that is served. They differ, and the served one is pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TokenizersCodec

from tests.engines.sampling import chosen_noise
from tests.runtime.drafters.test_laws import Trailing
from tests.runtime.grammar.letters import (
    END,
    TEXTS,
    V,
    bits,
    constraint,
    constraints,
    regex,
    tokenizer,
)
from tests.runtime.markov import LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

LANGUAGES = {
    "abc(a|b)": ("abca", "abcb"),
    "(abc|b)": ("abc", "b"),
    "(abcab|b)c": ("abcabc", "bc"),
    "(ab|ba){2}": ("abab", "abba", "baab", "baba"),
    "a(bc|c)": ("abc", "ac"),
}
PROMPT = (0, 1, 2)
LAW = np.array(
    [
        [2, 3, 4, 1, 2, 1],
        [1, 2, 4, 3, 1, 1],
        [3, 1, 2, 4, 1, 1],
        [5, 1, 2, 2, 3, 1],
        [1, 6, 2, 1, 1, 1],
        [1] * V,
    ],
    dtype=np.float64,
)
LAW /= LAW.sum(axis=1, keepdims=True)
Tokens = tuple[int, ...]


def text_of(tokens: Tokens) -> str:
    return "".join(TEXTS[token] for token in tokens if token != END)


def by_bytes(grammar: str, answer: Tokens) -> set[int]:
    """Every token that continues one of the language's texts, and the end behind a whole one."""
    said = text_of(answer)
    allowed = {
        token
        for token, text in enumerate(TEXTS)
        if any(whole.startswith(said + text) for whole in LANGUAGES[grammar])
    }
    return allowed | ({END} if said in LANGUAGES[grammar] else set())


def by_mask(grammar: str, answer: Tokens) -> set[int]:
    one = constraint(grammar)
    one.commit(answer)
    return bits(one.masks(())[0])


def enumerated(grammar: str, allowed: Callable[[str, Tokens], set[int]]) -> dict[Tokens, float]:
    """The law of answers: the model's rows, masked and renormalised, token by token."""
    found: dict[Tokens, float] = {}

    def walk(answer: Tokens, mass: float) -> None:
        if END in answer:
            found[answer] = mass
            return
        tokens = sorted(allowed(grammar, answer))
        row = LAW[(*PROMPT, *answer)[-1]]
        for token in tokens:
            walk((*answer, token), mass * row[token] / row[tokens].sum())

    walk((), 1.0)
    return found


def served(grammar: str) -> dict[Tokens, float]:
    """The law of the worker's answers, by walking every outcome of its noise."""
    engine = ScriptedEngine(lambda prefix: np.log(LAW[prefix[-1]]).astype(np.float32), limits(V))

    def run(noise: chosen_noise.ChosenNoise) -> Tokens:
        events: list[object] = []
        worker = Worker(
            ServedEngines(
                target=engine,
                draft=None,
                sampler=Trailing(noise, V),
                max_gamma=8,
            ),
            config=ServerConfig(default_drafter="none"),
            decoder=LetterDecoder(),
            constraints=constraints(),
        )
        params = SamplingParams(temperature=1.0, end_token_ids=(END,))
        asked = spec("one", PROMPT, max_tokens=8, params=params, grammar=regex(grammar))
        worker.submit(asked, events.append)
        while worker.run_step():
            pass
        progress = [event for event in events if isinstance(event, Progressed)]
        return tuple(one.token for event in progress for one in event.tokens)

    return chosen_noise.law_of(run)


@pytest.mark.parametrize("grammar", LANGUAGES)
def test_a_mask_has_every_spelling_or_the_usual_one_of_a_text_that_must_follow(
    grammar: str,
) -> None:
    codec = TokenizersCodec(tokenizer())
    num_narrowed, answers = 0, [()]
    while answers:
        answer = answers.pop()
        mask, legal = by_mask(grammar, answer), by_bytes(grammar, answer)
        if mask != legal:
            said = text_of(answer)
            rests = [whole[len(said) :] for whole in LANGUAGES[grammar] if whole.startswith(said)]
            assert {codec.encode(rest, False)[0] for rest in rests} == mask < legal
            num_narrowed += 1
        answers += [(*answer, token) for token in mask - {END}]
    assert (num_narrowed > 0) == (grammar in ("abc(a|b)", "(abc|b)", "(abcab|b)c"))


@pytest.mark.parametrize("grammar", LANGUAGES)
def test_the_served_law_is_that_of_the_masks(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Finer than the least probability of a token, 1/16.
    monkeypatch.setattr(chosen_noise, "GRID", [0.0, *(np.arange(32) + 0.5) / 32, 1.0 - 2.0**-53])
    assert distance(served(grammar), enumerated(grammar, by_mask)) < 1e-4


def test_the_law_of_texts_is_not_that_of_all_spellings() -> None:
    """What follows a forced text is conditioned on its usual tokens, and on no other spelling."""

    def prob_of_a(law: dict[Tokens, float]) -> float:
        return sum(mass for answer, mass in law.items() if text_of(answer) == "abca")

    found = {way: prob_of_a(enumerated("abc(a|b)", way)) for way in (by_mask, by_bytes)}
    row = LAW[TEXTS.index("c")]
    assert found[by_mask] == pytest.approx(row[0] / (row[0] + row[1]))
    spellings = {answer[:-2] for answer in enumerated("abc(a|b)", by_bytes)}
    expected = {
        tokens
        for length in (2, 3)
        for tokens in product(range(len(TEXTS)), repeat=length)
        if text_of(tokens) == "abc"
    }
    assert spellings == expected and len(expected) == 3
    assert abs(found[by_mask] - found[by_bytes]) > 0.05
