"""Every way a call can end badly has its own status and reason, and none of them is UNKNOWN."""

import asyncio
import logging

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from outrider import CallError, Client
from outrider.engines.base import SpeculativeError
from outrider.errors import DeadlineExceeded, decode_error
from outrider.runtime.core import errors
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.status import STATUS, trailing_status
from outrider.runtime.serving.v1 import responses
from outrider.runtime.serving.v1.service import SERVICE
from outrider.v1 import inference_pb2 as wire

from tests.runtime.conftest import ENDLESS_TOKENS

# Seconds until a condition that never comes true fails its test; any machine needs far less.
PATIENCE_S = 60


async def failure(stream) -> CallError:
    with pytest.raises(CallError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code is not grpc.StatusCode.UNKNOWN
    return caught.value


def test_every_error_of_the_runtime_has_a_row():
    concrete = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.ServingError)
        and kind is not errors.ServingError
    }
    assert set(STATUS) == concrete
    assert all(issubclass(kind, SpeculativeError) for kind in STATUS)
    assert grpc.StatusCode.UNKNOWN not in STATUS.values()


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (errors.Overloaded(1.5), "1500"),
        (errors.Draining(), "1000"),
        (errors.SlowConsumer(), "-1"),
        (errors.RequestFailed("x"), None),
        (errors.RequestQuarantined("x"), "-1"),
        (errors.EngineRestart(), "1000"),
    ],
)
def test_pushback_tells_service_configs_what_to_do(error, pushback):
    _, _, trailing = trailing_status(error)
    assert dict(trailing).get("grpc-retry-pushback-ms") == pushback


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": 2.5}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"min_p": float("inf")}, "sampling.min_p"),
        ({"logit_bias": {10_000: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "sampling.logit_bias"),
        ({"no_repeat_ngram_size": 11}, "sampling.no_repeat_ngram_size"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids"),
        ({"allowed_token_ids": [10_000]}, "sampling.allowed_token_ids"),
        ({"stop": ["x"] * 9}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"request_id": "no spaces"}, "request_id"),
        ({"speculation": {"gamma": 5}}, "speculation.gamma"),
        ({"speculation": {"drafter": "psychic"}}, "speculation.drafter"),
        ({"speculation": {"mode": 17}}, "speculation.mode"),
    ],
)
async def test_bad_fields_are_named_without_their_value(start, options, field):
    async with start() as run:
        error = await failure(run.client.generate("a", **options))
        snapshot = run.serving.worker.snapshot()
    assert (error.code, error.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_PARAMETER",
    )
    assert [violation.field for violation in error.violations] == [field]
    assert "10000" not in str(error) and "psychic" not in str(error)
    assert snapshot.step_count == 0


@pytest.mark.parametrize(
    ("prompt", "options", "code", "reason"),
    [
        ("a", {"n": 5}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
        ("a", {"best_of": 2}, grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION"),
        ("a", {"length_penalty": 2.0}, grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION"),
        ("a", {"num_beams": 5}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
        (
            "a",
            {"num_beams": 2, "return_trace": True},
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_OPTION",
        ),
        ("a", {"regex": "a*"}, grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION"),
        ("a", {"model": "other"}, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        ([0] * 4200, {}, grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
        (
            [0] * 4000,
            {"max_tokens": 201},
            grpc.StatusCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
        ),
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
        ([29], {}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
    ],
)
async def test_refusals(start, prompt, options, code, reason):
    async with start() as run:
        error = await failure(run.client.generate(prompt, **options))
    assert (error.code, error.reason) == (code, reason)


@pytest.mark.parametrize("method", ["Generate", "Abort", "Tokenize", "GetServerInfo"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0b" * 150])
async def test_bytes_that_are_no_message(start, method, data):
    async with start() as run, grpc.aio.insecure_channel(run.address) as channel:
        path = f"/{SERVICE}/{method}"
        try:
            if method == "Generate":
                await channel.unary_stream(path)(data).read()
            else:
                await channel.unary_unary(path)(data)
        except grpc.aio.AioRpcError as raw:
            error = decode_error(raw)
        else:
            # A message without string fields may take any bytes for unknown fields.
            assert (method, data) == ("GetServerInfo", b"\x0a\x02\xff\xfe")
            return
    assert (error.code, error.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_REQUEST",
    )


async def test_a_bug_is_internal_with_an_id_and_without_its_text(start, caplog):
    caplog.set_level(logging.CRITICAL, logger="outrider.runtime.serving.v1.service")
    async with start() as run:
        # The codec of these tests knows no digits and raises ValueError with the text.
        error = await failure(run.client.generate("secret 7"))
        answer = await run.client.tokenize("abc")
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert error.metadata["error_id"] in str(error)
    assert "substring" not in str(error) and answer == [0, 1, 2]


async def test_engine_failure_ends_its_requests_only(start, caplog):
    caplog.set_level(logging.CRITICAL)
    # The request has nobody beside it, so the engine is blamed: it failed twice.
    async with start(failing_extends=[0, 1]) as run:
        error = await failure(run.client.generate("a", max_tokens=3))
        texts = [r.text async for r in run.client.generate("a", max_tokens=3, temperature=0)]
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
    assert "".join(texts) == "bcd"


async def test_logits_that_are_not_finite_are_an_error_and_not_a_token(start, caplog):
    caplog.set_level(logging.CRITICAL)

    def broken(prefix):
        return np.full(29, np.nan, dtype=np.float32)

    async with start(target=broken) as run:
        error = await failure(run.client.generate("a", max_tokens=3))
    assert error.code is grpc.StatusCode.INTERNAL


async def test_duplicate_id_while_live_and_not_after(start_endless):
    async with start_endless() as run:
        first = run.endless(request_id="x")
        await anext(first)
        error = await failure(run.client.generate("a", request_id="x", max_tokens=1))
        await run.client.abort("x")
        await failure(first)
    assert (error.code, error.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST_ID",
    )


async def test_full_queue_says_when_to_come_back(start_endless):
    config = ServerConfig(max_queued=0, retry_after_s=2.5, lb_delay_s=0, drain_timeout_s=0)
    async with start_endless(config=config, max_batch=1) as run:
        first = run.endless()
        await anext(first)
        error = await failure(run.client.generate("a", max_tokens=1))
        await first.aclose()
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_after_s == 2.5


async def test_the_clients_retries_outlast_a_full_queue(start_endless):
    config = ServerConfig(max_queued=0, retry_after_s=0.05, lb_delay_s=0, drain_timeout_s=0)
    async with start_endless(config=config, max_batch=1) as run, Client(run.address) as retrying:
        first = run.endless()
        await anext(first)
        second = asyncio.ensure_future(anext(retrying.generate("a", max_tokens=1)))
        refused = "outrider_requests_refused_total"
        registry = run.server.metrics.registry
        async with asyncio.timeout(PATIENCE_S):
            while registry.get_sample_value(refused, {"reason": "QUEUE_FULL"}) is None:
                await run.client.info()
        await first.aclose()
        response = await second
    assert len(response.tokens) == 1


async def test_queue_timeout(start_endless):
    now_s = [0.0]
    async with start_endless(max_batch=1, clock=lambda: now_s[0]) as run:
        first = run.endless()
        await anext(first)
        second = asyncio.ensure_future(failure(run.client.generate("a", max_tokens=1)))
        async with asyncio.timeout(PATIENCE_S):
            while (await run.client.info()).load.num_queued == 0:
                pass
        now_s[0] += 30.5
        error = await second
        await first.aclose()
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")


def test_a_status_that_does_not_fit_the_calls_details_is_left_out():
    """As when the client's deadline passes while the server's own answer is on its way."""
    rich = status_pb2.Status(code=4, message="the request's deadline passed")
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", rich.SerializeToString()))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), trailing, details="removed"
    )
    decoded = decode_error(error)
    assert isinstance(decoded, DeadlineExceeded)
    assert decoded.reason == ""


async def test_the_clients_deadline_frees_the_slot(start_endless):
    async with start_endless(max_batch=1) as run:
        error = await failure(run.endless(timeout_s=0.05))
        texts = [r.text async for r in run.client.generate("a", max_tokens=3, temperature=0)]
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "".join(texts) == "bcd"


async def test_the_servers_own_time_limit(start_endless):
    async with start_endless(limits=RequestLimits(max_request_s=0.05)) as run:
        error = await failure(run.endless())
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    assert int(error.metadata["emitted"]) >= 0


async def test_message_larger_than_the_limit(start):
    async with start() as run:
        error = await failure(run.client.generate("a" * (5 << 20)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_who_does_not_read_a_large_first_response_is_told_so(start, monkeypatch):
    refused, refuse = asyncio.Event(), responses.refuse

    async def noting(*arguments):
        refused.set()
        await refuse(*arguments)

    monkeypatch.setattr(responses, "refuse", noting)
    async with start(stall_timeout_s=0.2) as run:
        request = wire.GenerateRequest(tokens=wire.TokenIds(ids=[0] * 4000), max_tokens=1)
        request.prompt_logprobs = 5
        call = run.client._stub.Generate(request, timeout=60)
        await refused.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert decode_error(caught.value).reason == "SLOW_CONSUMER"


async def test_a_client_that_does_not_read_is_cut_off(start_endless):
    # Endless: an answer that is made before the stall is noticed would free the slot by itself.
    async with start_endless(max_unsent_chunks=8, stall_timeout_s=0.2, max_batch=1) as run:
        call = run.client._stub.Generate(
            wire.GenerateRequest(
                text="a",
                max_tokens=ENDLESS_TOKENS - 1,
                logprobs=20,
                return_trace=True,
                speculation=wire.Speculation(enabled=False),
            )
        )
        # It has the slot: calls of a new connection may arrive in any order.
        await call.initial_metadata()
        # Nobody reads the call; the only slot must come back all the same.
        texts = [r.text async for r in run.client.generate("a", max_tokens=3, temperature=0)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert "".join(texts) == "bcd"
    error = decode_error(caught.value)
    assert (error.code, error.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_CONSUMER",
    )


async def test_drain_refuses_new_and_cuts_what_runs_too_long(start_endless):
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.2)
    async with start_endless(config=config, options=HEALTH_BLIND) as run:
        running = run.endless()
        await anext(running)
        drained = asyncio.ensure_future(run.server.drain())
        async with asyncio.timeout(PATIENCE_S):
            while not (await run.client.info()).load.is_draining:
                pass
        refused = await failure(run.client.generate("a", max_tokens=1))
        cut = await failure(running)
        assert await drained == 1
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert refused.retry_after_s is not None
    assert (cut.code, cut.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAIN_DEADLINE")
    assert int(cut.metadata["emitted"]) > 0


async def test_drain_lets_running_streams_finish(start):
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=30.0)
    async with start(config=config) as run:
        stream = run.client.generate("a", max_tokens=300, temperature=0.0)
        first = await anext(stream)
        drained = asyncio.ensure_future(run.server.drain())
        rest = [response async for response in stream]
        assert await drained == 0
    assert sum(len(r.tokens) for r in [first, *rest]) == 300


# Without client-side health checking a draining server is still called.
HEALTH_BLIND = (("grpc.service_config", "{}"),)


async def test_health_and_reflection(start):
    async with start() as run, grpc.aio.insecure_channel(run.address) as channel:
        await run.client.wait_ready(timeout_s=5)
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE, "liveness"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            listed = {service.name for service in answer.list_services_response.service}
        drained = asyncio.ensure_future(run.server.drain())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await drained
    assert listed == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
