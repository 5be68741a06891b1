"""Engines of others may return logits that are read-only, wider or laid out otherwise: the answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import BeamParams, SpeculationParams

from tests.runtime.markov import PAIRS, Harness, limits, spec

Constraint = Callable[[FloatArray], FloatArray]


def read_only(logits: FloatArray) -> FloatArray:
    logits.setflags(write=False)
    return logits


def with_gaps(logits: FloatArray) -> FloatArray:
    """Every other value of a wider array."""
    return np.repeat(logits, 2, axis=-1)[..., ::2]


FORMS: dict[str, Constraint] = {
    "read-only": read_only,
    "columns first": lambda logits: np.asfortranarray(logits),
    "with gaps": with_gaps,
    "float64": lambda logits: logits.astype(np.float64),
    "float16": lambda logits: logits.astype(np.float16),
}


class FormedEngine(ScriptedEngine):
    """Returns its logits in a form of its own."""

    def __init__(
        self,
        logits_of: Callable[[tuple[int, ...]], FloatArray],
        limits: EngineLimits,
        constraint: Constraint,
    ) -> None:
        super().__init__(logits_of, limits)
        self._constraint = constraint

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        return self._constraint(super().extend(spans))


def exact_in_float16(logits_of):
    return lambda prefix: np.round(logits_of(prefix) * 16.0).astype(np.float32) / 16.0


# What reads logits: each kind of law with each kind of draft, logprobs, likeliest tokens and beams.
LAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.9, frequency_penalty=0.3),
)
DRAFTERS = ("model", "tree", "phrases", "model/lookup", "ouroboros")
MODES = (ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE)


def answers(constraint: Constraint) -> list[tuple[list[int], object]]:
    """Tokens and logprobs of requests of every kind, and the answer of a beam search."""
    vocab_size, target, draft = PAIRS["F4"]
    bounds = replace(limits(vocab_size), max_tree_nodes=12)
    harness = Harness(
        "F4",
        target=FormedEngine(exact_in_float16(target), bounds, constraint),
        draft=FormedEngine(exact_in_float16(draft), bounds, constraint),
        max_queued=200,
    )
    requests = [
        spec(
            f"{number}-{drafter}-{mode}", (1, 2, 3, 1, 2), max_tokens=8, params=params, num_logprobs=2,
            speculation=SpeculationParams(drafter=drafter, gamma=3, mode=mode),
        )
        for number, params in enumerate(LAWS)
        for drafter in DRAFTERS
        for mode in MODES
    ]  # fmt: skip
    searched = spec("beams", (1, 2), max_tokens=6, params=LAWS[0], beams=BeamParams(num_beams=2))
    for request in (*requests, searched):
        harness.events[request.request_id] = received = []
        harness.worker.submit(request, received.append)
    harness.run()
    harness.check_is_idle()
    found: list[tuple[list[int], object]] = []
    for request in requests:
        name = request.request_id
        emitted = [one for event in harness.events[name][:-1] for one in event.tokens]
        assert harness.finished(name).report.off_reason is None, name
        found.append((harness.tokens(name), [one.logprobs for one in emitted]))
    ending = harness.events["beams"][-1]
    assert isinstance(ending, Finished)
    found.append(([], [(one.tokens, one.score) for one in ending.beams]))
    return found


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], object]]:
    return answers(lambda logits: logits)


@pytest.mark.parametrize("constraint", FORMS)
def test_the_form_of_logits_changes_no_answer(
    constraint: str, expected: list[tuple[list[int], object]]
) -> None:
    assert answers(FORMS[constraint]) == expected
