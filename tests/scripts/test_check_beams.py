"""The long check of beams tells equal, tied and different answers apart, and holds a bundle to its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from scripts.check_beams import compared, main


def test_only_scores_that_are_as_good_as_equal_may_rank_either_way() -> None:
    found = [((1, 2), -1.0), ((3,), -1.000001)]
    assert compared(found, found) == "equal"
    assert compared(found[::-1], found) == "tied"
    assert compared([((1, 2), -1.0), ((4,), -1.1)], found) == "differs"


def test_a_bundle_is_held_against_its_checkpoint(
    tiny_text2text_bundle: Path,
    tiny_text2text_checkpoints: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, _ = tiny_text2text_checkpoints
    with pytest.raises(typer.Exit) as ended:
        main(tiny_text2text_bundle, target, num_sources=2, num_beams=2, max_tokens=6)
    assert ended.value.exit_code == 0
    assert "1 sources of 2 hypotheses: {'equal': 1, " in capsys.readouterr().out
