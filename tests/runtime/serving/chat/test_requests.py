"""Conversations on the wire: generated from, tokenised, described, refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
import numpy as np
import pytest
from outrider import RequestRefused, build_request
from outrider.engines.base import FloatArray
from outrider.errors import decode_error
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.serving import encoding
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.requests.defaults import RequestDefaults
from outrider.runtime.serving.tokenization import INLINE_TEXT
from outrider.runtime.serving.tokenizer import TokenizersCodec
from outrider.v1 import inference_pb2 as wire
from outrider.v1 import inference_pb2_grpc

from tests.runtime.conftest import Running
from tests.runtime.serving.chat.shapes import SHAPES, template_of
from tests.runtime.serving.test_tokenization import Gate, put, settled

SHAPE = SHAPES["qwen3"]
TOKENIZER = SHAPE.tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|im_end|>")
HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
Start = Callable[..., AbstractAsyncContextManager[Running]]


def next_id(prefix: tuple[int, ...]) -> FloatArray:
    """Letters in their order."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[(prefix[-1] + 1) % VOCAB] = 9.0
    return logits


def chat_server() -> dict[str, Any]:
    """Options of a server whose bundle has a chat template."""
    codec = TokenizersCodec(TOKENIZER.to_str().encode())
    chats = ChatEncoder(SHAPE.files(template_of("qwen3")), codec)
    scripts = {"target": next_id, "draft": next_id, "vocab_size": VOCAB}
    return {"codec": codec, "chats": chats, **scripts}


@pytest.fixture
def start_chat(start: Start) -> Start:
    def begin(**options: Any) -> AbstractAsyncContextManager[Running]:
        return start(**chat_server() | options)

    return begin


async def tokenize(running: Running, request: wire.TokenizeRequest) -> list[int]:
    async with grpc.aio.insecure_channel(running.address) as channel:
        try:
            answer = await inference_pb2_grpc.InferenceStub(channel).Tokenize(request)
        except grpc.aio.AioRpcError as error:
            raise decode_error(error) from error
    assert len(answer.tokens) == len(answer.ids)
    return list(answer.ids)


async def ids_of(running: Running, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    chat = build_request(messages=messages, **options).chat
    return await tokenize(running, wire.TokenizeRequest(chat=chat))


async def test_a_chat_is_its_rendered_text_without_further_special_tokens(
    start_chat: Start,
) -> None:
    async with start_chat() as running:
        ids = await ids_of(running, HELLO)
        assert ids == TOKENIZER.encode(RENDERED, add_special_tokens=False).ids
        assert await running.client.tokenize(RENDERED) == [END, *ids]
        options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0}
        of_chat = [one async for one in running.client.generate(messages=HELLO, **options)]
        of_ids = [one async for one in running.client.generate(ids, **options)]
        assert of_chat[-1].finish.usage.prompt_tokens == len(ids)
        assert [t.id for one in of_chat for t in one.tokens] == [
            t.id for one in of_ids for t in one.tokens
        ]


async def test_template_arguments_tools_and_last_messages_reach_the_template(
    start_chat: Start,
) -> None:
    async with start_chat() as running:
        quiet = await ids_of(running, HELLO, template_arguments={"enable_thinking": False})
        assert TOKENIZER.decode(quiet).endswith("<think>\n\n</think>\n\n")
        tooled = await ids_of(running, HELLO, tools=[{"name": "f"}])
        assert "<tools>\n{" in TOKENIZER.decode(tooled)
        messages = [*HELLO, {"role": "assistant", "content": "I go "}]
        final = await ids_of(running, messages, continue_final_message=True)
        assert TOKENIZER.decode(final).endswith("I go ")
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
        assert '"arguments": {"a": 1}' in TOKENIZER.decode(await ids_of(running, [*HELLO, call]))


async def test_what_is_served_is_told(start_chat: Start, start: Start) -> None:
    async with start_chat(generation_defaults={"top_p": 0.8}) as running:
        info = await running.client.info()
        assert info.chat.templates == ["default"]
        assert {"user", "tool"}.isdisjoint(info.chat.control_token_roles)
        assert info.limits.max_messages == 1024
        assert info.generation_defaults_json == '{"top_p": 0.8}'
        assert not info.applies_generation_defaults
    defaults = RequestDefaults(sampling={"temperature": 0.0})
    async with start_chat(defaults=defaults) as running:
        assert (await running.client.info()).applies_generation_defaults
    async with start() as running:
        info = await running.client.info()
        assert not info.HasField("chat")
        assert info.generation_defaults_json == ""


async def refused(running: Running, request: wire.GenerateRequest) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as refusal:
        [one async for one in running.client.generate(request)]
    return refusal.value.reason, refusal.value.violations[0].field


async def test_a_bundle_without_a_template_and_an_encoder_refuse_chats(start: Start) -> None:
    chat = build_request(messages=HELLO)
    async with start() as running:
        assert await refused(running, chat) == ("UNSUPPORTED_OPTION", "chat")
        with pytest.raises(RequestRefused, match="chat: needs a bundle with a chat template"):
            await ids_of(running, HELLO)
    async with start(max_source=9) as running:
        assert await refused(running, chat) == ("UNSUPPORTED_OPTION", "chat")


async def test_refusals_name_their_field(start_chat: Start) -> None:
    limits = RequestLimits(max_messages=2, max_prompt_bytes=200)
    async with start_chat(limits=limits) as running:
        for field, chat in {
            "chat.messages": wire.Chat(),
            "chat": build_request(messages=[{"role": "user", "content": "é" * 99}]).chat,
            "chat.tools_json": wire.Chat(messages=[wire.ChatMessage(role="user")], tools_json="{"),
            "chat.template": build_request(messages=HELLO, template="rag").chat,
            "chat.template_arguments_json": build_request(
                messages=HELLO, template_arguments={"messages": 1}
            ).chat,
        }.items():
            request = wire.GenerateRequest(chat=chat)
            assert await refused(running, request) == ("INVALID_PARAMETER", field)
        many = build_request(messages=HELLO * 3)
        assert await refused(running, many) == ("INVALID_PARAMETER", "chat.messages")
        # The markup is beyond the bound, the text is not.
        with pytest.raises(RequestRefused, match=r"chat: .* when it is rendered"):
            await ids_of(running, [{"role": "user", "content": "x" * 160}])
        with pytest.raises(RequestRefused, match="add_special_tokens: must be left out with chat"):
            chat = build_request(messages=HELLO).chat
            await tokenize(running, wire.TokenizeRequest(chat=chat, add_special_tokens=False))


async def test_a_text_that_fits_no_slot_is_not_rendered_to_its_end(start_chat: Start) -> None:
    most = TokenizersCodec(TOKENIZER.to_str().encode()).max_token_bytes
    assert most is not None
    async with start_chat(max_context=50, max_token_bytes=most) as running:
        long = [{"role": "user", "content": "x" * 51 * most}]
        assert await refused(running, build_request(messages=long)) == (
            "CONTEXT_LENGTH_EXCEEDED",
            "prompt",
        )
        # That asks how long it is.
        assert len(await ids_of(running, long)) > 50 * most


async def test_an_answer_that_clients_would_not_take_is_refused(
    start_chat: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_ANSWER_BYTES", 30)
    async with start_chat() as running:
        with pytest.raises(RequestRefused) as refusal:
            await ids_of(running, HELLO)
        assert refusal.value.violations[0].field == "chat"
        with pytest.raises(RequestRefused) as refusal:
            await running.client.tokenize("Hello, you")
        assert refusal.value.violations[0].field == "text"


async def test_chats_are_rendered_beside_the_event_loop(
    start_chat: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode = ChatEncoder.encode

    def noted(*arguments: Any) -> tuple[int, ...]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*arguments)

    monkeypatch.setattr(ChatEncoder, "encode", noted)
    async with start_chat() as running:
        await ids_of(running, HELLO)
        await ids_of(running, [{"role": "user", "content": "x" * INLINE_TEXT}])
        # Of many messages, rendering is the work.
        await ids_of(running, HELLO * 40)
    assert threads == [False] * 3


async def test_a_short_chat_waits_for_no_long_text(start_chat: Start) -> None:
    async with start_chat() as running:
        texts, gate = running.server.readiness.handler._texts, Gate()
        long = put(texts, gate, "long", 64)
        await settled()
        assert await ids_of(running, HELLO)
        assert not long.done()
        gate.open()
        await long
