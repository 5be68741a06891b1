"""Completions over HTTP: whole answers and streams."""

from __future__ import annotations

LETTERS = "bcdefghijklmnopqrstuvwxyz"


async def test_a_completion_has_its_text_its_usage_and_what_became_of_drafts(start_http):
    async with start_http() as http:
        answer = await http.complete(prompt="a", max_tokens=8, temperature=0, return_token_ids=True)
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


async def test_a_stream_says_of_each_pass_what_was_drafted_and_how_it_was_judged(start_http):
    async with start_http() as http:
        asked = {"prompt": "a", "max_tokens": 8, "temperature": 0, "stream": True}
        answer = await http.complete(**asked, return_trace=True, return_provenance=True)
    *chunks, done = answer.events()
    assert done == "[DONE]"
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
