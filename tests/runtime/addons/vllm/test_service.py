"""vLLM's engine protocol beside generation: health, descriptions, the tokenizer's files, aborts."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import io
import json
import zipfile

import grpc
import grpc.aio
import pytest
from outrider.errors import decode_error
from outrider.runtime.addons.vllm import service
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.protocols import services_of
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.tokenizer import TokenizersCodec
from outrider.runtime.serving.v1 import responses
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.runtime.addons.vllm.requests import VLLM_GRPC, answers_of, ask, stub_of
from tests.runtime.conftest import ENDLESS_TOKENS, EOS
from tests.runtime.serving.chat.shapes import SHAPES, template_of

SHAPE = SHAPES["qwen3"]


async def test_health_is_whether_requests_are_taken(start):
    readiness = ServerState(RequestAccounting(Metrics(), clock=lambda: 0.0))
    readiness.note("measuring")
    (engine,) = services_of(VLLM_GRPC, readiness)
    told = vllm.HealthCheckResponse.FromString(await engine.health_check(b"", None))
    assert (told.healthy, told.message) == (False, "measuring")
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        run.server.readiness.handler.close_admission()
        assert not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).is_paused


async def test_model_server_and_load_are_described(start_endless):
    async with (
        start_endless(serve_options=VLLM_GRPC, max_batch=4) as run,
        stub_of(run.address) as stub,
    ):
        model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        running = run.endless()
        await anext(running)
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        loads = await stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))
        await running.aclose()
    limits = run.serving.model
    assert (model.served_model_name, model.is_generation) == ("letters", True)
    assert (model.vocab_size, list(model.eos_token_ids)) == (limits.vocab_size, [EOS])
    assert model.max_context_length == model.max_req_input_len + 1 == limits.max_context
    assert (info.server_type, info.active_requests, info.max_num_seqs) == ("vllm-grpc", 1, 4)
    assert info.uptime_seconds > 0.0 and info.data_parallel_size == 1
    (load,) = loads.loads
    assert (load.num_running_reqs, load.num_total_reqs, load.max_running_requests) == (1, 1, 4)
    assert load.utilization == 0.25


async def archive_of(stub) -> tuple[int, zipfile.ZipFile]:
    """The number of chunks and what they are in all, whose hash the last one has."""
    chunks = [one async for one in stub.GetTokenizer(common.GetTokenizerRequest(), timeout=60)]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    return len(chunks), zipfile.ZipFile(io.BytesIO(data))


async def test_the_tokenizers_files_come_in_chunks(start, monkeypatch):
    source = SHAPE.tokenizer().to_str().encode()
    codec = TokenizersCodec(source)
    chats = ChatEncoder(SHAPE.files(template_of("qwen3")), codec)
    monkeypatch.setattr(service, "_CHUNK_BYTES", 1000)
    async with (
        start(serve_options=VLLM_GRPC, codec=codec, chats=chats) as run,
        stub_of(run.address) as stub,
    ):
        num_chunks, archive = await archive_of(stub)
        _, again = await archive_of(stub)
    assert num_chunks > 2 and archive.namelist() == again.namelist()
    assert archive.read("tokenizer.json") == source
    config = json.loads(archive.read("tokenizer_config.json"))
    assert config["chat_template"] == template_of("qwen3")
    assert config["eos_token"] == SHAPE.special_tokens["eos_token"]


async def test_a_caller_who_does_not_read_the_files_is_cut_off(start, monkeypatch):
    large, refused, refuse = (
        service.Archive(bytes(64 << 20), "hash"),
        asyncio.Event(),
        responses.refuse,
    )

    async def noting(*arguments):
        refused.set()
        await refuse(*arguments)

    monkeypatch.setattr(service, "tokenizer_archive", lambda serving: large)
    monkeypatch.setattr(responses, "refuse", noting)
    async with (
        start(serve_options=VLLM_GRPC, stall_timeout_s=0.2) as run,
        stub_of(run.address) as stub,
    ):
        call = stub.GetTokenizer(common.GetTokenizerRequest(), timeout=60)
        await refused.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert decode_error(caught.value).reason == "SLOW_CONSUMER"


async def test_a_tokenizer_that_cannot_be_given_is_refused(start):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await archive_of(stub)
    assert decode_error(caught.value).reason == "UNSUPPORTED_OPTION"


async def test_an_abort_ends_a_request_by_its_id(start_endless):
    endless = {"max_tokens": ENDLESS_TOKENS - 10}
    async with start_endless(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        call = stub.Generate(ask(name="a", **endless), timeout=60)
        await call.read()
        assert await stub.Abort(vllm.AbortRequest(request_ids=["a", "b"])) == vllm.AbortResponse()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(vllm.AbortRequest())
    error = decode_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_RPC")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_call_gives_its_slot_back(start_endless):
    async with (
        start_endless(serve_options=VLLM_GRPC, max_batch=1) as run,
        stub_of(run.address) as stub,
    ):
        call = stub.Generate(ask(max_tokens=ENDLESS_TOKENS - 10), timeout=60)
        await call.read()
        call.cancel()
        _, (summary,) = await answers_of(stub, ask(max_tokens=3))
    assert list(summary.output_ids) == [3, 4, 5]


async def test_methods_that_are_not_served_are_unimplemented_and_no_line_in_a_log(start, caplog):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        calls = [
            stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()),
            stub.Embed(vllm.EmbedRequest()),
            stub.FlushCache(common.FlushCacheRequest()),
        ]
        for call in calls:
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caplog.records == []


async def test_without_its_option_the_protocol_is_not_there(start):
    async with start() as run, stub_of(run.address) as stub:
        call = stub.HealthCheck(vllm.HealthCheckRequest())
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_its_library_the_protocol_is_refused_by_name(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "smg_grpc_proto" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'outrider-server\[vllm-grpc\]'"):
        services_of(VLLM_GRPC, ServerState(RequestAccounting(Metrics(), clock=lambda: 0.0)))
