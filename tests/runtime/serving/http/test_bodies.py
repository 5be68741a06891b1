"""Bodies and fields over HTTP: whatever is not well-formed is refused by name, before it costs anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.runtime.conftest import ANY_LIMITS

MALFORMED = [
    (b"", "line 1, column 1"),
    (b"{", "line 1, column 2"),
    (b"[]", "must be a JSON object"),
    (b"\xff", "UTF-8"),
    (b'{"prompt":"\\ud800"}', "UTF-8, of whole characters"),
    (b'{"prompt":"a","prompt":"b"}', "each name once"),
    (b'{"temperature":NaN}', "numbers must be finite"),
    (b'{"temperature":-Infinity}', "numbers must be finite"),
    (b'{"max_tokens":' + b"9" * 5000 + b"}", "numbers shorter"),
    (b"[" * 100_000, "less deep"),
    (b'{"x":' * 100_000, "less deep"),
]
REFUSED = [
    ({}, "prompt", "is required"),
    ({"prompt": 7}, "prompt", "must be a string, an array"),
    ({"prompt": []}, "prompt", "must be a string, an array"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string, an array"),
    ({"prompt": [["a"]]}, "prompt", "must be a string, an array"),
    ({"prompt": [True]}, "prompt", "must be a string, an array"),
    ({"prompt": ["a"] * 257}, "prompt", "at most 256 entries"),
    ({"prompt": [29]}, "prompt", "token ids must be in [0, 29)"),
    ({"prompt": [-1]}, "prompt", "token ids must be in [0, 29)"),
    ({"prompt": [0] * 4200}, "prompt", "must be at most 4199 tokens"),
    ({"max_tokens": "1"}, "max_tokens", "must be a whole number"),
    ({"max_tokens": 1.5}, "max_tokens", "must be a whole number"),
    ({"max_tokens": True}, "max_tokens", "must be a whole number"),
    ({"max_tokens": 0}, "max_tokens", "must be in [1, 4096]"),
    ({"max_tokens": 10**40}, "max_tokens", "must be in [1, 4096]"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": 10**400}, "temperature", "must be a finite number"),
    ({"temperature": 3}, "temperature", "must be 0 or in [0.01, 2]"),
    ({"n": 0}, "n", "must be in [1, 4]"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"stop": [1]}, "stop", "must be an array of strings"),
    ({"stop": ["x"] * 9}, "stop", "at most 8 entries"),
    ({"stop": ""}, "stop", "each must be 1..256 bytes"),
    ({"seed": 2**64}, "seed", "must be in [0, "),
    ({"logit_bias": {"a": 1}}, "logit_bias", "object of token ids"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "object of token ids"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "each token id once"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "must be in [-100"),
    ({"logit_bias": {"99": 1}}, "logit_bias", "token ids must be in"),
    ({"logprobs": True}, "logprobs", "must be a whole number"),
    ({"logprobs": 21}, "logprobs", "must be in [0, 20]"),
    ({"logprobs": 6, "echo": True}, "logprobs", "must be in [0, 5]"),
    ({"stream": 1}, "stream", "must be true or false"),
    ({"stream_options": []}, "stream_options", "must be an object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"speculation": {"gama": 1}}, "speculation.gama", "there is no such option"),
    ({"speculation": {"gamma": 99}}, "speculation.gamma", "must be in [0, 4]"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode", "must be one of max_accept"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "must be text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    ({"priority": 101}, "priority", "must be in [-100, 100]"),
    ({"request_id": "no way"}, "request_id", "must be 1..128 characters"),
    ({"cache_salt": "x" * 129}, "cache_salt", "at most 128 characters"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"guided_json": {}}, "guided_json", "use response_format"),
    ({"use_beam_search": True}, "use_beam_search", "use num_beams"),
]


@pytest.mark.parametrize(("body", "rule"), MALFORMED, ids=lambda one: str(one[:20]))
async def test_a_body_that_is_no_json_is_refused_with_the_place_and_no_word_of_it(
    start_http, body, rule
):
    async with start_http() as http:
        answer = await http.ask("/v1/completions", body)
        assert answer.status == 400
        assert rule in answer.error["message"]
        assert answer.error["code"] == "malformed_request"


async def test_a_field_that_breaks_its_rule_is_refused_by_name(start_http):
    async with start_http() as http:
        for fields, name, rule in REFUSED:
            answer = await http.complete(**({"prompt": "a"} if fields else {}) | fields)
            assert answer.status == 400, fields
            assert answer.error["param"] == name, answer.error
            assert answer.error["message"].startswith(f"{name}: ")
            assert rule in answer.error["message"], answer.error
        count = http.running.server.metrics.registry.get_sample_value
        assert count("outrider_requests_admitted_total") == 0.0
        refused = [
            count("outrider_requests_refused_total", {"reason": reason})
            for reason in (
                "INVALID_PARAMETER",
                "UNSUPPORTED_OPTION",
                "CONTEXT_LENGTH_EXCEEDED",
            )
        ]
        assert sum(refused) == len(REFUSED)


async def test_what_is_unknown_or_null_changes_nothing(start_http):
    unknown = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    nothing = dict.fromkeys(("n", "stop", "logprobs", "seed", "logit_bias", "response_format"))
    async with start_http() as http:
        fields = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = await http.complete(**fields, **unknown, **nothing, top_k=-1)
    assert answer.json()["choices"][0]["text"] == "bcd"


async def test_a_long_body_is_refused_before_it_is_read_to_its_end(start_http):
    limits = replace(ANY_LIMITS, max_message_bytes=1000)
    async with start_http(limits=limits) as http:
        answer = await http.ask("/v1/completions", b"x" * 1001)
        assert (answer.status, answer.error["param"]) == (413, "body")
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"258\r\n"
            + b"x" * 600
            + b"\r\n258\r\n"
            + b"x" * 600
            + b"\r\n"
        )
        # The body has no end yet.
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_long_headers_and_what_is_no_http_close_the_connection(start_http):
    async with start_http() as http:
        for data in (
            b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
            b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000,
            b"\x16\x03\x01\x00\x00",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(data)
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
        assert (await http.ask("/health")).status == 200


async def test_a_number_that_is_too_large_for_one_is_refused_by_name(start_http):
    async with start_http() as http:
        answer = await http.ask("/v1/completions", b'{"prompt":"a","temperature":1e999}')
    assert answer.error["message"] == "temperature: must be a finite number"


async def test_compressed_bodies_are_refused(start_http):
    async with start_http() as http:
        answer = await http.ask("/v1/completions", b"x", content_encoding="gzip")
    assert (answer.status, answer.error["param"]) == (400, "content-encoding")
