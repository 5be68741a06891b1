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
import typer

import scripts.lab.peers.jobs
from scripts.lab.bench.peers import Rounds, gammas_of
from scripts.lab.peers.cells import Cell, best_rows, cells_of
from scripts.lab.peers.jobs import FOLDER, PEERS, Job, ask, python_of
from scripts.tools.common import names_of
from scripts.tools.results import Recorder, parse_result
from scripts.tools.tables import rich_table

PROMPTS = [[5, 9, 31, 7, 100, 12], [200, 44, 3, 8, 8, 61]]
ECHO = """
from peer_job import FixedGammaError, main, refuse_unless

def load(job):
    if job["gamma"] == 3:
        refuse_unless(job, "lookup")
    if job["gamma"] == 6:
        raise FixedGammaError
    if job["gamma"] == 5:
        raise RuntimeError("the engine broke")
    return lambda prompts: [prompt[: job["max_tokens"] - job["gamma"]] for prompt in prompts]

main(load)
"""


def job_of(work: Path, *, gamma: int = 0, batch: int = 1, **changes: Any) -> Job:
    values = {
        "target": "", "draft": "", "work": str(work), "weights": "float32", "threads": 1,
        "drafter": "model" if gamma else None, "gamma": gamma, "ngram": 2, "batch": batch, "prompts": PROMPTS,
        "max_tokens": 4,
    }  # fmt: skip
    return Job(**{**values, **changes})


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A peer that answers with its prompt's first tokens."""
    (tmp_path / "peers" / "echo").mkdir(parents=True)
    (tmp_path / "peers" / "shared").symlink_to(FOLDER / "shared")
    (tmp_path / "peers" / "echo" / "run.py").write_text(ECHO)
    monkeypatch.setattr(scripts.lab.peers.jobs, "FOLDER", tmp_path / "peers")
    return "echo"


def test_a_peer_answers_every_prompt_in_batches(echo: str, tmp_path: Path) -> None:
    for batch in (1, 2):
        answer = ask(echo, sys.executable, job_of(tmp_path, batch=batch))
        assert answer["outputs"] == [prompt[:4] for prompt in PROMPTS]
        assert answer["seconds"] > 0


@pytest.mark.parametrize(
    ("gamma", "answer"),
    [
        (3, {"reason": "has no drafter model", "is_unable": True}),
        (6, {"reason": "does not choose gamma of drafter model"}),
        (5, {"reason": "failed: RuntimeError: the engine broke"}),
        (1, {"reason": "made [3] tokens instead of 4"}),
    ],
)
def test_a_peer_that_cannot_says_why(
    echo: str, tmp_path: Path, gamma: int, answer: dict[str, Any]
) -> None:
    assert ask(echo, sys.executable, job_of(tmp_path, gamma=gamma)) == answer


def test_a_peer_that_cannot_be_set_up_is_a_reason() -> None:
    python, reason = python_of("nobody")
    assert python is None
    assert reason == "cannot be installed: setup: there is no peer 'nobody'"


def test_every_peer_has_what_setting_up_and_running_need() -> None:
    for peer in PEERS:
        assert (FOLDER / peer / "run.py").exists()
        assert peer == "outrider" or (FOLDER / peer / "requirements.txt").exists()


def test_a_round_asks_nobody_again_who_could_not() -> None:
    asked = []

    def answer(cell: Cell) -> dict[str, Any]:
        asked.append(cell)
        if cell.drafter == "lookup":
            return {"reason": "has no drafter lookup", "is_unable": True}
        if cell.gamma == 3:
            return {"reason": "failed: three"}
        return {"seconds": 1.0, "outputs": [[1] * (1 + cell.gamma)]}

    cells = cells_of({"genai": ["model", "lookup"]}, "float32", 1, [2, 3])
    found = Rounds(answer)
    found.run_all(cells, rounds=2, keep=1)
    ways = [cell.way for cell in asked]
    first = ["plain", "model gamma 2", "lookup gamma 2", "model gamma 3"]
    assert ways == [*first, "model gamma 2", "plain"]
    told = {str(row.case["way"]): row.figures for row in found.rows()}
    assert list(told) == ["plain", "model gamma 2", "lookup", "model gamma 3"]
    assert told["model gamma 2"]["rounds"] == 2
    assert told["model gamma 2"]["tokens_per_s"] == 3.0
    assert told["lookup"] == {"tokens_per_s": None, "reason": "has no drafter lookup"}
    assert told["model gamma 3"]["reason"] == "failed: three"


def test_what_all_rounds_found_is_one_result_and_two_tables() -> None:
    seconds = {"outrider": 1.0, "genai": 2.0}

    def answer(cell: Cell) -> dict[str, Any]:
        return {"seconds": seconds[cell.who], "outputs": [[1, 2, 3, 4]]}

    cells = cells_of({"outrider": ["suffix+model"], "genai": ["model"]}, "float32", 8, [4])
    found = Rounds(answer)
    found.run_all(cells, rounds=1, keep=1)
    best = best_rows(cells, found.answers)
    assert rich_table(found.rows()).row_count == 4
    shown = {
        str(column.header).replace(" ", "_"): list(column.cells)
        for column in rich_table(best).columns
    }
    assert shown["best_of"] == ["plain"] * 2 + ["drafting"] * 2 + ["any"] * 2
    assert [shown[name] for name in ("ours_to_this", "ratio_least", "ratio_most")] == [
        ["", "2"] * 3
    ] * 3
    assert shown["is_fastest_peer"] == ["False", "True"] * 3
    result = Recorder("peers", "side by side", 1).result([*found.rows(), *best], {})
    assert parse_result(json.loads(json.dumps(asdict(result)))).rows == result.rows


def test_lists_of_the_command_line_are_checked() -> None:
    assert names_of("model,lookup+model,model") == ["model", "lookup+model"]
    assert names_of("") == []
    assert gammas_of("2,auto") == [2, None]
    with pytest.raises(typer.BadParameter, match="eagle: not among model, lookup"):
        names_of("model,eagle", ("model", "lookup"))
    with pytest.raises(ValueError, match="'x'"):
        gammas_of("2,x")


def peer_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("shared", name):
        monkeypatch.syspath_prepend(str(FOLDER / folder))
    monkeypatch.delitem(sys.modules, "ways", raising=False)
    spec = importlib.util.spec_from_file_location(f"peer_{name}", FOLDER / name / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ours_and_transformers_make_the_same_tokens_in_every_way(
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
    plain, drafted, looked_up = (None, 0), ("model", 2), ("lookup", 3)
    found = {}
    for way, batch in ((plain, 1), (drafted, 1), (("suffix+model", 2), 2), (("model", None), 1)):
        job = job_of(
            tmp_path / "outrider", drafter=way[0], gamma=way[1], batch=batch, **sizes, **pair
        )
        found["outrider", way, batch] = ask("outrider", sys.executable, job)["outputs"]
    for way, batch in ((plain, 1), (drafted, 1), (looked_up, 1), (plain, 2)):
        job = job_of(tmp_path, drafter=way[0], gamma=way[1], batch=batch, **sizes, **pair)
        run = module.load(asdict(job))
        outputs = [run(PROMPTS[first : first + batch]) for first in range(0, 2, batch)]
        found["transformers", way, batch] = [row for rows in outputs for row in rows]
    assert all(len(output) == 12 for outputs in found.values() for output in outputs)
    assert len({json.dumps(outputs) for outputs in found.values()}) == 1


def test_ours_and_transformers_translate_alike_and_up_to_the_length_asked_for(
    tiny_text2text_checkpoints: tuple[Path, Path],
    tiny_text2text_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = tmp_path / "outrider" / "target-float32"
    ours.mkdir(parents=True)
    (ours / "bundle").symlink_to(tiny_text2text_bundle)
    (ours / "done").touch()
    target, draft = map(str, tiny_text2text_checkpoints)
    module = peer_module("transformers", monkeypatch)
    found = {}
    for drafter, gamma in ((None, 0), ("model", 2)):
        job = job_of(
            tmp_path / "outrider", drafter=drafter, gamma=gamma, max_tokens=12, reads_source=True,
            threads=torch.get_num_threads(), target=target, draft=draft,
        )  # fmt: skip
        found["outrider", drafter] = ask("outrider", sys.executable, job)["outputs"]
        run = module.load(asdict(job))
        found["transformers", drafter] = [run([prompt])[0] for prompt in PROMPTS]
    assert all(len(output) == 12 for outputs in found.values() for output in outputs)
    assert len({json.dumps(outputs) for outputs in found.values()}) == 1
