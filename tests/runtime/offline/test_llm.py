"""A bundle in this process gives the answers, refusals and figures that its server gives."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider import LLM, Client, SamplingParams, build_request
from outrider.runtime.core.config import PREFIX_CACHE_BYTES, ServerConfig
from outrider.runtime.core.errors import (
    DrainDeadline,
    EngineRestart,
    RequestError,
    UnsupportedOption,
)
from outrider.runtime.offline import llm as llm_module
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.served import begin, server_of

PROMPTS = ("the quick", "def add(", "once upon a time")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(max_tokens=240, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, gamma=3, max_running=4) as opened:
        yield opened


async def test_answers_are_those_of_the_server(llm: LLM, tiny_bundle: Path):
    params = SamplingParams(seed=5, max_tokens=12, logprobs=2, return_provenance=True)
    config = ServerConfig(default_gamma=3, max_running=4, lb_delay_s=0.0, drain_timeout_s=0.0)
    serving = load_model(tiny_bundle, ServeOptions(config=config))
    server = server_of(serving)
    port = await begin(server, serving)
    async with Client(f"127.0.0.1:{port}") as client:
        served = [await client.complete(one, **params, request_id="x") for one in PROMPTS]
    await server.drain()
    serving.close()
    here = llm.generate(PROMPTS, params)
    assert [one.outputs for one in here] == [one.outputs for one in served]
    assert [one.usage for one in here] == [one.usage for one in served]


def test_answers_are_in_the_order_of_the_prompts_and_as_if_asked_alone(llm: LLM):
    prompts = [*PROMPTS, *PROMPTS]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(one, GREEDY)[0] for one in PROMPTS]
    texts = [one.text for one in together]
    assert texts == [one.text for one in alone] * 2
    assert [one.prompt for one in together] == prompts
    assert len({*texts}) == len(PROMPTS)


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM):
    several = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(PROMPTS, several)
    assert [one.usage.output_tokens for one in outputs] == [1, 2, 3]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, several[:2])


def test_several_completions_of_a_prompt_are_outputs_and_the_first_is_the_one(llm: LLM):
    params = SamplingParams(seed=4, max_tokens=8, ignore_eos=True)
    (one,) = llm.generate(PROMPTS[0], params)
    (several,) = llm.generate(PROMPTS[0], SamplingParams(**params, n=3))
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert several.outputs[0] == one.outputs[0]
    assert len({output.text for output in several.outputs}) == 3
    assert several.usage.output_tokens == 24
    assert several.usage.prompt_tokens == one.usage.prompt_tokens


def test_token_ids_are_a_prompt_and_lists_of_them_several(llm: LLM):
    ids = llm.encode(PROMPTS[0])
    (of_text,) = llm.generate(PROMPTS[0], GREEDY)
    (of_ids,) = llm.generate(ids, GREEDY)
    both = llm.generate([ids, ids], GREEDY)
    assert {one.text for one in (of_text, of_ids, *both)} == {of_text.text}
    assert of_ids.prompt_token_ids == ids
    assert llm.decode(ids) == PROMPTS[0]
    assert llm.generate([], GREEDY) == []
    for same in (list(np.array(ids)), np.array(ids)):
        assert [one.text for one in llm.generate(same, GREEDY)] == [of_text.text]


def test_a_stream_is_the_whole_answer_in_pieces(llm: LLM):
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    assert "".join(one.text for one in pieces) == llm.generate(PROMPTS[0], GREEDY)[0].text
    assert pieces[-1].finish.usage.output_tokens == sum(len(one.tokens) for one in pieces)


def test_prompts_have_the_forms_of_vllm(llm: LLM):
    ids = llm.encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], GREEDY)[0]
    dicts = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    answers = [*llm.generate(dicts, GREEDY), *llm.generate(dicts[0], GREEDY)]
    assert [one.text for one in answers] == [expected.text] * 3
    assert [one.prompt_token_ids for one in (expected, *answers)] == [ids] * 4
    assert next(llm.stream(dicts[1], GREEDY)).tokens


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts must be a text, a list of token ids, or a list of either, not NoneType"),
        (b"a", "not bytes"),
        (iter(["a"]), "not list_iterator"),
        ([b"a"], "not bytes"),
        ([None], "one of prompt and messages is required"),
        ([["a"]], "prompt must be a text, a list of token ids or a GenerateRequest"),
        ({"text": "a"}, "must have prompt or prompt_token_ids, not text"),
        ([{}], "must have prompt or prompt_token_ids, not nothing"),
        ({"prompt": 5}, "not int"),
    ],
)
def test_what_is_no_prompt_is_said_in_plain_words(llm: LLM, prompts: Any, words: str):
    with pytest.raises(TypeError, match=words):
        llm.generate(prompts, GREEDY)


def test_an_interrupt_while_requests_are_handed_over_cancels_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    begin, begun = llm._begin, []

    def interrupted(*asked: Any) -> Any:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(begin(*asked))
        return begun[-1]

    monkeypatch.setattr(llm, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], ENDLESS)
    assert all(one.cancelled() for one in begun)


def test_no_more_requests_are_under_way_than_keep_the_slots_busy(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Thousands that wait in the queue would all have to be begun before an interrupt could end them."""
    begin, begun, most = llm._begin, [], 0

    def counted(*asked: Any) -> Any:
        nonlocal most
        begun.append(begin(*asked))
        most = max(most, sum(not one.done() for one in begun))
        return begun[-1]

    monkeypatch.setattr(llm, "_begin", counted)
    outputs = llm.generate([PROMPTS[0]] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
    assert [one.usage.output_tokens for one in outputs] == [2] * 40
    assert len(begun) == 40 and most <= 16


def test_prompts_are_read_as_wide_beside_answers_as_without(llm: LLM):
    assert llm._serving.config.shared_chunk >= llm._serving.config.prefill_chunk


def test_prompts_that_begin_alike_are_computed_once(tiny_bundle: Path):
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    cached = {}
    for size in (0, PREFIX_CACHE_BYTES):
        with LLM(tiny_bundle, gamma=0, prefix_cache_bytes=size) as llm:
            llm.generate(prompt, GREEDY)
            cached[size] = llm.generate(prompt, GREEDY)[0].usage.cached_tokens
    assert cached[0] == 0 < cached[PREFIX_CACHE_BYTES]
    assert signature(LLM).parameters["prefix_cache_bytes"].default == PREFIX_CACHE_BYTES


def test_leaving_a_stream_cancels_its_request(llm: LLM):
    stream = llm.stream(build_request("a", request_id="x", **ENDLESS))
    next(stream)
    stream.close()
    # The name is free again, and so are the slots.
    assert len(llm.generate([PROMPTS[0]] * 4, GREEDY)) == 4
    assert next(llm.stream(build_request("a", request_id="x", **GREEDY))).tokens


@pytest.fixture
def chat_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The bundle with a template that spells a conversation out."""
    root = tmp_path / "chat"
    shutil.copytree(tiny_bundle, root)
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    files = {
        "chat/default.jinja": template + "{% if add_generation_prompt %}assistant:{% endif %}",
        "chat/special_tokens.json": json.dumps({"special_tokens": {}, "control_tokens": []}),
    }
    manifest = json.loads((root / "manifest.json").read_text("utf-8"))
    (root / "chat").mkdir()
    for name, text in files.items():
        data = text.encode()
        (root / name).write_bytes(data)
        entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        manifest["files"][name] = entry
    (root / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return root


def test_a_conversation_is_rendered_and_answered(chat_bundle: Path):
    hello = [{"role": "user", "content": "the quick"}]
    more = [*hello, {"role": "assistant", "content": "brown"}]
    with LLM(chat_bundle, gamma=0) as llm:
        (one,) = llm.chat(hello, GREEDY)
        assert one.prompt_token_ids
        both = llm.chat([hello, more], GREEDY)
        (continued,) = llm.chat(more, GREEDY, chat_params={"continue_final_message": True})
        rendered = llm.generate(
            [
                "user: the quick\nassistant:",
                "user: the quick\nassistant: brown\nassistant:",
                "user: the quick\nassistant: brown",
            ],
            GREEDY,
        )
    texts = [answer.text for answer in (*both, continued)]
    assert texts == [answer.text for answer in rendered]
    assert one.text == texts[0] and len({*texts}) == 3
    assert one.prompt is None


def test_refusals_name_field_and_rule_and_leave_nobody_behind(llm: LLM):
    with pytest.raises(RequestError, match="temperature") as refused:
        llm.generate(["a", "b"], [ENDLESS, SamplingParams(temperature=9.0)])
    assert refused.value.field == "sampling.temperature"
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("a", {"temprature": 1.0})
    with pytest.raises(UnsupportedOption, match="chat"):
        llm.chat([{"role": "user", "content": "Hello"}])
    assert llm.generate("a", GREEDY)[0].usage.output_tokens == 12


def test_what_is_served_and_a_bar_of_what_is_done(llm: LLM, capsys: pytest.CaptureFixture[str]):
    assert (llm.info().vocab_size, llm.info().limits.max_context) == (512, 256)
    llm.generate(PROMPTS, GREEDY, progress=True)
    assert "100%" in capsys.readouterr().err


def test_where_the_worker_is_dead_requests_end(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_module, "WATCH_EVERY_S", 0.01)
    with LLM(tiny_bundle, gamma=0, max_running=1) as llm:
        heartbeat = llm._serving.worker.heartbeat
        heartbeat.has_died = True
        with pytest.raises(EngineRestart):
            for _ in range(100_000):
                llm.generate("a", SamplingParams(max_tokens=1))


def test_the_form_of_an_answer_to_a_source_is_of_what_follows_its_prefix(
    tiny_text2text_bundle: Path,
):
    constraint = {"regex": "[a-z]{3,5}( [a-z]+){2}", "temperature": 0.0, "max_tokens": 12}
    with LLM(tiny_text2text_bundle) as llm:
        (drafted,) = llm.generate("anything", {**constraint, "speculation": {"gamma": 3}})
        (plain,) = llm.generate("anything", {**constraint, "speculation": {"enabled": False}})
        (prefixed,) = llm.generate("anything", {**constraint, "answer_prefix": "A B: "})
    assert drafted.outputs[0].text == plain.outputs[0].text
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    for answer in (drafted, prefixed):
        text = answer.outputs[0].text
        assert text and set(text) <= set("abcdefghijklmnopqrstuvwxyz "), text


def test_closing_ends_what_is_under_way_and_all_threads(tiny_bundle: Path):
    before = {*threading.enumerate()}
    llm = LLM(tiny_bundle, gamma=0, max_running=1)
    stream = llm.stream("a", ENDLESS)
    next(stream)
    llm.close()
    with pytest.raises(DrainDeadline):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    llm.close()
    assert not [one for one in {*threading.enumerate()} - before if "outrider" in one.name]


def test_a_forked_process_is_told_to_make_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Threads do not come along: whoever waits for one waits for ever. A fork shows by its number."""
    found = llm._close.peek()
    assert found is not None
    _, end, ends, _ = found
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="made in another process"):
            llm.generate("a")
        end(*ends)
    assert llm.generate("a", GREEDY)[0].text


def test_one_that_is_collected_on_its_own_thread_is_closed_by_another(tiny_bundle: Path):
    before = {*threading.enumerate()}
    box = [LLM(tiny_bundle, gamma=0, max_running=1)]
    box[0]._loop.call_soon_threadsafe(box.clear)
    ends_s = time.monotonic() + 60.0
    while (left := {*threading.enumerate()} - before) and time.monotonic() < ends_s:
        for one in left:
            # One that is still starting is listed, and cannot be waited for.
            if one.is_alive():
                one.join(1.0)
    assert not left


def test_whoever_asks_while_another_thread_closes_is_answered_or_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    llm = LLM(tiny_bundle, gamma=0, max_running=1)
    closing = threading.Thread(target=llm.close)
    hand_over = asyncio.run_coroutine_threadsafe

    def delayed(coroutine, loop):
        if threading.current_thread() is threading.main_thread():
            closing.start()
            # What closing does meanwhile: without a lock everything, to the loop's end.
            closing.join(0.5)
        return hand_over(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", delayed)
    answering = llm._begin(llm._call(build_request("a", **GREEDY), lambda _: None))
    closing.join()
    assert wait([answering], timeout=10.0).done
