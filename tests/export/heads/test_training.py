"""A head learns what its target answers, goes on after a kill, and is read back as it was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.heads import training as heads
from outrider.export.heads.checkpoint import is_head, open_head
from outrider.export.heads.part import head_beside
from outrider.export.heads.reference import features_of, head_answers
from outrider.export.heads.texts import Lesson, Text, batch_of, frequent_ids, read_lessons
from outrider.export.heads.training import JUDGED, TENTHS, HeldOut, Training
from transformers import PreTrainedModel

from tests.mutants import assert_caught

NUM_IDS, LENGTH, NUM_PROMPT = 300, 40, 6


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: tuple[Path, Path]) -> Checkpoint:
    return open_checkpoint(tiny_checkpoints[0], max_context=None)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> PreTrainedModel:
    return heads.teacher(checkpoint)


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel) -> list[Text]:
    """Answers by the model itself, every fourth held out, half of them greedy."""
    torch.manual_seed(0)
    prompts = torch.randint(2, 512, (24, NUM_PROMPT))
    lessons = []
    for number, prompt in enumerate(prompts):
        is_greedy = number % 8 < 4
        with torch.no_grad():
            tokens = model.generate(
                prompt[None], max_length=LENGTH - number % 3, do_sample=not is_greedy, pad_token_id=1, eos_token_id=None
            )[0].tolist()  # fmt: skip
        lessons.append(
            Lesson(tokens=tokens, num_prompt=NUM_PROMPT, is_greedy=is_greedy, is_held_out=number % 4 == 0)
        )  # fmt: skip
    return read_lessons(model, heads.taps_of(model), lessons)


@pytest.fixture
def begun(model: PreTrainedModel, texts: list[Text]) -> Callable[[Path], Training]:
    return lambda folder: heads.begin(model, frequent_ids(texts, 512, NUM_IDS), folder)


def train(
    training: Training, texts: list[Text], folder: Path, until: int = TENTHS
) -> list[HeldOut]:
    """Train for ten batches in each tenth, until so many are done; return what each was judged."""

    def report(now: Training) -> None:
        if now.num_done >= until:
            raise KeyboardInterrupt

    seconds = count()
    clock = lambda: next(seconds)  # noqa: E731
    try:
        heads.train(training, texts, folder, seconds=100.0, report=report, clock=clock)
    except KeyboardInterrupt:
        assert until
    return [one for _, one in training.judged]


def test_a_head_that_was_killed_is_trained_as_one_that_was_not(
    begun: Callable[[Path], Training], texts: list[Text], tmp_path: Path
) -> None:
    train(begun(tmp_path / "whole"), texts, tmp_path / "whole")
    train(begun(tmp_path / "killed"), texts, tmp_path / "killed", until=1)
    again = begun(tmp_path / "killed")
    assert again.num_done == 1
    judged = train(again, texts, tmp_path / "killed")
    assert len(judged) > 2
    one, other = (open_head(tmp_path / name / "head") for name in ("whole", "killed"))
    assert all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())
    assert begun(tmp_path / "killed").num_done == TENTHS


def test_a_head_learns_and_is_read_back_as_it_was_trained(
    begun: Callable[[Path], Training],
    texts: list[Text],
    tmp_path: Path,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
) -> None:
    training = begun(tmp_path)
    before = heads.judge(training, texts)
    train(training, texts, tmp_path)
    after = heads.judge(training, texts)
    for is_greedy in (True, False):
        old, new = (one.alphas(is_greedy=is_greedy)[0][0] for one in (before, after))
        assert new > old + 0.02
    assert is_head(tmp_path / "head")
    part = head_beside(tmp_path / "head", checkpoint)
    assert part.taps == heads.taps_of(model)
    text = texts[0]
    with torch.no_grad():
        streams = text.streams.float()
        assert torch.equal(part.inlet(streams), training.inlet(streams))
        own = heads._drafts(training, batch_of([text]), 1)[0][1]
        features = features_of(part.checkpoint, list(streams.chunk(3, dim=-1)))
        wanted, _ = head_answers(part.checkpoint, part.embedding, features[:-1], text.tokens[1:])
    torch.testing.assert_close(
        own, wanted[NUM_PROMPT - 1 : -1].log_softmax(-1), rtol=1e-3, atol=1e-3
    )


def test_ids_are_the_likeliest_of_answers_that_are_learnt_from(texts: list[Text]) -> None:
    counts = Counter(
        token
        for text in texts
        for row in text.best[NUM_PROMPT - 1 :, :4].tolist()
        for token in row
        if not text.lesson.is_held_out
    )
    found = frequent_ids(texts, 512, 50).tolist()
    assert found == sorted(found) and len(set(found)) == 50
    least = min(counts[token] for token in found)
    assert all(count <= least for token, count in counts.items() if token not in found)
    assert (
        frequent_ids(texts[:1] + texts[1:2], 512, 50).tolist()
        == frequent_ids(texts[1:2], 512, 50).tolist()
    )


def slow_judgement(training: Training, text: Text) -> tuple[list[float], list[float]]:
    """What is kept by step, and by step with all before it, place by place in float64."""
    ids = training.checkpoint.target_ids
    assert ids is not None
    num_rows = len(text.tokens) - 1
    target = torch.zeros(num_rows, 512, dtype=torch.float64)
    target.scatter_(1, text.best[1:], text.probs[1:].double())
    with torch.no_grad():
        features = training.inlet(text.streams.float())[:-1]
        kept = torch.zeros(JUDGED, num_rows, dtype=torch.float64)
        for step in range(JUDGED):
            training.own.features = features[None]
            places = torch.arange(num_rows)[None]
            logits = training.own(text.tokens[None, 1:], places).logits[0]
            draft = logits.double().softmax(-1)
            if text.lesson.is_greedy:
                kept[step] = draft.argmax(-1) == target.argmax(-1)
            else:
                kept[step] = torch.minimum(draft, target).sum(-1)
            assert training.own.recycled is not None
            features = torch.cat([features[:1], training.own.recycled[0, :-1]])
    sums, chains = [0.0] * JUDGED, [0.0] * JUDGED
    # Row t judges the token behind token t + 1; a draft begins behind the answer's first token.
    for first in range(NUM_PROMPT - 1, num_rows - JUDGED):
        chain = 1.0
        for step in range(JUDGED):
            chain *= float(kept[step, first + step])
            sums[step] += float(kept[step, first + step])
            chains[step] += chain
    return sums, chains


def test_a_judgement_is_what_each_place_says(
    begun: Callable[[Path], Training], texts: list[Text], tmp_path: Path
) -> None:
    training = begun(tmp_path)
    found = heads.judge(training, texts[:8])
    for number, text in enumerate(texts[:8]):
        sums, chains = slow_judgement(training, text)
        assert found.num_places[number] == len(text.tokens) - NUM_PROMPT - JUDGED
        np.testing.assert_allclose(found.kept[number], sums, rtol=1e-4)
        np.testing.assert_allclose(found.chains[number], chains, rtol=1e-4)
    greedy = found.is_greedy
    for gamma in (1, JUDGED):
        tokens, interval = found.tokens_per_pass(gamma, is_greedy=True)
        places = found.num_places[greedy].sum()
        assert tokens == pytest.approx(1 + found.chains[greedy, :gamma].sum() / places)
        assert interval is not None and interval[0] <= tokens <= interval[1]


@pytest.mark.parametrize(
    ("swing", "wanted"),
    [(0.0, [1, heads.CONSTANT, TENTHS - 1, TENTHS]), (0.1, list(range(1, TENTHS + 1)))],
)
def test_training_that_certainly_gains_nothing_goes_on_to_its_last_part(
    begun: Callable[[Path], Training], texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    swing: float, wanted: list[int],
) -> None:  # fmt: skip
    """Which texts that swing about nothing are not certain of."""
    same = heads.judge(begun(tmp_path / "none"), texts)
    signs = swing * np.resize([1.0, -1.0], (len(texts), 1)) * same.num_places[:, None]
    judgements = cycle([same, replace(same, kept=same.kept + signs)])
    monkeypatch.setattr(heads, "judge", lambda *_: next(judgements))
    done: list[int] = []
    seconds = count()
    heads.train(
        begun(tmp_path), texts, tmp_path, seconds=20.0,
        report=lambda now: done.append(now.num_done), clock=lambda: next(seconds),
    )  # fmt: skip
    assert done == wanted


MUTANTS = {
    "a row of a later step begins where the first does": (
        "            for _ in range(step):\n",
        "            for _ in range(0):\n",
    ),
    "features of the same token, not of the one before": (
        "[features[:, :1], own.recycled[:, :-1]]",
        "[own.recycled[:, :-1], own.recycled[:, -1:]]",
    ),
    "the feature of a token beside it": (
        "training.inlet(batch.streams.float())[:, :-1]",
        "training.inlet(batch.streams.float())[:, 1:]",
    ),
    "ids without a place count": ("(ids < num_ids) * batch", "1 * batch"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    begun: Callable[[Path], Training],
    texts: list[Text],
    tmp_path: Path,
) -> None:
    def caught() -> None:
        test_a_judgement_is_what_each_place_says(begun, texts, tmp_path)

    assert_caught(monkeypatch, heads, *MUTANTS[name], caught)
