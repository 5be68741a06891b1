"""Long texts are tokenised one at a time, in a fair order, beside an event loop that goes on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider import CallError
from outrider.runtime.core import drafting
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import MAX_PARTS, parse_drafter
from outrider.runtime.core.errors import ContextTooLong, Overloaded, RequestError
from outrider.runtime.serving import encoding
from outrider.runtime.serving import tokenization as texts_module
from outrider.runtime.serving.requests import checks
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.checks import check_request
from outrider.runtime.serving.tokenization import BYTES_PER_TOKEN, INLINE_TEXT, TokenizationQueue
from outrider.runtime.serving.tokenizer import TokenizersCodec, max_token_bytes
from outrider.v1 import inference_pb2 as wire

from tests.conftest import CORPUS, write_tokenizer
from tests.mutants import put_in
from tests.runtime.conftest import LetterCodec, running

KIB = 1 << 10


class Gate:
    """Work that begins when its text's turn comes and ends when the test opens the gate."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open = threading.Semaphore(0)

    def work(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.begun.append(name)
            assert self._open.acquire(timeout=60)
            return name

        return wait

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._open.release()


def queue(*, max_queued: int = 8, max_queued_tokens: int = 1 << 20) -> TokenizationQueue:
    return TokenizationQueue(
        max_queued=max_queued, max_queued_tokens=max_queued_tokens, retry_after_s=1.5
    )


def put(
    queue: TokenizationQueue,
    gate: Gate,
    name: str,
    kib: int,
    *,
    tenant: str = "",
    is_prompt: bool = False,
) -> asyncio.Task[str]:
    work, text = gate.work(name), "x" * (kib * KIB)
    return asyncio.ensure_future(queue.run(text, work, tenant=tenant, is_prompt=is_prompt))


async def settled() -> None:
    """Let every task go as far as it can without a thread."""
    for _ in range(4):
        await asyncio.sleep(0)


async def test_short_texts_pass_long_ones_by_no_more_than_a_long_ones_size() -> None:
    texts, gate = queue(), Gate()
    first = put(texts, gate, "first", 64)
    await settled()
    long, short = put(texts, gate, "long", 32), put(texts, gate, "short", 8)
    await settled()
    gate.open()
    assert await first == "first"
    # 64 KiB were tokenised since the long one came: it passes whoever comes now.
    late = put(texts, gate, "late", 8)
    await settled()
    gate.open(3)
    assert await asyncio.gather(long, short, late) == ["long", "short", "late"]
    assert gate.begun == ["first", "short", "long", "late"]


async def test_a_short_text_waits_for_nobody() -> None:
    texts, gate = queue(), Gate()
    first = put(texts, gate, "first", 64)
    await settled()
    assert await texts.run("x" * (INLINE_TEXT - 1), lambda: "at once") == "at once"
    gate.open()
    await first


BYTES = {"max_queued_tokens": 100 * KIB // BYTES_PER_TOKEN}


@pytest.mark.parametrize("bounds", [{"max_queued": 1}, BYTES], ids=["texts", "bytes"])
async def test_texts_count_against_the_queue_while_they_are_here(bounds: dict[str, int]) -> None:
    texts, gate = queue(**bounds), Gate()
    one, two = put(texts, gate, "one", 50), put(texts, gate, "two", 50)
    await settled()
    with pytest.raises(Overloaded) as caught:
        await texts.run("x" * 8 * KIB, gate.work("three"))
    assert caught.value.retry_after_s == 1.5
    two.cancel()
    await settled()
    three = put(texts, gate, "three", 50)
    await settled()
    gate.open(2)
    assert await asyncio.gather(one, three) == ["one", "three"]
    assert gate.begun == ["one", "three"]


async def keep_nobody_elses_out() -> None:
    texts, gate = queue(**BYTES), Gate()
    asked = [("x", 50), ("x", 50), ("x", 8), ("y", 50), ("y", 8), ("z", 200)]
    tasks = []
    for tenant, kib in asked:
        tasks.append(put(texts, gate, tenant, kib, tenant=tenant))
        await settled()
    is_refused = [task.done() and isinstance(task.exception(), Overloaded) for task in tasks]
    gate.open(len(tasks))
    await asyncio.gather(*tasks, return_exceptions=True)
    # y's first is taken where x's is not. What is kept for such has an end, too, as z's size shows.
    assert is_refused == [False, False, True, False, True, True]
    assert not texts._jobs and not texts._num_texts_of and texts._num_bytes == 0


async def test_one_tenants_texts_keep_nobody_elses_out() -> None:
    await keep_nobody_elses_out()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("share = 1 if tenant in self._num_texts_of else 2", "share = 1"),
        ("share = 1 if tenant in self._num_texts_of else 2", "share = 2"),
        ("num_bytes > share * self._max_bytes", "num_bytes > self._max_bytes"),
    ],
)
async def test_mutants_let_one_tenant_keep_others_out(old: str, new: str, monkeypatch) -> None:
    put_in(monkeypatch, texts_module, old, new)
    with pytest.raises(AssertionError):
        await keep_nobody_elses_out()


async def test_one_text_is_taken_whatever_its_size() -> None:
    texts, gate = queue(max_queued=0, max_queued_tokens=0), Gate()
    gate.open()
    assert await put(texts, gate, "one", 100) == "one"


async def test_nothing_begins_beside_the_work_of_a_caller_that_left() -> None:
    texts, gate = queue(), Gate()
    left, next_one = put(texts, gate, "left", 64), put(texts, gate, "next", 64)
    await settled()
    left.cancel()
    await settled()
    assert texts._is_busy
    assert set(gate.begun) <= {"left"}
    gate.open(2)
    assert await next_one == "next"
    assert left.cancelled()


async def test_an_error_of_the_work_is_its_callers() -> None:
    texts = queue()
    with pytest.raises(ZeroDivisionError):
        await texts.run("x" * INLINE_TEXT, lambda: 1 // 0)
    assert await texts.run("x" * INLINE_TEXT, lambda: "next") == "next"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder / "tokenizer.json"


async def test_health_is_answered_while_a_long_text_is_tokenised(start, tokenizer_file) -> None:
    text = (" ".join(CORPUS) * 4000)[: RequestLimits().max_prompt_bytes // 2]
    async with (
        start(codec=TokenizersCodec(tokenizer_file)) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        texts = run.server.readiness.handler._texts
        refusal = asyncio.ensure_future(anext(run.client.generate(text)))
        num_answers = 0
        while not refusal.done():
            was_busy = texts._is_busy
            await health.Check(health_pb2.HealthCheckRequest())
            num_answers += was_busy and texts._is_busy
        with pytest.raises(CallError) as caught:
            await refusal
    # The model of these tests has fewer tokens than the tokenizer.
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert num_answers > 10


async def test_a_full_queue_refuses_a_text_that_is_not_tokenised_yet(start_endless) -> None:
    config = ServerConfig(max_queued=0, lb_delay_s=0, drain_timeout_s=0)
    async with start_endless(config=config, max_batch=1) as run:
        first = run.endless()
        await anext(first)
        with pytest.raises(CallError) as caught:
            # The codec of these tests fails at digits.
            await anext(run.client.generate("1" * 8 * KIB))
        await first.aclose()
    assert caught.value.reason == "QUEUE_FULL"


async def test_a_prompt_on_its_way_takes_a_place_of_the_queue(start_endless) -> None:
    config = ServerConfig(max_queued=1, lb_delay_s=0, drain_timeout_s=0)
    async with start_endless(config=config, max_batch=1) as run:
        first, texts, gate = run.endless(), run.server.readiness.handler._texts, Gate()
        await anext(first)
        on_its_way = put(texts, gate, "one", 8, is_prompt=True)
        await settled()
        assert texts.prompts_of("") == (1, 8 * KIB // BYTES_PER_TOKEN)
        with pytest.raises(CallError) as caught:
            await anext(run.client.generate("1"))  # the codec of these tests fails at digits
        assert caught.value.reason == "QUEUE_FULL"
        gate.open()
        await on_its_way
        # Another tenant's is weighed when it comes to the queue, and a text of Tokenize or a reference never does.
        others = put(texts, gate, "others", 8, tenant="x", is_prompt=True)
        passing = put(texts, gate, "two", 8)
        await settled()
        second = asyncio.ensure_future(anext(run.client.generate("a", max_tokens=1)))
        while (await run.client.info()).load.num_queued == 0:
            pass
        gate.open(2)
        await asyncio.gather(others, passing)
        await first.aclose()
        assert len((await second).tokens) == 1


async def test_prompts_on_their_way_take_free_slots_first(start_endless) -> None:
    config = ServerConfig(max_queued=1, lb_delay_s=0, drain_timeout_s=0)
    async with start_endless(config=config, max_batch=2) as run:
        first, worker = run.endless(), run.server.readiness.handler._serving.worker
        await anext(first)
        worker.check_room(1, num_tokens=2, num_ahead=1)
        with pytest.raises(Overloaded):
            worker.check_room(1, num_tokens=3, num_ahead=2)
        await first.aclose()


async def test_an_answer_that_clients_would_not_take_is_refused_by_its_limit(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encoding.MAX_ANSWER_BYTES == 4 << 20
    monkeypatch.setattr(encoding, "MAX_ANSWER_BYTES", 64 * KIB)
    async with start() as run:
        with pytest.raises(CallError) as caught:
            await run.client.tokenize(
                "a" * 16 * KIB
            )  # an id of one byte and a letter of three each
        assert len(await run.client.tokenize("a" * (16 * KIB - 16))) == 16 * KIB - 16
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert [violation.field for violation in error.violations] == ["text"]
    assert str(64 * KIB) in str(error)


# --- refused by bytes


def test_no_token_stands_for_more_bytes_than_the_codec_says(tokenizer_file: Path) -> None:
    codec, rng = TokenizersCodec(tokenizer_file), random.Random(5)
    longest = codec.max_token_bytes
    assert longest is not None
    for _ in range(300):
        words = rng.choices((*CORPUS, " ", "\n\n\n\n", "é", "</s>", "東京", "\x00"), k=4)
        text = "".join(word[rng.randrange(len(word)) :] for word in words)
        assert len(text.encode()) <= longest * len(codec.encode(text, False))
    # The bound is reached: the longest token of the corpus stands for itself.
    texts = [codec.decode((token,), False) for token in range(512)]
    spelled = max((one for one in texts if "\ufffd" not in one), key=lambda one: len(one.encode()))
    assert len(codec.encode(spelled, False)) == 1
    assert len(spelled.encode()) == longest


def described(path: Path, **changes: object) -> dict[str, object]:
    return json.loads(path.read_text()) | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "behavior": "Removed"},
                    {"type": "ByteLevel"},
                ],
            }
        },
        {"added_tokens": [{"content": "<mask>", "lstrip": True, "rstrip": False}]},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "WordPiece", "vocab": {}}},
    ],
    ids=str,
)
def test_what_may_drop_text_has_no_bound(tokenizer_file: Path, changes: dict[str, object]) -> None:
    assert max_token_bytes(described(tokenizer_file)) is not None
    assert max_token_bytes(described(tokenizer_file, **changes)) is None


def test_a_tokenizer_may_leave_out_what_it_does_not_have(tokenizer_file: Path) -> None:
    content = described(tokenizer_file)
    whole = TokenizersCodec(tokenizer_file)
    for name in ("added_tokens", "normalizer", "post_processor", "truncation", "padding"):
        del content[name]
    codec = TokenizersCodec(json.dumps(content).encode())
    assert codec.max_token_bytes == whole.max_token_bytes
    assert codec.encode("the quick") == whole.encode("the quick")
    del content["pre_tokenizer"]
    assert TokenizersCodec(json.dumps(content).encode()).max_token_bytes is None


def test_composed_letters_widen_the_bound(tokenizer_file: Path) -> None:
    plain = max_token_bytes(described(tokenizer_file))
    composed = max_token_bytes(described(tokenizer_file, normalizer={"type": "NFC"}))
    assert plain is not None
    assert composed == 4 * plain


def test_a_text_of_too_many_bytes_is_refused_before_it_is_tokenised() -> None:
    model = ServedModel(
        name="m", vocab_size=9, max_context=11, max_gamma=0, eos_token_ids=(), drafters=("none",),
        max_token_bytes=5,
    )  # fmt: skip
    rules = RequestRules(RequestLimits(), model)
    check_request(wire.GenerateRequest(text="é" * 25), "", rules)
    with pytest.raises(ContextTooLong) as caught:
        check_request(wire.GenerateRequest(text="é" * 25 + "a"), "", rules)
    assert (caught.value.limit, caught.value.given) == (10, 11)


# --- lists that would be refused anyway


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": [1] * 4200}, "prompt"),
        ({"answer_prefix_tokens": {"ids": [1] * 4201}}, "answer_prefix_tokens"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"bad_words": ["a"] * 65}, "sampling.bad_words"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "sampling.logit_bias"),
        ({"allowed_token_ids": [1] * 10_001}, "sampling.allowed_token_ids"),
        ({"speculation": {"branching": [1] * 17}}, "speculation.branching"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_lists_are_refused_before_they_are_turned_into_values(
    start, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], field: str
) -> None:
    monkeypatch.setattr(checks, "speculation_of", None)
    async with start() as run:
        with pytest.raises(CallError) as caught:
            await anext(run.client.generate(**{"prompt": wire.GenerateRequest(), **options}))
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_drafter_of_a_million_parts_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse_part = drafting._parse_part
    monkeypatch.setattr(
        drafting, "_parse_part", lambda text: parsed.append(text) or parse_part(text)
    )
    with pytest.raises(RequestError, match="at most 4 distinct parts"):
        parse_drafter("+".join(f"a{number}" for number in range(1_000_000)))
    assert len(parsed) == MAX_PARTS + 1


async def test_a_model_that_changes_while_a_text_is_on_its_way_answers_it_no_more() -> None:
    class Changing(LetterCodec):
        then: Callable[[], None]

        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            self.then()
            return super().encode(text, add_special_tokens)

    codec = Changing()
    async with running(codec=codec) as run:
        codec.then = run.server.readiness.handler.refuse_changed_model
        with pytest.raises(CallError) as caught:
            await anext(run.client.generate("abc", max_tokens=1))
    assert caught.value.reason == "MODEL_INTEGRITY"
