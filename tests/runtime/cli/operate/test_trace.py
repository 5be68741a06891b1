"""Lines of a trace: what was kept, what was rejected, what the target added."""

from __future__ import annotations

import pytest
from outrider.runtime.cli.operate.trace import step_line, whole_text
from outrider.v1 import inference_pb2 as wire


@pytest.mark.parametrize(
    ("num_accepted", "next_text", "line"),
    [
        (1, "x", "+a -b =x"),
        (3, "x", "+a +b +c =x"),
        (2, None, "+a +b"),  # the answer ended there: nothing was rejected
        (3, None, "+a +b +c"),
    ],
)
def test_a_line_has_the_rejected_token_only_where_one_was_added(
    num_accepted: int, next_text: str | None, line: str
) -> None:
    step = wire.Step(drafted_text=["a", "b", "c"], num_accepted=num_accepted)
    if next_text is not None:
        step.next_token, step.next_text = 7, next_text
    assert " ".join(mark + text for mark, text in step_line(step)) == line


def test_an_answer_stands_below_its_source_and_a_completion_behind_its_prompt() -> None:
    info = wire.GetServerInfoResponse()
    assert whole_text("def ", "main", info) == "def main"
    info.text_to_text.SetInParent()
    assert whole_text("The file.", "Die Datei.", info) == "The file.\nDie Datei."
