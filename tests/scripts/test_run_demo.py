"""The demo: one prompt with drafts and without, side by side, on a server of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from scripts import run_demo
from scripts.lab.soak.server import wait_for_port
from scripts.run_demo import Answer, comparison, demonstrate, main

DRAFTED = Answer(token_ids=(1, 2, 3, 4), seconds=0.5, tokens_per_pass=2.0)
PLAIN = Answer(token_ids=(1, 2, 3, 4), seconds=1.0, tokens_per_pass=1.0)


def test_two_answers_are_set_side_by_side():
    lines = comparison(DRAFTED, PLAIN, is_greedy=True)
    assert [line.split() for line in lines[:4]] == [
        ["with", "drafts", "without"],
        ["time", "0.500", "s", "1.000", "s"],
        ["tokens", "4", "4"],
        ["tokens", "per", "target", "pass", "2.00", "1.00"],
    ]
    assert lines[4:] == ["speed-up: 2.00", "same tokens: yes"]


def test_other_tokens_are_said_only_where_they_must_be_the_same():
    other = Answer(token_ids=(1, 2, 3, 5), seconds=1.0, tokens_per_pass=1.0)
    assert comparison(DRAFTED, other, is_greedy=True)[-1] == "same tokens: NO"
    assert "not compared" in comparison(DRAFTED, other, is_greedy=False)[-1]


def test_the_speed_up_of_answers_of_two_lengths_is_that_of_their_rates():
    shorter = Answer(token_ids=(1, 2), seconds=1.0, tokens_per_pass=1.0)
    assert comparison(DRAFTED, shorter, is_greedy=False)[4] == "speed-up: 4.00"


def test_a_server_that_ends_before_it_serves_ends_the_wait(tmp_path: Path):
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="ended with code 3"):
        wait_for_port(server, tmp_path / "port")


def test_a_bundle_is_served_compared_and_stopped(
    tiny_bundle: Path, capfd: pytest.CaptureFixture[str]
):
    request = {"prompt": "the quick", "max_tokens": 12, "temperature": 0.0}
    assert demonstrate(tiny_bundle, request, {"gamma": 2}) == 0
    out = capfd.readouterr().out
    assert "same tokens: yes" in out and "tokens_per_step" in out
    assert out.rstrip().splitlines()[-1].strip("\u2500 ") == "server stopped, exit code 0"


@pytest.mark.parametrize(
    "options",
    [
        {"translate": True, "chat": True},
        {"chat": True, "model": Path("one")},
        {"draft": Path("one")},
        {"chat": True, "draft": Path("one")},
    ],
)
def test_options_that_contradict_one_another_are_refused_before_any_work(options):
    with pytest.raises(typer.BadParameter, match="one of --translate, --chat and --model"):
        main(**options)


def test_a_model_of_ones_own_is_exported_served_and_compared(
    tiny_checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(run_demo, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(prompt="the quick", max_tokens=12, model=tiny_checkpoints[0], weights="float32")
    assert ended.value.code == 0
    assert [path.name for path in tmp_path.glob("*/manifest.json")] == ["manifest.json"]
    assert "same tokens: yes" in capfd.readouterr().out
