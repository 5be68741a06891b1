"""``outrider distill`` from prompts to a corpus and to a head, with a tiny target."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.heads.checkpoint import is_head
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.runtime.cli.main import app
from outrider.runtime.drafters.text.suffix_array import Datastore
from typer.testing import CliRunner


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"once upon a time {number}\n" for number in range(40)))
    return file


def distill(target: Path, prompts: Path, *options: str) -> str:
    out, costs = prompts.parent / "out", prompts.parent / "costs"
    command = ["distill", str(target), "--prompts", str(prompts), "--out", str(out)]
    fixed = ("--costs", str(costs), "--max-tokens", "12")
    result = CliRunner().invoke(app, [*command, *fixed, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_bundles_answers_become_a_corpus(tiny_bundle: Path, prompts: Path) -> None:
    output = distill(tiny_bundle, prompts)
    store = Datastore.open(prompts.parent / "out" / "corpus", vocab_size=512)
    assert f"38 answers, {len(store.tokens)} tokens, 2 more held out" in output
    assert output.count("suffix+datastore") >= 2
    assert "not better than suffix here" in output or "next: outrider serve" in output
    answers = prompts.parent / "out" / "answers.jsonl"
    before = answers.read_bytes()
    assert "38 answers" in distill(tiny_bundle, prompts)
    assert answers.read_bytes() == before


def test_a_head_is_predicted_then_trained_then_served(
    tiny_checkpoints: tuple[Path, Path], prompts: Path
) -> None:
    target, out = tiny_checkpoints[0], prompts.parent / "out"
    options = ("--kind", "head", "--hours", "0.001", "--draft-vocabulary", "100")
    output = distill(target, prompts, *options)
    assert "a head, greedy: a draft token costs" in output
    assert "--yes" in output and not (out / "head").exists()
    output = distill(target, prompts, *options, "--yes")
    assert "alpha_1" in output and "10 tenths" in output and "next: outrider export" in output
    assert is_head(out / "head")
    bundle = export_bundle(
        target=target, draft=out / "head", out=out / "served", options=ExportOptions(max_context=64, max_tree_nodes=0),
        progress=lambda stage: None,
    )  # fmt: skip
    assert load_bundle(bundle.root).manifest.requires == ("caches", "heads")


def test_what_cannot_be_distilled_is_refused(
    tiny_text2text_bundle: Path, tiny_bundle: Path, prompts: Path
) -> None:
    out = ["--out", str(prompts.parent / "out")]
    asked = ["--prompts", str(prompts), *out, "--costs", str(prompts.parent / "costs")]
    few = prompts.parent / "few.txt"
    few.write_text("one\n")
    for target, given, words in (
        (tiny_text2text_bundle, asked, "must be decoder-only"),
        (tiny_bundle, ["--prompts", str(few), *asked[2:], "--max-tokens", "4"], "at least 20"),
        (tiny_bundle, [*asked, "--kind", "head"], "tiny"),
    ):
        result = CliRunner().invoke(app, ["distill", str(target), *given])
        assert result.exit_code == 2
        assert words in result.stderr
