"""The sweep over architectures: its record is whole, its page says the same, and eleven cells end as recorded."""

import os
import threading
from pathlib import Path

import pytest

from scripts.lab.sweep.cell import try_architecture
from scripts.lab.sweep.models import architectures, in_a_process
from scripts.lab.sweep.record import BROKEN, EXPORTED, Outcome, read_record, write_record
from scripts.lab.sweep.table import PAGE, table, with_table

RECORDED = read_record()


def test_every_architecture_is_exported_or_refused() -> None:
    assert sorted(RECORDED) == architectures()
    assert not [one for one in RECORDED.values() if one.outcome == BROKEN]
    assert all(one.reason or one.difference is not None for one in RECORDED.values())


def test_the_page_says_what_the_record_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, RECORDED) == page


def test_the_table_names_what_is_exported_and_joins_equal_reasons() -> None:
    outcomes = {
        "a": Outcome(name="a", outcome=EXPORTED, difference=2e-6),
        "b": Outcome(name="b", outcome="refused", reason="b has a state (x, y)"),
        "c": Outcome(name="c", outcome="refused", reason="c: the model has a state"),
        "d": Outcome(name="d", outcome=BROKEN, reason="KeyError"),
        "llava": Outcome(name="llava", outcome=EXPORTED, difference=1e-6),
    }
    first, *_, exported, part, refused, broken = table(outcomes).splitlines()
    assert first.startswith("Of 4 causal architectures 1 are exported, and of 1 others")
    assert [exported, part, refused, broken] == [
        "| **exported** | `a` |",
        "| **text part exported** | `llava` |",
        "| refused: has a state | `b`, `c` |",
        "| **broken** | `d` |",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "apertus",
        "gpt_bigcode",
        "ministral3",
        "bert",
        "bloom",
        "falcon",
        "gemma4_text",
        "llama4_text",
        "llava_onevision",
        "mamba",
        "xlnet",
    ],
)
def test_an_architecture_ends_as_recorded(name: str) -> None:
    found, recorded = try_architecture(name), RECORDED[name]
    assert (found.outcome, found.reason) == (recorded.outcome, recorded.reason)
    assert (found.difference is None) == (recorded.difference is None)


def test_what_strangers_code_raises_is_a_finding() -> None:
    found = try_architecture("no such architecture")
    assert found.outcome == BROKEN
    assert found.reason.startswith("KeyError at ")


def test_an_attempt_that_dies_or_never_ends_is_broken() -> None:
    died = in_a_process("a", lambda name: os._exit(3))
    assert (died.outcome, died.reason) == (BROKEN, "died with 3")
    endless = in_a_process("a", lambda name: threading.Event().wait(), time_limit_s=0.1)
    assert (endless.outcome, endless.reason) == (BROKEN, "not done in 0.1 s")


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    outcomes = {
        "a": Outcome(name="a", outcome=EXPORTED, difference=2e-6),
        "b": Outcome(name="b", outcome="refused", reason="why"),
    }
    write_record(outcomes, tmp_path / "record.jsonl")
    assert read_record(tmp_path / "record.jsonl") == outcomes
