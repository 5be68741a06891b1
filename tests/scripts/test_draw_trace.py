"""The picture of an answer's passes: every token by what became of it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from outrider.v1 import inference_pb2 as wire

from scripts.draw_trace import draw, step_tokens

PICTURE = Path(__file__).parents[2] / "docs" / "trace.svg"
REJECTED = wire.Step(
    drafted=[1, 2, 3], num_accepted=1, next_token=4, drafted_text=["a", "<", "c"], next_text="\n"
)
ALL_ACCEPTED = wire.Step(
    drafted=[1, 2], num_accepted=2, next_token=5, drafted_text=["a", "b"], next_text="z"
)
ENDED = wire.Step(drafted=[1, 2], num_accepted=1, drafted_text=["a", "b"])
PLAIN = wire.Step(next_token=7, next_text="p")


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (REJECTED, ["accepted", "rejected", "unjudged", "recovered"]),
        (ALL_ACCEPTED, ["accepted", "accepted", "bonus"]),
        (ENDED, ["accepted"]),
        (PLAIN, ["plain"]),
    ],
)
def test_each_token_has_its_kind(step: wire.Step, kinds: list[str]):
    assert [kind for kind, _ in step_tokens(step)] == kinds


def test_the_title_counts_what_was_emitted():
    root = ElementTree.fromstring(draw("x = ", [PLAIN, REJECTED, ALL_ACCEPTED]))
    texts = [element.text for element in root.iter()]
    assert "6 tokens in 3 passes of the target: 2.0 tokens per pass instead of 1" in texts
    assert {"<", "⏎", "2 tokens"} <= set(texts)


def test_the_committed_picture_is_one_of_this_script():
    root = ElementTree.parse(PICTURE).getroot()
    rectangles = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) > 30
    assert PICTURE.stat().st_size < 30_000
