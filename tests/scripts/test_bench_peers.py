"""Peers answer in their own processes or say why not, and ours and Transformers' say the same."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import scripts.bench_peers
from scripts.bench_peers import (
    FOLDER,
    PEERS,
    Cell,
    Job,
    ask,
    python_of,
    reference_of,
    row_of_cell,
    same_share,
)

PROMPTS = [[5, 9, 31, 7, 100, 12], [200, 44, 3, 8, 8, 61]]
ECHO = """
from peer_job import UnableError, main

def load(job):
    if job["gamma"] == 3:
        raise UnableError("three is too many")
    if job["gamma"] == 5:
        raise RuntimeError("the engine broke")
    return lambda prompts: [prompt[: job["max_tokens"] - job["gamma"]] for prompt in prompts]

main(load)
"""


def job_of(work: Path, *, gamma: int = 0, batch: int = 1, **changes: Any) -> Job:
    values = {
        "target": "", "draft": "", "work": str(work), "weights": "float32", "threads": 1, "gamma": gamma,
        "batch": batch, "prompts": PROMPTS, "max_tokens": 4,
    }  # fmt: skip
    return Job(**{**values, **changes})


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A peer that answers with its prompt's first tokens."""
    (tmp_path / "peers" / "echo").mkdir(parents=True)
    (tmp_path / "peers" / "shared").symlink_to(FOLDER / "shared")
    (tmp_path / "peers" / "echo" / "run.py").write_text(ECHO)
    monkeypatch.setattr(scripts.bench_peers, "FOLDER", tmp_path / "peers")
    return "echo"


@pytest.mark.parametrize(("counts_processor", "seconds"), [(True, 100), (False, 7)])
def test_seconds_are_of_the_clock_that_was_asked_for(
    echo: str, tmp_path: Path, counts_processor: bool, seconds: int
) -> None:
    stepped = """
import itertools, time
time.process_time = itertools.count(0, 100).__next__
time.perf_counter = itertools.count(0, 7).__next__
"""
    (tmp_path / "peers" / echo / "run.py").write_text(stepped + ECHO)
    answer = ask(echo, sys.executable, job_of(tmp_path / "work", counts_processor=counts_processor))
    assert answer["seconds"] == seconds


def test_a_peer_answers_every_prompt_in_batches(echo: str, tmp_path: Path) -> None:
    for batch in (1, 2):
        answer = ask(echo, sys.executable, job_of(tmp_path, batch=batch))
        assert answer["outputs"] == [prompt[:4] for prompt in PROMPTS]
        assert answer["seconds"] > 0


@pytest.mark.parametrize(
    ("gamma", "reason"),
    [
        (3, "three is too many"),
        (5, "failed: RuntimeError: the engine broke"),
        (1, "made [3] tokens instead of 4"),
    ],
)
def test_a_peer_that_cannot_says_why(echo: str, tmp_path: Path, gamma: int, reason: str) -> None:
    assert ask(echo, sys.executable, job_of(tmp_path, gamma=gamma)) == {"reason": reason}


def test_a_peer_that_cannot_be_set_up_is_a_reason() -> None:
    python, reason = python_of("nobody")
    assert python is None
    assert reason == "cannot be installed: setup: there is no peer 'nobody'"


def test_every_peer_has_what_setting_up_and_running_need() -> None:
    for peer in PEERS:
        assert (FOLDER / peer / "run.py").exists()
        assert peer == "outrider" or (FOLDER / peer / "requirements.txt").exists()


def test_speeds_are_medians_and_tokens_are_compared_to_the_first_difference() -> None:
    plain = Cell(who="outrider", weights="float32", batch=1, gamma=0)
    drafted = Cell(who="outrider", weights="float32", batch=1, gamma=2)
    answers = {
        plain: [{"seconds": 1.0, "outputs": [[1, 2, 3, 4], [5, 6, 7, 8]]}],
        drafted: [
            {"seconds": seconds, "outputs": [[1, 2, 3, 4], [5, 0, 7, 8]]} for seconds in (2, 1, 4)
        ],
    }
    reference = reference_of(answers, 1)
    assert reference == answers[plain][0]["outputs"]
    assert same_share([[1, 2, 3, 4], [5, 0, 7, 8]], reference) == 5 / 8
    row = row_of_cell(drafted, answers[drafted], reference)
    assert row.case["way"] == "gamma 2"
    assert row.figures == {
        "tokens_per_s": 4.0, "least": 2.0, "most": 8.0, "same_tokens": 5 / 8, "reason": None,
    }  # fmt: skip
    refused = row_of_cell(plain, [{"reason": "no"}], None)
    assert refused.figures == {"tokens_per_s": None, "reason": "no"}
    assert reference_of({plain: [{"reason": "no"}]}, 1) is None


def peer_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER / "shared"))
    spec = importlib.util.spec_from_file_location(f"peer_{name}", FOLDER / name / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ours_and_transformers_make_the_same_tokens_with_and_without_draft(
    tiny_checkpoints: tuple[Path, Path],
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = tmp_path / "outrider" / "target-float32"
    ours.mkdir(parents=True)
    (ours / "bundle").symlink_to(tiny_bundle)
    (ours / "done").touch()
    sizes = {"max_tokens": 12, "threads": torch.get_num_threads()}
    pair = {"target": str(tiny_checkpoints[0]), "draft": str(tiny_checkpoints[1])}
    module = peer_module("transformers", monkeypatch)
    found = {}
    for gamma, batch in ((0, 1), (2, 1), (2, 2)):
        job = job_of(tmp_path / "outrider", gamma=gamma, batch=batch, **sizes, **pair)
        found["outrider", gamma, batch] = ask("outrider", sys.executable, job)["outputs"]
    for gamma, batch in ((0, 1), (2, 1), (0, 2)):
        run = module.load(asdict(job_of(tmp_path, gamma=gamma, batch=batch, **sizes, **pair)))
        outputs = [run(PROMPTS[first : first + batch]) for first in range(0, 2, batch)]
        found["transformers", gamma, batch] = [row for rows in outputs for row in rows]
    assert all(len(output) == 12 for outputs in found.values() for output in outputs)
    assert len({json.dumps(outputs) for outputs in found.values()}) == 1


def test_transformers_says_what_it_has_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = peer_module("transformers", monkeypatch)
    for changes in ({"weights": "int8"}, {"gamma": 2, "batch": 2}):
        with pytest.raises(module.UnableError):
            module.load(asdict(job_of(tmp_path, **changes)))
