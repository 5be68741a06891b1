"""What the soaks of cuts and of grammars call wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scripts.lab.soak.cuts import Asked, check_audit, draw
from scripts.lab.soak.grammars import deviations, grammar


def asked(name: str, cut_after: int | None = None) -> Asked:
    return Asked(name=name, prompt="a", max_tokens=1, is_http=False, cut_after=cut_after)


@pytest.mark.parametrize(
    ("names", "problems"),
    [
        (["read", "left"], []),
        (["read"], []),
        (["left"], ["read: no line"]),
        (["read", "read", "left"], ["read: 2 lines"]),
        (["read", "left", "left"], ["left: 2 lines"]),
    ],
)
def test_an_audit_log_has_each_request_once(names: list[str], problems: list[str], tmp_path: Path):
    path = tmp_path / "audit"
    path.write_text("".join(json.dumps({"request_id": name}) + "\n" for name in names))
    assert check_audit(path, [asked("read"), asked("left", 2)]) == problems


def test_a_third_is_cut_and_half_are_http() -> None:
    rng = random.Random(0)
    drawn = [draw(number, ["a"], rng) for number in range(3000)]
    assert sum(one.cut_after is not None for one in drawn) == pytest.approx(1000, rel=0.1)
    assert sum(one.is_http for one in drawn) == pytest.approx(1500, rel=0.1)
    assert len({one.name for one in drawn}) == 3000


def test_deviations_are_those_of_fair_coins() -> None:
    assert deviations([1.0, -1.0] * 50) == (0.0, 0.5, 0.0)
    assert deviations([1.0] * 100) == (1.0, 1.0, 10.0)
    assert len({grammar(number) for number in range(-100, 3000)}) == 3100
