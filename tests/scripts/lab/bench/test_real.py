"""The table of drafts on and off, on the tiny pair."""

from pathlib import Path

import pytest

from scripts.lab.bench.real import COLUMNS, main


def test_each_drafter_has_a_row(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick\nbrown fox\n")
    main(
        tiny_bundle, prompts, drafters="model,suffix", batches="2", num_prompts=2, max_tokens=8,
        temperature=0.0, rounds=1, cpu_time=False,
    )  # fmt: skip
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == COLUMNS
    assert [row.split(" | ")[1] for row in rows] == ["`model`", "`suffix`"]
    assert all(float(row.split(" | ")[2]) > 0.0 for row in rows)
