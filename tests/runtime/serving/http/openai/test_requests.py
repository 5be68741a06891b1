"""Requests of completions: their names, and what is kept of them while they wait."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.http.openai import completions
from outrider.runtime.serving.http.openai.whole import WholeSink

from tests.runtime.freed import Freed
from tests.runtime.serving.chat.scripted import scripted

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


async def test_special_tokens_of_the_tokenizer_stand_around_a_text_unless_it_asks_for_none(
    start_http,
):
    async with start_http(**scripted("phi", "x", "a")) as http:

        async def num_tokens(**fields: Any) -> int:
            answer = await http.complete(**GREEDY, **fields)
            assert answer.status == 200 and "outrider-ignored" not in answer.headers
            found: int = answer.json()["usage"]["prompt_tokens"]
            return found

        assert await num_tokens(prompt="ab") == 3
        assert await num_tokens(prompt="ab", add_special_tokens=True) == 3
        assert await num_tokens(prompt="ab", add_special_tokens=False) == 2
        assert await num_tokens(prompt=[64, 65], add_special_tokens=False) == 2
        for fields in ({"prompt": [64, 65]}, {"prompt": ["a", [64]]}):
            refused = await http.complete(**GREEDY, **fields, add_special_tokens=True)
            assert (refused.status, refused.error["param"]) == (400, "add_special_tokens")
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert (await http.chat(**GREEDY, **chat, add_special_tokens=False)).status == 200
        refused = await http.chat(**GREEDY, **chat, add_special_tokens=True)
        assert (refused.status, refused.error["param"]) == (400, "add_special_tokens")


async def test_a_bound_on_reasoning_is_a_chat_s(start_http):
    async with start_http() as http:
        refused = await http.complete(prompt="a", **GREEDY, max_reasoning_tokens=3)
    assert (refused.status, refused.error["param"]) == (400, "max_reasoning_tokens")


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
