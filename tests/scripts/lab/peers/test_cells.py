"""Sides take turns, the fastest cells go on, and speeds are compared within rounds."""

from __future__ import annotations

from typing import Any

from scripts.lab.peers.cells import (
    Cell,
    best_of,
    best_rows,
    cells_of,
    contenders,
    reference_of,
    round_ratios,
    row_of_cell,
    same_share,
)

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
Told = dict[int, dict[str, Any]]


def cell(who: str, drafter: str | None = None, gamma: int | None = 0) -> Cell:
    return Cell(who=who, weights="float32", batch=1, drafter=drafter, gamma=gamma)


def at(*seconds: float | None) -> Told:
    """Answers of 8 tokens in that many seconds, round by round; None fails."""
    return {
        number: {"reason": "broke"} if one is None else {"seconds": one, "outputs": TOKENS}
        for number, one in enumerate(seconds)
    }


def test_a_way_says_drafter_and_gamma() -> None:
    assert cell("genai").way == "plain"
    drafted = cell("outrider", "suffix+model", 4)
    assert drafted.way == "suffix+model gamma 4"
    assert drafted.at_any_gamma.way == "suffix+model"
    assert cell("outrider", "lookup", None).way == "lookup gamma auto"


def test_sides_take_turns_and_plain_cells_stand_together() -> None:
    cells = cells_of({"outrider": ["model", "lookup"], "genai": ["model"]}, "float32", 1, [2, 4])
    assert [(one.who, one.way) for one in cells] == [
        ("outrider", "plain"), ("genai", "plain"),
        ("outrider", "model gamma 2"), ("genai", "model gamma 2"),
        ("outrider", "lookup gamma 2"), ("genai", "model gamma 4"),
        ("outrider", "model gamma 4"), ("outrider", "lookup gamma 4"),
    ]  # fmt: skip
    assert {(one.weights, one.batch) for one in cells} == {("float32", 1)}


def test_plain_cells_and_each_sides_fastest_drafting_cells_go_on() -> None:
    cells = cells_of({"outrider": ["model"], "genai": ["model"]}, "float32", 1, [1, 2, 3])
    seconds = {("outrider", 1): 3, ("outrider", 2): 1, ("outrider", 3): 2, ("genai", 1): 8, ("genai", 2): None,
               ("genai", 3): 9}  # fmt: skip
    answers = {one: at(seconds.get((one.who, one.gamma), 20)) for one in cells}
    left = contenders(cells, answers, 2)
    assert [(one.who, one.gamma) for one in left] == [
        ("outrider", 0), ("genai", 0), ("genai", 1), ("outrider", 2), ("outrider", 3), ("genai", 3),
    ]  # fmt: skip


def test_the_best_cell_is_the_fastest_of_those_that_ran_most_often() -> None:
    lucky, steady, slow = (cell("genai", "model", gamma) for gamma in (1, 2, 3))
    answers = {lucky: at(1), steady: at(3, 2, 2), slow: at(2, 4, 4)}
    assert best_of(answers, answers) == steady
    assert best_of([slow, lucky], answers) == slow
    assert best_of([cell("genai")], answers) is None
    assert best_of([slow], {slow: at(None)}) is None


def test_ratios_are_taken_within_rounds_that_both_answered() -> None:
    assert round_ratios(at(1, 2, None, 4), at(2, 2, 2)) == [2.0, 1.0]
    assert round_ratios(at(None), at(1)) == []


def test_each_sides_best_is_told_beside_ours() -> None:
    cells = cells_of(
        {"outrider": ["model"], "genai": ["model"], "llamacpp": []}, "float32", 1, [1, 2]
    )
    # The machine is three times slower in the second round: medians alone would say nothing.
    answers = {
        cell("outrider"): at(1, 3, 1), cell("genai"): at(2, 6, 1), cell("llamacpp"): at(3, 9, 3),
        cell("outrider", "model", 1): at(9), cell("outrider", "model", 2): at(1, 3, 2),
        cell("genai", "model", 1): at(2, 9, 2), cell("genai", "model", 2): at(None),
    }  # fmt: skip
    rows = best_rows(cells, answers)
    assert [(row.case["who"], row.case["way"], row.case["best_of"]) for row in rows] == [
        ("outrider", "plain", "plain"), ("genai", "plain", "plain"), ("llamacpp", "plain", "plain"),
        ("outrider", "model gamma 2", "drafting"), ("genai", "model gamma 1", "drafting"),
        ("outrider", "plain", "any"), ("genai", "plain", "any"), ("llamacpp", "plain", "any"),
    ]  # fmt: skip
    ratios = [row.figures["ours_to_this"] for row in rows]
    assert ratios == [None, 2.0, 3.0, None, 2.0, None, 2.0, 3.0]
    fastest = [row.case["who"] for row in rows if row.figures["is_fastest_peer"]]
    assert fastest == ["genai", "genai", "genai"]
    drafting = rows[4].figures
    assert (drafting["ratio_least"], drafting["ratio_most"], drafting["num_ratios"]) == (
        1.0,
        3.0,
        3,
    )
    assert drafting["tokens_per_s"] == 4.0


def test_without_us_there_is_no_ratio() -> None:
    cells = cells_of({"genai": [], "llamacpp": []}, "float32", 1, [])
    rows = best_rows(cells, {cell("genai"): at(1), cell("llamacpp"): at(None)})
    assert [row.case["best_of"] for row in rows if row.case["who"] == "genai"] == ["plain", "any"]
    assert len(rows) == 2
    assert rows[0].figures["ours_to_this"] is None
    assert rows[0].figures["num_ratios"] == 0


def test_speeds_are_medians_and_tokens_are_compared_to_the_first_difference() -> None:
    plain, drafted = cell("outrider"), cell("outrider", "model", 2)
    other = [[1, 2, 3, 4], [5, 0, 7, 8]]
    answers: dict[Cell, Told] = {
        plain: at(1),
        drafted: {
            number: {"seconds": one, "outputs": other} for number, one in enumerate((2, 1, 4))
        },
    }
    reference = reference_of(answers, 1)
    assert reference == TOKENS
    assert same_share(other, TOKENS) == 5 / 8
    row = row_of_cell(drafted, answers[drafted], reference)
    assert row.case == {"who": "outrider", "way": "model gamma 2", "weights": "float32", "batch": 1}
    assert row.figures == {
        "tokens_per_s": 4.0, "least": 2.0, "most": 8.0, "rounds": 3, "same_tokens": 5 / 8, "reason": None,
    }  # fmt: skip
    refused = row_of_cell(plain, at(None), None)
    assert refused.figures == {"tokens_per_s": None, "reason": "broke"}
    assert reference_of({plain: at(None)}, 1) is None


def test_transformers_plain_answers_come_before_ours_as_reference() -> None:
    theirs = {0: {"seconds": 1.0, "outputs": [[7]]}}
    assert reference_of({cell("outrider"): at(1), cell("transformers"): theirs}, 1) == [[7]]
    assert reference_of({cell("outrider"): at(1), cell("transformers"): theirs}, 8) is None
