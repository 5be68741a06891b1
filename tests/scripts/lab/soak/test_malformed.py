"""Malformed messages end in a refusal or an answer, in process and on the wire; the check finds what is neither."""

import pytest
from outrider.runtime.serving.tokenizer import TokenizersCodec

from scripts.lab.soak import malformed
from tests.conftest import write_tokenizer

NUM_IN_PROCESS, NUM_ON_WIRE = 10_000, 600


def test_nothing_but_refusals_and_answers_comes_of_them():
    reasons, problems = malformed.in_process(NUM_IN_PROCESS, seed=3)
    assert problems == []
    # Each is judged for a model without an encoder and for one with it.
    assert reasons.total() == 2 * NUM_IN_PROCESS
    # Parser and checks both have their share.
    assert reasons["MALFORMED_REQUEST"] > NUM_IN_PROCESS / 10
    assert reasons["INVALID_PARAMETER"] > NUM_IN_PROCESS / 50
    assert reasons["OK"] > NUM_IN_PROCESS / 50


def test_what_is_raised_beside_refusals_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(malformed, "check_request", lambda *_: 1 // 0)
    _, problems = malformed.in_process(100, seed=3)
    assert problems
    assert all("ZeroDivisionError" in problem for problem in problems)


async def test_a_server_answers_them_all_and_keeps_no_slot(start, tmp_path):
    write_tokenizer(tmp_path)
    async with start(codec=TokenizersCodec(tmp_path / "tokenizer.json")) as run:
        statuses, problems = await malformed.on_the_wire(run.address, NUM_ON_WIRE, seed=5)
        texts = [one.text async for one in run.client.generate([3], max_tokens=1, temperature=0)]
    assert problems == []
    assert statuses.total() == NUM_ON_WIRE
    assert {"OK", "INVALID_ARGUMENT"} <= set(statuses)
    assert texts


async def test_an_internal_error_on_the_wire_is_found(
    start, monkeypatch: pytest.MonkeyPatch, caplog
):
    caplog.set_level("CRITICAL")
    async with start() as run:
        monkeypatch.setattr(run.server.readiness.handler, "_texts", None)
        _, problems = await malformed.on_the_wire(run.address, 40, seed=5)
    assert any("INTERNAL" in problem for problem in problems)
