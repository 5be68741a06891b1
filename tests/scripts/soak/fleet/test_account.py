"""How an account of requests to several replicas tells ends that may be from those that must not."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

from grpc import StatusCode
from outrider import Overloaded, RequestRefused, ServerFailed, Unavailable
from outrider.client import build_request
from outrider.v1 import inference_pb2 as wire

from scripts.soak.fleet.account import (
    Account,
    Ending,
    Errand,
    Kind,
    Record,
    answered_twice,
    draw_errand,
    judged,
)
from scripts.soak.traffic import Fate, Job, Outcome, Palette

JOB = Job(request=build_request("a", request_id="a", max_tokens=4))
ASKED, BAD = Errand("a", Kind.GENERATE, JOB), Errand("b", Kind.BAD, JOB)
FINISH = wire.Finish(usage=wire.Usage(output_tokens=0))
GONE = Unavailable(StatusCode.UNAVAILABLE, "gone")
REFUSED = RequestRefused(StatusCode.INVALID_ARGUMENT, "no", reason="INVALID_PARAMETER")


def test_every_answer_has_one_ending() -> None:
    def ending(errand: Errand, outcome: Outcome) -> Ending:
        record = judged(errand, outcome)
        assert bool(record.problem) == (record.ending is Ending.BROKEN)
        return record.ending

    assert ending(ASKED, Outcome(JOB, finishes=[FINISH])) is Ending.FINISHED
    assert ending(ASKED, Outcome(JOB, error=GONE)) is Ending.UNAVAILABLE
    full = Overloaded(StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL")
    assert ending(ASKED, Outcome(JOB, error=full)) is Ending.REFUSED
    assert ending(ASKED, Outcome(replace(JOB, fate=Fate.CANCEL), was_left=True)) is Ending.LEFT
    assert ending(BAD, Outcome(JOB, error=REFUSED)) is Ending.REFUSED


def test_what_must_not_be_is_broken() -> None:
    bug = ServerFailed(StatusCode.INTERNAL, "bug", reason="INTERNAL")
    for errand, outcome in (
        (ASKED, Outcome(JOB)),
        (ASKED, Outcome(JOB, finishes=[FINISH, FINISH])),
        (ASKED, Outcome(JOB, finishes=[FINISH, FINISH], error=GONE)),
        (ASKED, Outcome(JOB, error=bug)),
        (ASKED, Outcome(JOB, error=REFUSED)),
        (ASKED, Outcome(JOB, error=Overloaded(StatusCode.RESOURCE_EXHAUSTED, "too large"))),
        (BAD, Outcome(JOB, finishes=[FINISH])),
        (BAD, Outcome(JOB, error=RequestRefused(StatusCode.INVALID_ARGUMENT, "no reason"))),
    ):
        record = judged(errand, outcome)
        assert record.ending is Ending.BROKEN and record.problem, outcome


def test_requests_without_an_end_and_with_two_are_found() -> None:
    account = Account()
    record = Record(ASKED, Ending.FINISHED, Outcome(JOB, finishes=[FINISH]))
    account.add(record)
    assert account.problems(1) == []
    assert account.problems(2) == ["2 requests were made, 1 ended"]
    account.add(record)
    assert account.problems(1) == ["a: 2 ends"]
    assert account.endings == {"generate: finished": 2}
    assert len(account.finished) == 2


async def test_who_waits_for_a_count_goes_on_when_it_is_reached() -> None:
    account = Account()
    waiting = asyncio.ensure_future(account.reached(1.5))
    for is_over in (False, True):
        account.add(Record(ASKED, Ending.FINISHED))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done() == is_over
    async with asyncio.timeout(60):
        await account.reached(1)


def test_what_two_replicas_have_finished_is_read_from_their_logs(tmp_path: Path) -> None:
    def write(name: str, *entries: tuple[str, str]) -> Path:
        lines = [
            json.dumps({"request_id": i, "code": code, "method": "Generate"}) for i, code in entries
        ]
        path = tmp_path / name
        path.write_text("\n".join([*lines, '{"request_id": "cut in the mid']))
        return path

    logs = [write("one", ("a", "OK"), ("b", "OK")), write("other", ("a", "OK"), ("b", "CANCELLED"))]
    assert answered_twice([*logs, tmp_path / "never started"]) == ["a"]


def test_errands_have_names_of_their_own_and_a_bit_of_everything() -> None:
    palette = Palette(prompts=("a", "b"), stops=("c",))

    def drawn() -> list[Errand]:
        rng = random.Random(1)
        return [draw_errand(number, palette, rng) for number in range(300)]

    errands = drawn()
    assert errands == drawn()
    assert {one.kind for one in errands} == set(Kind)
    assert len({one.name for one in errands}) == 300
    jobs = [one.job for one in errands if one.job is not None]
    assert {job.fate for job in jobs} == set(Fate)
    assert all(one.job.request.request_id == one.name for one in errands if one.job is not None)
