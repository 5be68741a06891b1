"""What drafts would have brought on answers is what they bring when these are served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.text.suffix_array import write_datastore
from outrider.runtime.offline.distill import replay
from outrider.runtime.offline.distill.answers import Written, write_answers
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.rig import Rig, RigOptions, open_rig

from tests.mutants import assert_caught
from tests.runtime.offline.distill.conftest import MAX_TOKENS


@pytest.fixture(scope="module")
def written(rig: Rig, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return write_answers(
        rig, prompts, file, num_answers=2, max_tokens=MAX_TOKENS, most_s=1e9, report=lambda *_: None
    )  # fmt: skip


def held_out(written: list[Written]) -> Written:
    (found,) = [one for one in written if one.is_held_out and one.is_greedy]
    return found


@pytest.fixture(scope="module")
def corpus(written: list[Written], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out answer, in which every fifth token is another."""
    folder = tmp_path_factory.mktemp("corpora") / "corpus"
    tokens = [
        2 if place % 5 == 4 else token for place, token in enumerate(held_out(written).answer)
    ]
    write_datastore([tokens], folder, vocab_size=512)
    return folder


def served(rig: Rig, corpus: Path, one: Written, name: str, gamma: int) -> tuple[int, int]:
    """Return tokens behind the first and passes of a greedy answer that is served with drafts."""
    drafting = DraftingConfig(datastore=str(corpus), history_scope=HistoryScope.REQUEST)
    opened = open_rig(rig.bundle.root, RigOptions(max_batch=1, drafting=drafting))
    try:
        params = SamplingParams(temperature=0.0, end_token_ids=rig.bundle.manifest.eos_token_ids)
        (end,), _ = opened.run(
            [one.tokens[: one.num_prompt]], params, SpeculationParams(drafter=name, gamma=gamma), MAX_TOKENS
        )  # fmt: skip
    finally:
        opened.close()
    return end.report.num_emitted, end.report.num_steps


def test_passes_are_those_that_serving_takes(
    rig: Rig, corpus: Path, written: list[Written]
) -> None:
    held, ends = held_out(written), rig.bundle.manifest.eos_token_ids
    drafters = replay.drafters_with(rig, corpus)
    costs = replay.step_costs(rig, written, is_greedy=True)
    for name, gamma in (("suffix", 2), ("datastore", 3), ("suffix+datastore", 8)):
        one = replay.replay(name, drafters, gamma, [held], costs, ends)
        assert (one.tokens[0], one.passes[0]) == served(rig, corpus, held, name, gamma)
        assert (one.passes[0] < one.tokens[0]) is ("datastore" in name)
        assert one.tokens_per_pass == one.tokens[0] / one.passes[0]


def test_each_drafter_is_told_at_its_best_gamma(
    rig: Rig, corpus: Path, written: list[Written]
) -> None:
    found = replay.compare(rig, corpus, written)
    drafters, ends = replay.drafters_with(rig, corpus), rig.bundle.manifest.eos_token_ids
    assert set(found) == {True, False}
    for is_greedy, rows in found.items():
        held = [one for one in written if one.is_held_out and one.is_greedy is is_greedy]
        costs = replay.step_costs(rig, written, is_greedy=is_greedy)
        for name, one in zip(replay.NAMES, rows, strict=True):
            every = [
                replay.replay(name, drafters, gamma, held, costs, ends).speedup
                for gamma in range(1, 9)
            ]
            assert (one.name, one.speedup, every[one.gamma - 1]) == (name, max(every), max(every))


def test_a_replay_counts_measured_seconds(rig: Rig, corpus: Path, written: list[Written]) -> None:
    costs = replay.step_costs(rig, written, is_greedy=True)
    suffix = replay.compare(rig, corpus, written)[True][0]
    assert suffix.plain_s[0] == pytest.approx(suffix.tokens[0] * costs.step_s(1))
    assert suffix.drafted_s[0] >= suffix.passes[0] * costs.step_s(1)
    two = replace(suffix, tokens=(9, 9), passes=(3, 9), plain_s=(3.0, 3.0), drafted_s=(1.0, 3.0))
    assert two.words().split()[2:] == ["1.500", "[1.000,", "3.000]", "1.500", "[1.000,", "3.000]"]


MUTANTS = {
    "a pass emits what it keeps": ("place += kept + 1", "place += max(kept, 1)"),
    "a draft sees a token more": ("text=text[:place],", "text=text[: place + 1],"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, rig: Rig, corpus: Path, written: list[Written]
) -> None:
    def caught() -> None:
        test_passes_are_those_that_serving_takes(rig, corpus, written)

    assert_caught(monkeypatch, replay, *MUTANTS[name], caught)
