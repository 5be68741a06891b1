"""Requests of completions: their names, and what is kept of them while they wait."""

from __future__ import annotations

import pytest
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.http.openai import completions
from outrider.runtime.serving.http.openai.whole import WholeSink

from tests.runtime.freed import Freed

GREEDY = {"max_tokens": 2, "temperature": 0}


async def test_a_body_is_not_kept_while_its_request_waits(start_http, monkeypatch):
    noted: list[str] = []
    read_body, begin = completions.read_body, WholeSink.begin

    async def noting_body(request: object, most: int) -> bytes:
        return Freed.noting(await read_body(request, most), noted)

    def noting_begin(sink: WholeSink, prompt: int, spec: RequestSpec) -> None:
        noted.append("begun")
        begin(sink, prompt, spec)

    monkeypatch.setattr(completions, "read_body", noting_body)
    monkeypatch.setattr(WholeSink, "begin", noting_begin)
    async with start_http() as http:
        assert (await http.complete(prompt="a", **GREEDY)).status == 200
    assert noted == ["freed", "begun"]


@pytest.mark.parametrize(("num_prompts", "most"), [(1, 128), (2, 126), (11, 125)])
async def test_an_id_has_room_for_the_places_of_its_prompts(start_http, num_prompts, most):
    prompts = ["a"] * num_prompts
    async with start_http(max_batch=16) as http:
        taken = await http.complete(prompt=prompts, request_id="x" * most, **GREEDY)
        refused = await http.complete(prompt=prompts, request_id="x" * (most + 1), **GREEDY)
        assert (taken.status, taken.headers["x-request-id"]) == (200, "x" * most)
        assert (refused.status, refused.error["param"]) == (400, "request_id")
        assert str(most) in refused.error["message"]
        handler = http.running.server.readiness.handler
        assert handler.num_streams == 0
