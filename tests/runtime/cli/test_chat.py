"""``outrider generate --chat`` and ``outrider chat`` against a served model of letters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from outrider.engines.base import FloatArray
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_REFUSED, EXIT_UNAVAILABLE, visible
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.chat.files import ChatFiles
from outrider.runtime.serving.tokenizer import TokenizersCodec
from typer.testing import CliRunner

from tests.runtime.conftest import Running
from tests.runtime.serving.chat.shapes import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>{{ hint or 'a' }}"
TOKENIZER = byte_tokenizer(["</s>"], ["<s>", "<u>", "<a>"])
VOCAB = TOKENIZER.get_vocab_size()
Start = Callable[..., AbstractAsyncContextManager[Running]]


def next_id(prefix: tuple[int, ...]) -> FloatArray:
    """Letters in their order."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[(prefix[-1] + 1) % VOCAB] = 9.0
    return logits


@pytest.fixture
def start_chat(start: Start) -> Start:
    def begin(**options: Any) -> AbstractAsyncContextManager[Running]:
        codec = TokenizersCodec(TOKENIZER.to_str().encode())
        files = ChatFiles(templates={"default": TEMPLATE}, special_tokens={}, control_tokens=())
        scripts = {"target": next_id, "draft": next_id, "vocab_size": VOCAB, "codec": codec}
        return start(chats=ChatEncoder(files, codec), **scripts, **options)

    return begin


async def run(running: Running, *arguments: str, text: str = "") -> Result:
    command = [*arguments, "--address", running.address, "--temperature", "0", "--max-tokens", "3"]
    return await asyncio.to_thread(CliRunner().invoke, app, command, input=text)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rendered texts, as they come."""
    found: list[str] = []
    encode = ChatEncoder.encode

    def noted(self: ChatEncoder, *arguments: Any) -> tuple[int, ...]:
        ids = encode(self, *arguments)
        found.append(TOKENIZER.decode(ids, skip_special_tokens=False))
        return ids

    monkeypatch.setattr(ChatEncoder, "encode", noted)
    return found


async def test_a_prompt_may_be_a_message(start_chat: Start, prompts: list[str]) -> None:
    async with start_chat() as running:
        plain = await run(running, "generate", "--chat", "--prompt", "-", text="hi")
        options = ("--system", "be kind", "--template-argument", 'hint="k"')
        hinted = await run(running, "generate", "--chat", "--prompt", "hi", *options)
    assert (plain.exit_code, plain.stdout) == (0, "bcd\n")
    assert (hinted.exit_code, hinted.stdout) == (0, "lmn\n")
    assert prompts == ["<u>hi<a>a", "<s>be kind<u>hi<a>k"]


async def test_a_conversation_goes_on_until_it_is_quit(
    start_chat: Start, prompts: list[str]
) -> None:
    lines = "hi\n\n you \n/new\nagain\n/quit\nunread\n"
    async with start_chat() as running:
        found = await run(running, "chat", "--system", "S", text=lines)
        ended = await run(running, "chat", text="x")
    assert (found.exit_code, found.stdout) == (0, "bcd\n" * 3)
    assert (ended.exit_code, ended.stdout) == (0, "bcd\n")
    assert prompts == [
        "<s>S<u>hi<a>a",
        "<s>S<u>hi<a>bcd<u>you<a>a",
        "<s>S<u>again<a>a",
        "<u>x<a>a",
    ]


async def test_a_conversation_goes_on_behind_a_refused_answer(
    start_chat: Start, prompts: list[str]
) -> None:
    limits = RequestLimits(max_prompt_bytes=100)
    async with start_chat(limits=limits) as running:
        found = await run(running, "chat", text=f"hi\n{'x' * 101}\nyou\n")
        ended = await run(running, "chat", text=f"hi\n{'x' * 101}\n/quit\n")
    assert (found.exit_code, found.stdout) == (0, "bcd\n" * 2)
    assert found.stderr.count("outrider: ") == 1
    assert prompts[:2] == ["<u>hi<a>a", "<u>hi<a>bcd<u>you<a>a"]
    assert (ended.exit_code, ended.stdout) == (EXIT_REFUSED, "bcd\n")


async def test_what_cannot_be_is_said_in_a_line(start: Start) -> None:
    async with start() as running:
        refused = await run(running, "chat", text="hi\n")
        bare = await run(running, "generate", "--prompt", "a", "--system", "S")
        wrong = await run(running, "chat", "--template-argument", "hint=k")
    assert refused.exit_code == EXIT_REFUSED
    assert (
        refused.stderr
        == "outrider: letters has no chat template: outrider generate completes texts with it\n"
    )
    assert (bare.exit_code, wrong.exit_code) == (2, 2)
    assert "needs --chat" in bare.stderr
    assert "must be NAME=JSON" in wrong.stderr


def test_nobody_answers() -> None:
    options = ("--address", "127.0.0.1:1", "--timeout-s", "0.5")
    nobody = CliRunner().invoke(app, ["chat", *options], input="hi\n")
    assert nobody.exit_code == EXIT_UNAVAILABLE


def test_a_models_control_sequences_are_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "a\x1b[2Jb\r\x07\n\tc\x9b31m\u202ee\u200d é\u00a0日"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert visible(told) == "a\\x1b[2Jb\\r\\x07\n\tc\\x9b31m\\u202ee\u200d é\u00a0日"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert visible(told) == told
