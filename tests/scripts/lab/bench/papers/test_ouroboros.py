"""The tables of Ouroboros on the tiny pair: drafts alone differ, and a bundle without room is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from scripts.lab.bench.papers.common import Context, run_table
from scripts.lab.bench.papers.ouroboros import PAPER, TABLES, Sizes

SMALL = Sizes(
    gamma=4,
    window=3,
    phrase_length=3,
    model_gammas=(2,),
    most_phrases=2,
    lookahead=(4, 2, 3),
    grid=((3, 4), (3,), (5,)),
    locality=(3, 2, 3),
)


def context_of(bundle: Path, out: Path) -> Context:
    prompts = out / "prompts.txt"
    out.mkdir()
    prompts.write_text("the quick brown fox the quick\nover the lazy dog over the\n")
    return Context.of(bundle, prompts, num_prompts=2, max_tokens=24, threads=0, out=out)


def test_every_table_runs_and_all_its_answers_are_the_same(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    context = context_of(tiny_bundle, tmp_path / "out")
    rows = {
        name: run_table(context, name, partial(table, sizes=SMALL))
        for name, table in TABLES.items()
    }
    context.close()
    assert {name: len(found) for name, found in rows.items()} == {
        "ouroboros-4": 7, "ouroboros-13": 7, "ouroboros-figure-6": 3, "ouroboros-10": 2, "ouroboros-17": 3,
    }  # fmt: skip
    for name, found in rows.items():
        # Table 17 has its prompts in several orders.
        if name != "ouroboros-17":
            assert len({row.figures["tokens"] for row in found}) == 1
    by_name = {row.case["drafting"]: row.figures for row in rows["ouroboros-4"]}
    calls = [figures["draft_calls_per_pass"] for figures in by_name.values()]
    assert calls[0] == max(calls)
    by_name = {row.case["drafting"]: row.figures for row in rows["ouroboros-13"]}
    assert (
        by_name["none"]["draft_calls_per_pass"]
        == 0.0
        < by_name["ouroboros"]["draft_calls_per_pass"]
    )


def test_a_window_of_ones_own_is_that_of_every_row(tiny_bundle: Path, tmp_path: Path) -> None:
    context = context_of(tiny_bundle, tmp_path / "out")
    run_table(context, "paper", partial(TABLES["ouroboros-figure-6"], sizes=SMALL))
    context.window = 0
    small = SMALL.of(context)
    assert (small.window, small.grid[1], small.locality) == (0, (0,), (3, 0, 3))
    rows = run_table(context, "paper", partial(TABLES["ouroboros-figure-6"], sizes=SMALL))
    context.close()
    kept = [json.loads(line) for line in (context.out / "paper.jsonl").read_text().splitlines()]
    # Rows of both windows are kept apart, and the draft is asked more often without one.
    assert len(kept) == 2 * len(rows)
    assert rows[0].figures["draft_calls_per_pass"] > kept[0]["figures"]["draft_calls_per_pass"]


def test_a_bundle_without_room_for_the_papers_gamma_is_refused(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    context = context_of(tiny_bundle, tmp_path / "out")
    with pytest.raises(ValueError, match="gamma 12: the bundle has 8"):
        run_table(context, "ouroboros-4", partial(TABLES["ouroboros-4"], sizes=PAPER))
    context.close()
