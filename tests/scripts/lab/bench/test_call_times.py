"""Turns of engine calls, with drafts that follow a rejection and drafts that follow none."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lab.bench.tools import call_times
from scripts.lab.bench.tools.call_times import REPEATS, CallTimes
from scripts.tools.common import open_rig


def test_turns_are_weighed_by_how_often_a_whole_draft_was_kept(tiny_bundle: Path) -> None:
    rig = open_rig(tiny_bundle, max_batch=2)
    times = CallTimes(rig, 2, context=8)
    times.take({0: 0.0, 1: 0.0, 3: 1e-5})
    for gamma in (1, 3):
        never, always, half = (times.costs(gamma, share_whole=share) for share in (0.0, 1.0, 0.5))
        assert half.c == pytest.approx((never.c + always.c) / 2)
        assert half.v == pytest.approx((never.v + always.v) / 2)
    rig.close()


def test_the_first_draft_call_of_a_turn_feeds_two_tokens_behind_a_whole_draft(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(tiny_bundle, max_batch=1)
    assert rig.draft is not None
    fed: list[tuple[int, int]] = []
    extend = rig.draft.engine.extend

    def noting(spans):  # type: ignore[no-untyped-def]
        fed.extend((span.start, len(span.tokens)) for span in spans)
        return extend(spans)

    monkeypatch.setattr(rig.draft.engine, "extend", noting)
    CallTimes(rig, 1, context=8).take({0: 0.0, 2: 0.0})
    assert fed[-4:] == [(7, 2), (8, 1), (7, 2), (8, 1)]
    assert set(fed[2:-4]) == {(8, 1), (7, 2)}
    rig.close()


def test_calls_in_turns_wait_out_the_pause_of_service_and_do_not_count_it(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(tiny_bundle, max_batch=1)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(call_times.time, "perf_counter", clock)
    times = CallTimes(rig, 1, context=8)
    times.take({0: 100.0, 2: 50.0})
    waited_s = now
    in_turns = times.costs(2, share_whole=0.5)
    assert in_turns.c == in_turns.v  # every call takes one tick or two of its engine's timer
    assert waited_s > REPEATS * (2 * 100.0 + 4 * 3 * 50.0)
    rig.close()
