"""The event loop does little in each of its turns: units of work between two yields are bounded, whatever is asked."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import MalformedRequest
from outrider.runtime.serving import request_handler
from outrider.runtime.serving.http import body
from outrider.runtime.serving.http.openai import tokens, whole
from outrider.runtime.serving.http.responses import json_bytes, json_pieces
from outrider.runtime.serving.tokenization import INLINE_TEXT, Turns

from tests.runtime.conftest import LetterCodec
from tests.runtime.serving.security.test_quotas import BARELY, security

MANY = ServerConfig(max_queued=400, lb_delay_s=0.0, drain_timeout_s=0.0)


class TurnCounter:
    """Counts what happens in each turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        self._turn = 0
        run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

        def counted(loop: asyncio.AbstractEventLoop) -> None:
            self._turn += 1
            run_once(loop)

        monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", counted)

    def note(self, num: int = 1) -> None:
        self.counts[self._turn] += num


async def test_one_piece_of_work_begins_in_a_turn_in_order_of_arrival(monkeypatch) -> None:
    turns, counter, order = Turns(), TurnCounter(monkeypatch), list[int]()

    async def work(number: int) -> None:
        await turns.take()
        counter.note()
        order.append(number)

    await asyncio.gather(*(work(number) for number in range(100)))
    assert order == [*range(100)]
    assert set(counter.counts.values()) == {1}


async def test_who_comes_alone_waits_for_no_turn() -> None:
    turns = Turns()
    coroutine = turns.take()
    with pytest.raises(StopIteration):
        coroutine.send(None)


async def test_one_of_many_prompts_is_checked_and_tokenised_in_a_turn(
    start_http, monkeypatch
) -> None:
    checked, encoded = TurnCounter(monkeypatch), TurnCounter(monkeypatch)
    check = request_handler.check_request

    def noted(*arguments: Any) -> None:
        checked.note()
        check(*arguments)

    monkeypatch.setattr(request_handler, "check_request", noted)

    class Noting(LetterCodec):
        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            encoded.note(len(text))
            return super().encode(text, add_special_tokens)

    async with start_http(codec=Noting(), config=MANY) as http:
        answer = await http.complete(prompt=["ab" * 1000] * 100, max_tokens=1)
    assert len(answer.json()["choices"]) == 100
    assert sum(checked.counts.values()) == 100 and max(checked.counts.values()) == 1
    assert sum(encoded.counts.values()) == 200_000
    assert max(encoded.counts.values()) < INLINE_TEXT


async def test_long_bodies_and_answers_are_made_beside_the_loop(start_http, monkeypatch) -> None:
    """Parsing of bodies, and putting together of what is long: none of it on the loop's thread, nor in C code."""
    on_loop: list[str] = []

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                on_loop.append(name)
            return real(*arguments)

        monkeypatch.setattr(module, name, noted)

    def refuse(text: str) -> None:
        raise AssertionError(f"C code parses {len(text)} characters")

    monkeypatch.setattr(body, "_loads", refuse)
    watched(body, "_object")
    watched(tokens, "_told")
    watched(whole.WholeSink, "_body")
    limits = RequestLimits(max_prompt_bytes=1 << 16)
    async with start_http(limits=limits) as http:
        long = "a" * body.INLINE_BODY
        assert (await http.complete(prompt="a", max_tokens=300, user=long)).status == 200
        assert (await http.chat(messages=[{"role": "user", "content": long}])).status == 400
        told = await http.ask("/tokenize", {"prompt": long, "return_token_strs": True})
        assert told.json()["count"] == len(long)
        told = await http.ask("/detokenize", {"tokens": [0] * body.INLINE_BODY})
        assert told.json()["prompt"] == long
    assert not on_loop


def test_bodies_are_parsed_alike_in_both_ways() -> None:
    rng = random.Random(1)

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {f'n{i} é"\\': value(depth - 1) for i in range(rng.randrange(4))}
        return (None, True, -7, 1.5e-9, 'a\u00e9\U0001f600\n"', 10**30)[kind]

    for _ in range(200):
        found = {"x": value(5), "y": value(5)}
        for text in (json.dumps(found), json.dumps(found, ensure_ascii=False, indent=1)):
            padded = text + " " * body.INLINE_BODY
            assert body.parse_object(padded.encode()) == body.parse_object(text.encode()) == found
        assert json_pieces(found) == json_bytes(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"a":1,"a":2}', "each name once"),
        ('{"a":NaN}', "finite"),
        ('{"a":"\\ud800"}', "whole characters"),
        ('{"a":{"\\uD800":1}}', "whole characters"),
        ('{"a":' + "9" * 5000 + "}", "shorter"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "less deep"),
        ('{"a":[' + "[]," * 70_000 + "1]}", "at most 65536 arrays and objects"),
        ('{"a":[1,]}', "line 1, column"),
    ],
)
def test_long_bodies_break_the_same_rules(text: str, rule: str) -> None:
    with pytest.raises(MalformedRequest, match=rule):
        body.parse_object(text.encode() + b" " * body.INLINE_BODY)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_counts_before_it_is_parsed(
    start_http, tmp_path: Path, monkeypatch, path: str
) -> None:
    """A tenant that has used up its quota has nothing parsed, and what is no JSON has used some."""
    parsed: list[int] = []
    parse = body._BoundedDecoder.decode

    def noted(decoder: Any, text: str) -> Any:
        parsed.append(len(text))
        return parse(decoder, text)

    monkeypatch.setattr(body._BoundedDecoder, "decode", noted)
    bomb = b"[" * 10_000
    async with start_http(security=security(tmp_path, f"[tenants.x]\n{BARELY}")) as http:
        first = await http.ask(path, bomb, outrider_tenant="x")
        second = await http.ask(path, bomb, outrider_tenant="x")
    assert (first.status, second.status) == (400, 429)
    assert parsed == [10_000]
