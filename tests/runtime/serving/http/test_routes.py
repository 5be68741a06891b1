"""Routes beside completions: models, health, metrics and the tokenizer's, before and after the model is open."""

from __future__ import annotations

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.http.factory import open_api
from outrider.runtime.serving.http.openai import tokens
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.serving.http.client import Http


async def test_until_the_model_is_open_everything_but_life_waits():
    readiness = ServerState(RequestAccounting(Metrics(), lambda: 0.0))
    listener = open_api(readiness, Security(), ServeOptions(http_address="127.0.0.1:0"))
    assert listener is not None
    await listener.start()
    readiness.note("measuring what steps cost")
    http = Http(None, listener.port)  # type: ignore[arg-type]
    for path, body in (
        ("/health", None),
        ("/v1/models", None),
        ("/tokenizer_info", None),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {}),
    ):
        answer = await http.ask(path, body)
        assert (answer.status, answer.error["code"]) == (503, "not_ready"), path
        assert "measuring what steps cost" in answer.error["message"]
        assert answer.headers["retry-after-ms"] == "1000"
    assert (await http.ask("/live")).status == 200
    assert b"outrider_requests_refused_total" in (await http.ask("/metrics")).body
    taken = ServeOptions(http_address=f"127.0.0.1:{listener.port}")
    second = open_api(readiness, Security(), taken)
    assert second is not None
    with pytest.raises(ConfigError, match="http_address: must be free to bind"):
        await second.start()
    await listener.stop()


async def test_the_model_is_listed(start_http):
    async with start_http() as http:
        found = (await http.ask("/v1/models")).json()
        health = await http.ask("/health")
        head = await http.ask("/v1/models", method="HEAD")
        named = await http.ask("/v1/models/letters")
        others = [await http.ask(path) for path in ("/v1/models/gpt", "/v1/models/letters/x")]
        wrong = await http.ask("/v1/models/letters", method="DELETE")
        nowhere = await http.ask("/v1/embeddings")
    (model,) = found["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("letters", "model", 4200)
    assert (named.status, named.json(), wrong.status) == (200, model, 405)
    assert [(one.status, one.error["code"]) for one in others] == 2 * [(404, "model_not_found")]
    served = nowhere.error["message"].partition("served are ")[2].split(", ")
    assert nowhere.status == 404 and {"/v1/chat/completions", "/v1/models/"} <= {*served}
    assert (health.status, health.body, head.status, head.body) == (200, b"", 200, b"")


async def test_texts_become_tokens_and_tokens_texts(start_http):
    async with start_http() as http:
        ids = (await http.ask("/tokenize", {"prompt": "abc", "return_token_strs": True})).json()
        text = (await http.ask("/detokenize", {"tokens": [0, 1, 28]})).json()
        info = (await http.ask("/tokenizer_info")).json()
        wrong = await http.ask("/detokenize", {"tokens": [29]})
        none = await http.ask("/tokenize", {"add_special_tokens": False})
        chat = await http.ask("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert ids == {
        "count": 3,
        "max_model_len": 4200,
        "tokens": [0, 1, 2],
        "token_strs": ["a", "b", "c"],
    }
    assert text == {"prompt": "ab</s>"}
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("</s>", None, None)
    assert wrong.error["param"] == "tokens" and none.error["param"] == "prompt"
    assert (chat.status, chat.error["param"]) == (400, "messages")


async def test_a_text_beyond_an_answer_s_size_is_refused(start_http, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_ANSWER_BYTES", 3)
    async with start_http() as http:
        assert (await http.ask("/detokenize", {"tokens": [0, 1, 2]})).json() == {"prompt": "abc"}
        refused = await http.ask("/detokenize", {"tokens": [0, 1, 2, 3]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")
