"""The lab's measures of quality: programs are judged in limits, and losses have paired intervals."""

import numpy as np
import pytest

from scripts.lab.quality import humaneval
from scripts.lab.quality.text import WINDOW, summary

TASK = {
    "prompt": "def twice(x):\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6",
    "entry_point": "twice",
}


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("    return 2 * x", True),
        ("    return x", False),
        ("    return 2 *", False),
        ("    while True: pass", False),
        ("    return len(bytearray(1 << 31)) and 2 * x", False),
    ],
)
def test_a_program_passes_if_its_tests_do_within_its_limits(
    answer: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(humaneval, "LIMIT_S", 1)
    assert humaneval.passes(TASK, answer) is is_right


def test_losses_are_ratios_with_intervals_over_pairs_of_windows() -> None:
    expected = np.random.default_rng(0).gamma(2.0, size=(20, WINDOW - 1))
    nats = expected + np.log(1.04)
    figures = np.stack([nats, expected, np.ones_like(nats), np.zeros_like(nats)], axis=-1)
    said = summary(figures.astype(np.float32))
    assert "perplexity / reference 1.0400 [1.0400, 1.0400]" in said
    assert "same likeliest token 1.0000 [1.0000, 1.0000]; KL, nats 0.0000 [0.0000, 0.0000]" in said
