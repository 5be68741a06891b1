"""Many requests on one stream of the Open Inference Protocol."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from outrider.errors import decode_error
from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve import infer_request as kserve_request
from outrider.runtime.addons.kserve import stream as kserve_stream
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.factory import load_model

from tests.runtime.addons.kserve.requests import (
    KSERVE,
    answers_of,
    infer_request,
    streamed,
    stub_of,
    texts_of,
)
from tests.runtime.conftest import ENDLESS_TOKENS
from tests.runtime.served import server_of
from tests.runtime.serving.security.test_quotas import BARELY, security

PATIENCE_S = 60.0
GREEDY = {"temperature": 0.0, "max_tokens": 30}
ENDLESS = {
    "temperature": 0.0,
    "max_tokens": ENDLESS_TOKENS - 10,
    "speculation": {"enabled": False},
}


def is_final(answer: oip.ModelStreamInferResponse) -> bool:
    return answer.infer_response.parameters["triton_final_response"].bool_param


async def wait_until_idle(run) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (load := (await run.client.info()).load).num_free_slots < load.num_slots:
            pass
        assert not load.num_queued


async def test_requests_of_a_stream_interleave_and_answers_have_their_ids(start_endless):
    letters = {"a": "abc", "b": "xyz"}
    async with start_endless(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        call = stub.ModelStreamInfer(timeout=PATIENCE_S)
        for name, text in letters.items():
            await call.write(streamed(text, name=name, **ENDLESS))
        seen, texts = [], defaultdict(str)
        # Neither ends, so that what comes of both has come side by side.
        while set(seen) != set(letters) or len(seen) < 6:
            answer = await call.read()
            assert not is_final(answer) and not answer.error_message
            seen.append(answer.infer_response.id)
            texts[seen[-1]] += texts_of(answer.infer_response)[0]
        call.cancel()
        await wait_until_idle(run)
    assert texts["a"].startswith("def") and texts["b"].startswith("abc")


async def test_the_last_answer_says_so_or_an_empty_one_does(start):
    wish = {"triton_enable_empty_final_response": True}
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        plain = await answers_of(stub, streamed(**GREEDY))
        empty = await answers_of(stub, streamed(name="e", parameters=wish, **GREEDY))
        whole = await answers_of(stub, infer_request(**GREEDY))
    finals = [is_final(answer) for answer in plain]
    assert finals == [False] * (len(plain) - 1) + [True]
    assert "".join(texts_of(one.infer_response)[0] for one in plain) == "".join(
        texts_of(one.infer_response)[0] for one in empty[:-1]
    )
    assert [is_final(answer) for answer in empty] == [False] * (len(empty) - 1) + [True]
    assert not empty[-1].infer_response.outputs and empty[-1].infer_response.id == "e"
    assert len(whole) == 1 and is_final(whole[0])
    assert texts_of(whole[0].infer_response)[0].startswith("abcdef")


async def test_completions_of_a_prompt_are_told_apart(start):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        answers = await answers_of(stub, streamed(n=2, **GREEDY))
    texts: dict[int, str] = defaultdict(str)
    for answer in answers:
        index = answer.infer_response.parameters["index"].int64_param
        texts[index] += texts_of(answer.infer_response)[0]
    assert texts[0] == texts[1] and len(texts[0]) == 30
    assert [is_final(answer) for answer in answers].count(True) == 1 and is_final(answers[-1])


async def test_a_request_that_fails_ends_no_other(start):
    requests = [
        streamed(name="bad", temperature=9),
        streamed(name="good", **GREEDY),
        infer_request(name="other", text=None),
        streamed(name="long", max_tokens=99_999),
        oip.ModelInferRequest(model_name="nobody"),
    ]
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        call = stub.ModelStreamInfer(iter(requests), timeout=PATIENCE_S)
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
    failed = {one.infer_response.id: one.error_message for one in answers if one.error_message}
    assert failed.keys() == {"bad", "other", "long", ""}
    assert failed["bad"].startswith("[request id: bad] INVALID_PARAMETER: sampling.temperature: ")
    assert failed["other"] == "[request id: other] INVALID_PARAMETER: text_input: is required"
    assert failed["long"].startswith("[request id: long] INVALID_PARAMETER: max_tokens")
    assert failed[""].startswith("MODEL_NOT_FOUND: ")
    good = [one.infer_response for one in answers if not one.error_message]
    assert len("".join(texts_of(one)[0] for one in good)) == 30
    assert all(is_final(one) for one in answers if one.error_message)


async def test_bytes_that_are_no_message_fail_alone(start):
    async with (
        start(serve_options=KSERVE) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
            iter([b"\xff\xff", infer_request(**GREEDY).SerializeToString()]), timeout=PATIENCE_S
        )
        answers = [oip.ModelStreamInferResponse.FromString(data) async for data in call]
    told = sorted(one.error_message for one in answers)
    assert told == ["", "MALFORMED_REQUEST: the request is not a well-formed message"]


async def test_a_body_counts_before_it_is_parsed(start, tmp_path: Path, monkeypatch):
    """A tenant that has used up its quota has nothing parsed, and is told which request it was."""
    parsed: list[int] = []
    parse = kserve_request.parse

    def noted(kind, data: bytes):
        parsed.append(len(data))
        return parse(kind, data)

    monkeypatch.setattr(kserve_request, "parse", noted)
    limited, bad = security(tmp_path, f"[tenants.x]\n{BARELY}\nburst_requests = 1"), b"\xff" * 9
    metadata, path = (("outrider-tenant", "x"),), "/inference.GRPCInferenceService/ModelStreamInfer"
    late = [streamed("a" * 5000, name=name) for name in ("late", "ü" * 90)]
    async with (
        start(serve_options=KSERVE, security=limited) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        requests = iter([bad, *(one.SerializeToString() for one in late)])
        call = channel.stream_stream(path)(requests, timeout=PATIENCE_S, metadata=metadata)
        answers = [oip.ModelStreamInferResponse.FromString(data) async for data in call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            whole = channel.unary_unary(path.replace("Stream", ""))
            await whole(late[0].SerializeToString(), timeout=PATIENCE_S, metadata=metadata)
    told = {one.infer_response.id: one.error_message for one in answers}
    assert told[""].startswith("MALFORMED_REQUEST: ")
    for one in late:
        assert told[one.id].startswith(f"[request id: {one.id}] QUOTA_EXCEEDED: ")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert parsed == [len(bad)]


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
async def test_the_end_of_a_stream_ends_all_its_requests(start_endless, ends):
    async with start_endless(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        requests = [infer_request(**ENDLESS)] * (run.serving.worker.snapshot().num_slots + 3)
        time_s = 1.0 if ends == "deadline" else PATIENCE_S
        call = stub.ModelStreamInfer(iter(requests), timeout=time_s)
        if ends == "cancel":
            async with asyncio.timeout(PATIENCE_S):
                while (await run.client.info()).load.num_free_slots:
                    pass
            call.cancel()
        else:
            told, code = [], grpc.StatusCode.DEADLINE_EXCEEDED
            try:
                told = [one.error_message async for one in call if one.error_message]
            except grpc.aio.AioRpcError as error:
                code = error.code()
            # The client says INTERNAL where the deadline passes while it still writes; where the server is the first
            # to see it pass, every request is answered so, and the stream ends.
            assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)
            assert all("DEADLINE_EXCEEDED" in one for one in told)
            assert len(told) in (0, len(requests))
        await wait_until_idle(run)
        assert run.server.readiness.handler.num_streams == 0
        assert (await run.client.complete("a", max_tokens=3, temperature=0)).text == "bcd"


async def test_a_stream_that_nothing_more_comes_of_answers_what_runs(start):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        answers = await answers_of(stub, *[infer_request(name=str(i), **GREEDY) for i in range(9)])
    assert sorted(one.infer_response.id for one in answers) == [str(i) for i in range(9)]


async def test_a_request_has_a_time_of_its_own(start_endless):
    asked = {"parameters": {"timeout": 200_000}}
    async with start_endless(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        late = await answers_of(
            stub, infer_request(name="late", **asked, **ENDLESS), infer_request(**GREEDY)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(infer_request(**asked, **ENDLESS))
    (told,) = [one.error_message for one in late if one.error_message]
    # On a busy machine it may be seen before the first step.
    assert told.removeprefix("[request id: late] ").partition(": ")[0] in ("DEADLINE", "HOPELESS")
    assert len(late) == 2
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_of_one_stream_so_many_requests_run_at_once(start_endless, monkeypatch):
    monkeypatch.setattr(kserve_stream, "MOST_REQUESTS", 2)
    async with (
        start_endless(serve_options=KSERVE, max_batch=4) as run,
        stub_of(run.address) as stub,
    ):
        call = stub.ModelStreamInfer(timeout=PATIENCE_S)
        for name in ("a", "b"):
            await call.write(streamed(name=name, **ENDLESS))
        # Not read while the others run: else it would be refused at once.
        await call.write(streamed(name="c", temperature=9))
        seen = defaultdict(int)
        while min(seen["a"], seen["b"]) < 3:
            seen[(await call.read()).infer_response.id] += 1
        assert not seen["c"] and run.server.readiness.handler.num_streams == 2
        call.cancel()
        await wait_until_idle(run)


async def test_a_client_that_does_not_read_is_cut_off_with_all_it_asked(start_endless):
    async with (
        start_endless(
            serve_options=KSERVE, max_unsent_chunks=8, stall_timeout_s=0.5, max_batch=2
        ) as run,
        stub_of(run.address) as stub,
    ):
        call = stub.ModelStreamInfer(timeout=PATIENCE_S)
        for _ in range(2):
            await call.write(streamed(logprobs=20, outputs=["logprobs"], **ENDLESS))
        await call.read()
        # From now on nobody reads; the slots must come back all the same.
        assert (await run.client.complete("a", max_tokens=3, temperature=0)).text == "bcd"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    error = decode_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


async def test_an_internal_error_is_told_by_its_id(start, monkeypatch, caplog):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        monkeypatch.setattr(run.server.readiness.handler, "_encoder", None)
        (answer,) = await answers_of(stub, infer_request("secret", name="i", **GREEDY))
    assert answer.error_message.startswith("[request id: i] INTERNAL: internal error; error id ")
    assert answer.error_message.rpartition(" ")[2] in caplog.text
    assert "secret" not in caplog.text


async def test_until_the_model_is_open_a_stream_says_so(tiny_bundle: Path):
    config = ServerConfig(default_gamma=2, lb_delay_s=0.0, drain_timeout_s=0.0)
    opened = load_model(tiny_bundle, replace(KSERVE, config=config))
    server = server_of(opened, options=KSERVE)
    address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    name = opened.model.name
    async with stub_of(address) as stub:
        server.readiness.note("measuring what steps cost")
        (answer,) = await answers_of(stub, oip.ModelInferRequest(id="a"))
        assert answer.error_message.startswith("[request id: a] NOT_READY: ")
        assert "measuring what steps cost" in answer.error_message
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(oip.ModelReadyRequest(name=name))).ready
        await server.open(opened)
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert (await stub.ModelReady(oip.ModelReadyRequest(name=name, version="1"))).ready
        assert not (await stub.ModelReady(oip.ModelReadyRequest(name="other"))).ready
        metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=name))
        assert {"text_input", "stream"} <= {one.name for one in metadata.inputs}
        assert (metadata.outputs[0].name, metadata.outputs[0].shape) == ("text_output", [-1])
        assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "outrider"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelMetadata(oip.ModelMetadataRequest(name="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        server.readiness.handler.close_admission()
        assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
    server.hurry()
    await server.drain()
    opened.close()
