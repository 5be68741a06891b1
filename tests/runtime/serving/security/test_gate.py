"""The gate: nothing is answered to strangers, whatever is registered, and a refusal tells nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from outrider import CallError, Client
from outrider.runtime.addons.kserve.service import OpenInferenceService
from outrider.runtime.addons.vllm.service import VllmEngineService
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.security.authenticator import Authenticator
from outrider.runtime.serving.security.gate import Gate
from outrider.runtime.serving.security.grpc_gate import PROBES, SCOPES_OF_GRPC, GrpcGate
from outrider.runtime.serving.server import scopes_of
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.v1.service import InferenceService

from tests.runtime.serving.security.credentials import bearer, key_security
from tests.runtime.serving.test_tenant import address_elsewhere, steps_of

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
ALL_DIALECTS = ServeOptions(has_kserve=True, has_vllm_grpc=True)
SERVICES: list[Any] = [InferenceService, OpenInferenceService, VllmEngineService]
SCOPE_OF = {**SCOPES_OF_GRPC, **scopes_of(SERVICES)}
EXPECTED = {
    "/outrider.v1.Inference/Generate",
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/vllm.grpc.engine.VllmEngine/Generate",
}


@pytest.fixture
def registered(monkeypatch) -> list[str]:
    """Every method that is registered at a server from now on."""
    methods: list[str] = []
    make = grpc.aio.server

    def recording(*arguments: Any, **options: Any) -> grpc.aio.Server:
        server = make(*arguments, **options)
        add = server.add_generic_rpc_handlers

        def add_and_note(handlers: Sequence[grpc.GenericRpcHandler]) -> None:
            for handler in handlers:
                methods.extend(handler._method_handlers)
            add(handlers)

        server.add_generic_rpc_handlers = add_and_note
        return server

    monkeypatch.setattr(grpc.aio, "server", recording)
    return methods


async def status_of(
    channel: grpc.aio.Channel,
    method: str,
    metadata: dict[str, str] | None = None,
    data: bytes = b"",
) -> grpc.aio.AioRpcError | None:
    """Call a method with bytes; return how it ended, None for OK or for an answer that came."""
    call = channel.stream_stream(method)(metadata=tuple((metadata or {}).items()), timeout=20)
    try:
        await call.write(data)
        await call.done_writing()
        async for _ in call:
            return None
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def code_of(channel: grpc.aio.Channel, method: str, *more: Any) -> grpc.StatusCode:
    for _ in range(8):
        error = await status_of(channel, method, *more)
        # grpcio's client, where it writes to a call that the server has ended: what it was ended with is lost.
        if error is None or "Internal error from Core" not in str(error.details()):
            break
    return grpc.StatusCode.OK if error is None else error.code()


async def reflected(channel: grpc.aio.Channel, metadata: dict[str, str]) -> set[str]:
    """Every method that a server tells of itself."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**question: str) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(**question)])
        async for answer in stub.ServerReflectionInfo(requests, metadata=tuple(metadata.items())):
            return answer

    services = (await ask(list_services="")).list_services_response.service
    methods = set()
    for service in services:
        answer = await ask(file_containing_symbol=service.name)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for one in file.service:
                if f"{file.package}.{one.name}" == service.name:
                    methods |= {f"/{service.name}/{method.name}" for method in one.method}
    return methods


@pytest.mark.parametrize("has_open_health", [True, False])
async def test_no_method_is_answered_to_strangers(
    start, tmp_path: Path, registered, has_open_health
):
    security, keys = key_security(tmp_path, has_open_health=has_open_health)
    async with (
        start(security=security, serve_options=ALL_DIALECTS) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        methods = await reflected(channel, bearer(keys["x"]))
        assert {*EXPECTED, *PROBES} <= set(registered) <= set(SCOPE_OF)
        # What other servers have of a service, and this one has not, is told as well.
        for method in methods - set(registered):
            assert await code_of(channel, method, bearer(keys["x"])) is UNIMPLEMENTED, method
        # What is served and not told would be found among the registered.
        methods |= set(registered)
        methods |= {"/outrider.v1.Inference/Nothing", "/no.Such/Method"}
        open_methods = PROBES if has_open_health else set()
        for method in methods - open_methods:
            assert await code_of(channel, method) is UNAUTHENTICATED, method
            assert await code_of(channel, method, bearer("wrong")) is UNAUTHENTICATED, method
            assert await code_of(channel, method, bearer(keys["x"])) is not UNAUTHENTICATED, method
            if method in registered:
                assert await code_of(channel, method, bearer(keys["scraper"])) is DENIED, method
        for method in open_methods:
            assert await code_of(channel, method) is grpc.StatusCode.OK


async def test_without_credentials_everything_is_answered(start, registered):
    async with (
        start(serve_options=ALL_DIALECTS) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        assert set(registered) <= set(SCOPE_OF)
        for method in registered:
            assert await code_of(channel, method) not in (UNAUTHENTICATED, DENIED)
        assert await code_of(channel, "/no.Such/Method") is UNIMPLEMENTED


async def hello(data: bytes, context: object) -> bytes:
    return b"hello"


async def test_a_method_without_a_scope_is_allowed_to_nobody(tmp_path: Path):
    security, keys = key_security(tmp_path)
    refused, scopes = [], dict[str, str]()
    gate = Gate(security.authenticator, lambda *call: refused.append(call))
    barrier = GrpcGate(gate, scopes, has_open_health=True)
    server = grpc.aio.server(interceptors=(barrier,))
    handler = grpc.unary_unary_rpc_method_handler(hello)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("new", {"Hi": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await code_of(channel, "/new/Hi", bearer(keys["x"])) is DENIED
        scopes["/new/Hi"] = "info"
        assert await code_of(channel, "/new/Hi", bearer(keys["x"])) is grpc.StatusCode.OK
        assert await code_of(channel, "/new/Hi") is UNAUTHENTICATED
    await server.stop(None)
    known, unknown = refused
    assert known[0] == "/new/Hi" and known[3].key == "key:key-of-x"
    assert unknown[1].startswith("ipv4:127.0.0.1") and unknown[3] is None


async def test_a_refusal_is_the_same_whatever_was_wrong(start, tmp_path: Path):
    security, keys = key_security(tmp_path)
    method = "/outrider.v1.Inference/Generate"
    wrong: list[dict[str, str]] = [
        {},
        bearer("wrong"),
        bearer(""),
        bearer(keys["x"][:-1]),
        bearer(keys["x"] + "x"),
        {"authorization": keys["x"]},
        {"authorization": f"Basic {keys['x']}"},
        {"outrider-tenant": "x"},
        {"outrider-tenant": "not a name"},
    ]
    async with start(security=security) as run, grpc.aio.insecure_channel(run.address) as channel:
        refusals = [await status_of(channel, method, metadata) for metadata in wrong]
        twice = tuple(("authorization", f"Bearer {key}") for key in (keys["x"], keys["y"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"", metadata=twice)
        refusals.append(caught.value)
        text = run.server.metrics.refused.labels(reason="UNAUTHENTICATED")._value.get()
    told = {(one.code(), one.details(), tuple(one.trailing_metadata())) for one in refusals}
    assert len(told) == 1
    assert refusals[0].code() is UNAUTHENTICATED
    assert refusals[0].details() == "valid credentials are required"
    assert text == len(refusals)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_key_is_let_in(start, tmp_path: Path, scheme):
    security, keys = key_security(tmp_path)
    async with start(security=security) as run:
        metadata = {"authorization": f"{scheme} {keys['x']}"}
        answer = run.client.generate("a", max_tokens=3, temperature=0.0, metadata=metadata)
        assert "".join([chunk.text async for chunk in answer]) == "bcd"


async def test_nothing_of_a_strangers_is_parsed(start, tmp_path: Path):
    security, keys = key_security(tmp_path, has_open_health=False)
    method, garbage = "/grpc.health.v1.Health/Check", b"\xff" * 9
    async with start(security=security) as run, grpc.aio.insecure_channel(run.address) as channel:
        assert await code_of(channel, method, {}, garbage) is UNAUTHENTICATED
        known = await status_of(channel, method, bearer(keys["x"]), garbage)
        assert known.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert known.details() == "the request is not a well-formed message"
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(), metadata=tuple(bearer(keys["x"]).items())
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_fault_at_the_gate_lets_nobody_in_and_is_not_repeated(start, monkeypatch, caplog):
    def fail(self: Authenticator, presented: object) -> Identity:
        raise KeyError("a secret")

    monkeypatch.setattr(Authenticator, "identify", fail)
    async with start() as run, grpc.aio.insecure_channel(run.address) as channel:
        error = await status_of(channel, "/outrider.v1.Inference/GetServerInfo")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details().startswith("internal error; error id ")
    assert "secret" not in error.details() + caplog.text and "KeyError" in caplog.text


async def test_the_tenant_is_the_credentials(start_endless, tmp_path: Path):
    security, keys = key_security(tmp_path)
    x, y = bearer(keys["x"]), bearer(keys["y"])
    async with start_endless(security=security) as run:
        mine = run.endless(request_id="same", metadata={**x, "outrider-tenant": "x"})
        await anext(mine)
        assert await run.client.abort("same", metadata=y) == []
        with pytest.raises(CallError, match="must be left out") as refusal:
            await run.client.abort("same", metadata={**y, "outrider-tenant": "x"})
        assert refusal.value.code is DENIED
        with pytest.raises(CallError) as refusal:
            await run.client.abort("same", metadata={**y, "outrider-tenant": "no name"})
        assert refusal.value.reason == "INVALID_PARAMETER"
        assert await run.client.abort("same", metadata=x) == ["same"]
        with pytest.raises(CallError):
            async for _ in mine:
                pass


async def test_a_proven_tenant_shares_from_elsewhere(start, tmp_path: Path):
    security, keys = key_security(tmp_path)

    class Keyed(Client):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            return super().generate(*arguments, metadata=bearer(keys["x"]), **options)

    async with (
        start(host=address_elsewhere(), security=security) as run,
        Keyed(run.address) as client,
    ):
        first = await steps_of(client)
        assert await steps_of(client) < first
