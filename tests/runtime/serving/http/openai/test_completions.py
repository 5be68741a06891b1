"""Completions over HTTP: whole answers and streams."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.engines.base import FloatArray
from outrider.runtime.core.events import EmittedToken, Provenance
from outrider.runtime.serving.http.openai.response_json import TextPlaces, completion_logprobs
from outrider.runtime.serving.http.openai.token_text import TokenText
from outrider.runtime.serving.tokenizer import TokenizersCodec

from tests.conftest import write_tokenizer
from tests.runtime.conftest import EOS, VOCAB, next_letter

LETTERS = "bcdefghijklmnopqrstuvwxyz"
GREEDY = {"prompt": "a", "max_tokens": 8, "temperature": 0}


def uncertain(prefix: tuple[int, ...]) -> FloatArray:
    """The next letter twice as likely as the one after it, and hardly another."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[(prefix[-1] + 1) % 26] = 9.0
    logits[(prefix[-1] + 2) % 26] = 8.3
    return logits


def ending_after_d(prefix: tuple[int, ...]) -> FloatArray:
    logits = next_letter(prefix)
    if prefix[-1] == 3:
        logits[EOS] = 20.0
    return logits


async def test_a_completion_has_its_text_its_usage_and_what_became_of_drafts(start_http):
    async with start_http() as http:
        answer = await http.complete(**GREEDY, return_token_ids=True)
    found = answer.json()
    assert answer.status == 200
    assert found["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert (found["object"], found["model"]) == ("text_completion", "letters")
    assert found["choices"] == [
        {
            "index": 0,
            "text": LETTERS[:8],
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [*range(1, 9)],
        }
    ]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (1, 8, 9)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 6
    metrics = found["metrics"]["speculative_decoding"]
    assert metrics["acceptance_histogram"] == [0, 0, 1, 0, 1]
    assert metrics["mean_acceptance_length"] == 4.0
    assert metrics["draft_acceptance_rate"] == 1.0
    assert (metrics["num_spec_steps"], metrics["num_spec_tokens"]) == (2, 4)


async def test_rejected_drafts_are_counted_apart(start_http):
    async with start_http() as http:
        fields = {"prompt": "d", "max_tokens": 9, "temperature": 0, "return_trace": True}
        found = (await http.complete(**fields)).json()
    steps = found["choices"][0]["outrider"]["steps"]
    details = found["usage"]["completion_tokens_details"]
    metrics = found["metrics"]["speculative_decoding"]
    # The draft is wrong after an e.
    assert steps[0]["drafted_text"][0] == "e" and steps[0]["num_accepted"] == 1
    assert details["rejected_prediction_tokens"] > 0
    assert metrics["num_draft_tokens"] == sum(details.values())
    assert metrics["per_step_accepted"] == [step["num_accepted"] for step in steps]
    assert metrics["per_step_drafted"] == [step["gamma"] for step in steps]
    by_length = metrics["acceptance_histogram_by_draft_length"]
    sums = [sum(one[i] for one in by_length.values() if i < len(one)) for i in range(5)]
    assert sums == metrics["acceptance_histogram"]


async def test_a_stream_says_of_each_pass_what_was_drafted_and_how_it_was_judged(start_http):
    async with start_http() as http:
        answer = await http.complete(
            **GREEDY, stream=True, return_trace=True, return_provenance=True
        )
    *chunks, done = answer.events()
    assert done == "[DONE]"
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "".join(one["choices"][0]["text"] for one in chunks) == LETTERS[:8]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    steps = [step for one in chunks for step in one["outrider"]["steps"]]
    assert steps[0] == {
        "gamma": 4,
        "drafted_text": ["b", "c", "d", "e"],
        "num_accepted": 4,
        "next_text": "f",
        "forced_text": [],
        "is_prompt": False,
    }
    tokens = [token for one in chunks for token in one["outrider"]["tokens"]]
    assert [token["id"] for token in tokens] == [*range(1, 9)]
    assert [token["provenance"] for token in tokens[:5]] == ["accepted"] * 4 + ["bonus"]
    assert chunks[-1]["outrider"]["speculation"]["alpha_hat"] == 1.0


async def test_the_last_chunk_has_the_usage_and_each_one_where_that_is_asked_for(start_http):
    async with start_http() as http:
        plain = (await http.complete(**GREEDY, stream=True)).events()
        assert "usage" not in plain[0] and plain[-2]["choices"]
        options = {"include_usage": True, "unheard_of": 1}
        *chunks, last, _ = (
            await http.complete(**GREEDY, stream=True, stream_options=options)
        ).events()
        assert [one["usage"] for one in chunks] == [None] * len(chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
        assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
        options = {"continuous_usage_stats": True}
        *chunks, _ = (await http.complete(**GREEDY, stream=True, stream_options=options)).events()
        assert chunks[-1]["usage"]["total_tokens"] == 9


async def test_several_prompts_are_several_requests_and_n_completions_of_each(start_http):
    async with start_http(target=uncertain) as http:
        fields = {"max_tokens": 6, "seed": 5, "return_token_ids": True}
        answer = await http.complete(prompt=["a", "b"], n=2, **fields)
        single = await http.complete(prompt="b", n=2, **fields)
        streamed = await http.complete(prompt=["a", "b"], n=2, stream=True, **fields)
    choices = answer.json()["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2, 3]
    expected = [one["token_ids"] for one in single.json()["choices"]]
    assert [one["token_ids"] for one in choices[2:]] == expected
    assert choices[0]["text"] != choices[1]["text"]
    texts = dict.fromkeys(range(4), "")
    for event in streamed.events()[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert [*texts.values()] == [one["text"] for one in choices]
    assert answer.json()["usage"]["prompt_tokens"] == 2
    assert answer.json()["metrics"] == {"speculative_decoding": None}


@pytest.mark.parametrize(
    "prompt", ["abc", ["abc"], [0, 1, 2], [[0, 1, 2]]], ids=["text", "texts", "ids", "lists"]
)
async def test_a_prompt_comes_in_four_forms(start_http, prompt):
    async with start_http() as http:
        answer = await http.complete(prompt=prompt, max_tokens=2, temperature=0)
    assert answer.json()["choices"][0]["text"] == "de"


async def test_log_probabilities_stand_beside_their_tokens(start_http):
    async with start_http(target=uncertain) as http:
        fields = {"prompt": "a", "max_tokens": 12, "seed": 3, "logprobs": 1}
        answer = await http.complete(**fields)
        *chunks, _ = (await http.complete(**fields, stream=True)).events()
    choice = answer.json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [*range(12)]
    for token, own, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == own
        assert len(top) == (1 if own == max(top.values()) else 2)
    # Not all are the likeliest.
    assert {len(top) for top in found["top_logprobs"]} == {1, 2}
    pieces = [one["choices"][0]["logprobs"] for one in chunks]
    for name, whole in found.items():
        assert [value for piece in pieces for value in piece[name]] == whole


async def test_echo_scores_the_prompt_as_likelihood_tasks_ask(start_http):
    async with start_http(target=uncertain) as http:
        answer = await http.complete(
            prompt=[[0, 1, 3, 4]], max_tokens=1, temperature=0, logprobs=1, echo=True
        )
        bare = await http.complete(prompt="abde", max_tokens=0, temperature=0, echo=True)
    choice = answer.json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "abdef"
    assert found["tokens"] == [*"abdef"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    is_greedy = [
        own == max(top.values())
        for own, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
    ]
    assert is_greedy == [True, False, True, True]
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    assert bare.json()["choices"][0]["text"] == "abde"


async def test_every_completion_of_an_echoed_prompt_has_the_prompt_s_log_probabilities(start_http):
    fields = {"prompt": "abd", "max_tokens": 2, "n": 3, "logprobs": 2, "echo": True, "seed": 1}
    async with start_http(target=uncertain) as http:
        whole = (await http.complete(**fields)).json()["choices"]
        events = (await http.complete(**fields, stream=True)).events()[:-1]
    assert len(whole) == 3
    for choice in whole:
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert choice["text"].startswith("abd")
        assert found["text_offset"] == [*range(5)]
        assert found["token_logprobs"][:3] == whole[0]["logprobs"]["token_logprobs"][:3]
        mine = [
            one["choices"][0] for one in events if one["choices"][0]["index"] == choice["index"]
        ]
        pieces = [one["logprobs"] for one in mine]
        for name, values in found.items():
            assert [value for piece in pieces for value in piece[name]] == values


async def test_what_ended_an_answer_is_told(start_http):
    async with start_http(target=ending_after_d) as http:
        fields = {"prompt": "a", "temperature": 0}
        stopped = (await http.complete(**fields, stop="c")).json()["choices"][0]
        ended = (await http.complete(**fields)).json()["choices"][0]
        long = (await http.complete(**fields, ignore_eos=True)).json()
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("b", "stop", "c")
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("bcd", "stop", EOS)
    # OpenAI's default.
    assert long["usage"]["completion_tokens"] == 16
    assert long["choices"][0]["finish_reason"] == "length"


async def test_the_best_completions_of_a_search_are_choices(start_http):
    async with start_http(target=uncertain) as http:
        fields = {"prompt": "a", "max_tokens": 3, "num_beams": 3, "n": 2, "return_token_ids": True}
        whole = (await http.complete(**fields)).json()
        *chunks, _ = (await http.complete(**fields, stream=True)).events()
        [expected] = [
            one async for one in http.running.client.generate("a", max_tokens=3, num_beams=3, n=2)
        ]
    texts = [one.text for one in expected.finish.beams]
    assert [one["text"] for one in whole["choices"]] == texts
    assert [one["choices"][0]["text"] for one in chunks] == texts
    streamed = [one["choices"][0]["token_ids"] for one in chunks]
    assert streamed == [one["token_ids"] for one in whole["choices"]]
    assert [one["token_ids"] for one in whole["choices"]] == [
        [*one.token_ids] for one in expected.finish.beams
    ]


async def test_seeds_are_signed_and_small_temperatures_have_a_floor_as_elsewhere(start_http):
    async with start_http() as http:

        async def text(**fields: object) -> str:
            answer = await http.complete(prompt="a", max_tokens=24, **fields)
            return answer.json()["choices"][0]["text"]

        hot = [await text(seed=seed, temperature=2) for seed in (-3, 2**64 - 3, 3)]
        assert hot[0] == hot[1] != hot[2]
        fresh = {await text(seed=-1, temperature=2) for _ in range(4)}
        assert len(fresh) > 1
        assert await text(seed=1, temperature=0.0002) == await text(seed=1, temperature=0.01)
        low = await http.complete(prompt="a", seed=-(2**63) - 1)
        bad = await http.complete(prompt="a", temperature=-0.001)
    assert (low.status, low.error["param"]) == (400, "seed")
    assert (bad.status, bad.error["param"]) == (400, "temperature")


async def test_what_changes_nothing_is_told_in_a_header(start_http):
    used = {"prompt": "a", "max_tokens": 1, "n": 1, "logprobs": None, "stream_options": None}
    unknown = {"temprature": 1, "user": "me", "messages": [], "a b\r\nx: y": 1, "é" * 99: None}
    async with start_http() as http:
        plain = await http.complete(**used, seed=1)
        told = await http.complete(**used, **unknown)
        streamed = await http.complete(**used, stream=True, user="me")
        many = await http.complete(**used, **{f"field{n}": n for n in range(99)})
    assert plain.status == told.status == 200 and "outrider-ignored" not in plain.headers
    names = "temprature, user, messages, a?b??x:?y".replace(":", "?")
    assert told.headers["outrider-ignored"] == f"{names}, {'?' * 64}"
    assert streamed.headers["outrider-ignored"] == "user"
    assert len(many.headers["outrider-ignored"].split(", ")) == 16


async def test_a_bias_and_own_fields_reach_the_sampler(start_http):
    async with start_http() as http:
        fields = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        biased = await http.complete(**fields, logit_bias={"5": 100})
        plain = await http.complete(
            **fields, return_trace=True, speculation={"enabled": False, "mode": "SEED_STABLE"}
        )
    assert biased.json()["choices"][0]["text"] == "ff"
    speculation = plain.json()["choices"][0]["outrider"]["speculation"]
    assert speculation["off_reason"] == "DISABLED" and speculation["mode"] == "seed_stable"


def test_tokens_that_are_no_whole_character_have_their_bytes(tmp_path):
    write_tokenizer(tmp_path)
    codec = TokenizersCodec(tmp_path / "tokenizer.json")
    token_text, text = TokenText(codec), "Żółw"
    tokens = codec.encode(text)
    assert bytes(byte for token in tokens for byte in token_text.bytes_of(token)) == text.encode()
    assert any("\ufffd" in token_text.text(token) for token in tokens)


def test_tokens_of_one_character_begin_where_it_does(tmp_path):
    write_tokenizer(tmp_path)
    codec = TokenizersCodec(tmp_path / "tokenizer.json")
    text = "aŻb\u20acc\U0001f600d"
    tokens = [
        EmittedToken(token=token, provenance=Provenance.BONUS) for token in codec.encode(text)
    ]
    token_text = TokenText(codec)
    whole = completion_logprobs(tokens, token_text, TextPlaces())["text_offset"]
    before, expected = b"", []
    for one in tokens:
        # What does not decode is the last character's, which has begun.
        expected.append(len(before.decode(errors="ignore")))
        before += bytes(token_text.bytes_of(one.token))
    assert whole == expected and len({*expected}) < len(expected)
    # In pieces, as a stream has them; and another completion that goes on from here.
    found, places = [], TextPlaces()
    for one in tokens:
        places = places.copy()
        found += completion_logprobs([one], token_text, places)["text_offset"]
    assert found == expected and places.next(b"!") == len(text)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a", b"\x80", b"b"], [0, 1, 2]),
        ([b"a", b"\x80", b"\x80", b"b"], [0, 1, 2, 3]),
        ([b"\xe2\x82", b"b", b"c"], [0, 1, 2]),
        ([b"\xe2", b"\x82", b"\xac", b"", b"d"], [0, 0, 0, 1, 1]),
    ],
)
def test_bytes_that_are_no_text_take_the_places_that_they_have_in_it(pieces, expected) -> None:
    places = TextPlaces()
    assert [places.next(piece) for piece in pieces] == expected
    text = b"".join(pieces).decode(errors="replace")
    assert places.next(b"!") == len(text)
