"""Answers of a target to prompts, in a file that a killed run goes on with."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.offline.distill import answers
from outrider.runtime.offline.distill.answers import HELD_OUT, Written, is_greedy, write_answers
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.rig import Rig

from tests.runtime.offline.distill.conftest import MAX_TOKENS


def answered(
    rig: Rig, prompts: Prompts, file: Path, *, most_s: float = 1e9, **options: int
) -> list[Written]:
    seconds = count()
    sizes = {"num_answers": 2, "max_tokens": MAX_TOKENS} | options
    return write_answers(
        rig, prompts, file, most_s=most_s, report=lambda *_: None, clock=lambda: next(seconds), **sizes
    )  # fmt: skip


def test_half_of_the_answers_are_greedy_also_of_those_held_out() -> None:
    for prompts in (range(10 * HELD_OUT), range(HELD_OUT - 1, 10 * HELD_OUT, HELD_OUT)):
        kinds = [is_greedy(prompt, 0) for prompt in prompts]
        assert sum(kinds) == len(kinds) / 2
        assert [is_greedy(prompt, 1) for prompt in prompts] == [not kind for kind in kinds]
        assert not any(is_greedy(prompt, 2) for prompt in prompts)


def test_a_killed_run_goes_on_with_whole_lines(rig: Rig, prompts: Prompts, tmp_path: Path) -> None:
    whole = answered(rig, prompts, tmp_path / "whole.jsonl")
    assert len(whole) == 2 * len(prompts)
    assert {len(one.answer) for one in whole} <= set(range(1, MAX_TOKENS + 1))
    file = tmp_path / "killed.jsonl"
    # The clock is read at the start and before each group: of two, one is answered.
    first = answered(rig, prompts, file, most_s=1)
    assert 0 < len(first) < len(whole)
    file.write_text(file.read_text()[:-5])
    told: list[int] = []
    second = write_answers(
        rig, prompts, file, num_answers=2, max_tokens=MAX_TOKENS, most_s=1e9,
        report=lambda phase, done, total: told.extend((done, total)),
    )  # fmt: skip
    assert [(one.prompt, one.attempt) for one in second] == [
        (one.prompt, one.attempt) for one in whole
    ]
    assert told[0] >= len(first) and set(told[1::2]) == {len(whole)}
    assert [one for one in second if one.is_greedy] == [one for one in whole if one.is_greedy]
    known = {(one.prompt, one.attempt): one for one in second}
    assert all(known[one.prompt, one.attempt] == one for one in first[:-1])
    assert answered(rig, prompts, file, most_s=-1) == second


def test_a_run_that_time_ends_has_answered_prompts_of_all_the_file(
    rig: Rig, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "GROUP", 4)
    found = answered(rig, prompts, tmp_path / "answers.jsonl", most_s=2, num_answers=1)
    assert 0 < sum(one.prompt < len(prompts) / 2 for one in found) < len(found) <= 8


def test_greedy_answers_are_the_servers(rig: Rig, prompts: Prompts, tmp_path: Path) -> None:
    from outrider.engines.sampling.base import SamplingParams
    from outrider.runtime.offline.speed import PLAIN

    found = answered(rig, prompts, tmp_path / "answers.jsonl", num_answers=1)
    params = SamplingParams(temperature=0.0, end_token_ids=rig.bundle.manifest.eos_token_ids)
    for one in found[:4]:
        (wanted,), _ = rig.answer(prompts[one.prompt : one.prompt + 1], params, PLAIN, MAX_TOKENS)
        assert (list(one.answer) == wanted.tokens) is one.is_greedy


def test_answers_to_other_prompts_are_refused(rig: Rig, prompts: Prompts, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    answered(rig, prompts, file, num_answers=1)
    for others, options in ((prompts[::-1], {}), (prompts, {"max_tokens": MAX_TOKENS - 1})):
        with pytest.raises(ConfigError, match="holds answers to other prompts"):
            answered(rig, others, file, **options)


def test_too_few_prompts_are_refused(rig: Rig, prompts: Prompts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be at least 20: one in 20 is held out"):
        answered(rig, prompts[: HELD_OUT - 1], tmp_path / "answers.jsonl")
