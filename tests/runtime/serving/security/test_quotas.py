"""Shares of tenants over the wire: what is refused, counted and told, and what nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from outrider import CallError, Client
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import DeadlineUnreachable, QuotaExceeded
from outrider.runtime.core.tenant import TenantRules
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.security.options import SecurityOptions
from outrider.runtime.serving.v1.generate_request import V1Request
from outrider.v1 import inference_pb2 as wire

from tests.runtime.conftest import LetterCodec
from tests.runtime.markov import Clock

NO_RETRIES = (("grpc.enable_retries", 0),)
# Seconds until a condition that never comes true fails its test.
PATIENCE_S = 60
BARELY = "requests_per_s = 0.001"


def security(folder: Path, text: str) -> Security:
    """Security without credentials: callers of this machine say whose requests theirs are."""
    path = folder / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return Security(SecurityOptions(tenants=path))


def client_of(address: str, tenant: str) -> Client:
    return Client(address, tenant=tenant, options=NO_RETRIES)


async def text_of(client: Client, text: str = "a", **options: object) -> str:
    options = {"max_tokens": 3, "temperature": 0.0, **options}
    return "".join([chunk.text async for chunk in client.generate(text, **options)])


async def refusal_of(client: Client, text: str = "a", **options: object) -> CallError:
    with pytest.raises(CallError) as refusal:
        await text_of(client, text, **options)
    return refusal.value


async def test_a_used_up_quota_is_refused_before_anything_is_tokenised(start, tmp_path: Path):
    encoded: list[str] = []

    class Noting(LetterCodec):
        def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
            encoded.append(text)
            return super().encode(text, add_special_tokens)

    shares = security(tmp_path, f"[tenants.x]\n{BARELY}\nburst_requests = 2")
    async with (
        start(security=shares, codec=Noting()) as run,
        client_of(run.address, "x") as x,
        client_of(run.address, "y") as y,
    ):
        assert [await text_of(x), await text_of(x)] == ["bcd", "bcd"]
        error = await refusal_of(x, "never")
        assert (error.code, error.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUOTA_EXCEEDED",
        )
        assert error.metadata == {"quota": "requests_per_s"}
        assert error.retry_after_s and 900 < error.retry_after_s <= 1000
        assert encoded == ["a", "a"]
        assert await text_of(y) == "bcd"
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_requests_refused_total", {"reason": "QUOTA_EXCEEDED"}) == 1.0
        requests = "outrider_tenant_requests_total"
        assert count(requests, {"tenant": "x", "outcome": "admitted"}) == 2.0
        assert count(requests, {"tenant": "x", "outcome": "refused"}) == 1.0
        assert count(requests, {"tenant": "other", "outcome": "admitted"}) == 1.0
        assert count("outrider_tenant_tokens_total", {"tenant": "x"}) == 8.0


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"num_beams": 2}], ids=["one", "n", "beams"])
async def test_tokens_of_answers_count_as_they_are_emitted(start, tmp_path: Path, options):
    shares = security(tmp_path, "[default]\ntokens_per_s = 0.01\nburst_tokens = 6")
    options = {**options, "temperature": 0.0, "max_tokens": 4}
    async with start(security=shares) as run:
        await text_of(run.client, max_tokens=3)
        # Four are used, and the answer to this one goes beyond what is left.
        await text_of(run.client, **options)
        error = await refusal_of(run.client)
        assert error.metadata == {"quota": "tokens_per_s"}
        num_used = 4 + 1 + (8 if "n" in options else 4)
        assert error.retry_after_s == pytest.approx((num_used + 1 - 6) / 0.01, abs=60)


async def test_tokens_that_no_message_took_are_charged_to_who_does_not_read(start, tmp_path: Path):
    shares = security(tmp_path, "[tenants.x]\ntokens_per_s = 0.001\nburst_tokens = 10")
    path, is_full = tmp_path / "audit", asyncio.Event()

    async def never_sent(data: bytes) -> None:
        is_full.set()
        await asyncio.Event().wait()

    request = wire.GenerateRequest(text="a", max_tokens=2000)
    request.sampling.temperature = 0.0
    caller = ClientIdentity(tenant="x", rules=TenantRules(tokens_per_s=0.001))
    config = ServerConfig(max_unsent_chunks=2000, lb_delay_s=0.0, drain_timeout_s=0.0)
    told = {"security": shares, "audit": AuditLog(path), "config": config}
    async with start(**told) as run, client_of(run.address, "x") as x:
        handler, data = run.server.readiness.handler, request.SerializeToString()
        call = V1Request(run.serving, data, caller, never_sent)
        answer = asyncio.ensure_future(handler.complete(call))
        await is_full.wait()
        async with asyncio.timeout(PATIENCE_S):
            while run.serving.worker.snapshot().num_free_slots < 4:
                await run.client.info()
        # A slot is free before its last tokens are told of; what is answered now was told of behind them.
        await text_of(run.client, max_tokens=1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert (await refusal_of(x)).metadata == {"quota": "tokens_per_s"}
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_tenant_tokens_total", {"tenant": "x"}) == 2001.0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [(line["reason"], line.get("output_tokens")) for line in lines]
    assert ends[:2] == [("length", 1), ("CLIENT_CANCELLED", 2000)]


async def test_texts_that_are_tokenised_alone_take_of_the_share_too(start, tmp_path: Path):
    shares, path = security(tmp_path, f"[tenants.x]\n{BARELY}"), tmp_path / "audit"
    async with (
        start(security=shares, audit=AuditLog(path)) as run,
        client_of(run.address, "x") as x,
    ):
        assert await x.tokenize("abc") == [0, 1, 2]
        with pytest.raises(CallError) as refusal:
            await x.tokenize("abc")
        assert refusal.value.metadata == {"quota": "requests_per_s"}
        assert (await refusal_of(x)).reason == "QUOTA_EXCEEDED"
        assert await run.client.tokenize("abc") == [0, 1, 2]
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_requests_refused_total", {"reason": "QUOTA_EXCEEDED"}) == 2.0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["method"], one["tenant"], one["outcome"]) for one in lines] == [
        ("Tokenize", "x", "refused"),
        ("Generate", "x", "refused"),
    ]


async def test_priorities_are_the_tenant_s(start, tmp_path: Path):
    shares = security(tmp_path, "[tenants.x]\npriorities = [0, 10]")
    async with start(security=shares) as run, client_of(run.address, "x") as x:
        for asked in (-1, 11):
            error = await refusal_of(x, priority=asked)
            assert error.reason == "INVALID_PARAMETER"
            assert error.violations[0].field == "priority"
            assert error.violations[0].rule == "must be in [0, 10]"
        assert await text_of(x, priority=10) == "bcd"
        assert await text_of(run.client, priority=-100) == "bcd"
        info = await x.info()
        assert (info.limits.min_priority, info.limits.max_priority) == (0, 10)
        info = await run.client.info()
        assert (info.limits.min_priority, info.limits.max_priority) == (-100, 100)


async def test_a_tenant_holds_no_more_slots_than_it_may(start_endless, tmp_path: Path):
    shares = security(tmp_path, "[tenants.x]\nmax_slots = 1\nmax_queued = 1")
    async with start_endless(security=shares, max_batch=2) as run, client_of(run.address, "x") as x:
        options = {"temperature": 0.0, "speculation": {"enabled": False}}
        holder = x.generate("a", max_tokens=10**6 - 1, **options)
        await anext(holder)
        error = await refusal_of(x, n=2)
        assert error.violations[0].rule == "must be at most 1, the slots that the tenant may hold"
        waiting = x.generate("a", max_tokens=2, request_id="waits", **options)
        first = run.client.generate("a", max_tokens=2, **options)
        assert "".join([chunk.text async for chunk in first]) == "bc"
        answer = asyncio.ensure_future(anext(waiting))
        while run.serving.worker.snapshot().num_queued == 0:
            await text_of(run.client)
        assert (await refusal_of(x)).metadata == {"quota": "max_queued"}
        await holder.aclose()
        assert (await answer).text


async def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_takes_no_slot(start):
    async with start() as run:
        assert await text_of(run.client) == "bcd"
        worker = run.serving.worker
        for _ in range(8):
            worker._inbox.forecast.fed(256, 10.0)
        num_steps = worker.snapshot().step_count
        error = await refusal_of(run.client, timeout_s=9.0)
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "HOPELESS")
        assert worker.snapshot().step_count == num_steps
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_requests_refused_total", {"reason": "HOPELESS"}) == 1.0
        assert await text_of(run.client, timeout_s=60.0) == "bcd"


def test_texts_on_their_way_count_as_waiting():
    accounting, caller = (
        RequestAccounting(Metrics(), Clock()),
        ClientIdentity(tenant="x", rules=TenantRules(max_queued=2)),
    )
    records = [accounting.open() for _ in range(3)]
    for record in records:
        record.called_by(caller)
    for record in records[:2]:
        record.begin()
    with pytest.raises(QuotaExceeded, match="max_queued"):
        records[2].begin()
    records[2].arrived()
    records[0].arrived()
    records[0].arrived()
    records[2].begin()
    for record in records:
        record.arrived()
    assert not accounting.on_way


def test_who_has_stopped_waiting_is_told_so_before_anything_is_counted():
    rules = TenantRules(requests_per_s=0.001)
    accounting = RequestAccounting(Metrics(), Clock())
    late, patient = accounting.open(), accounting.open()
    late.called_by(ClientIdentity(remaining_s=0.0, rules=rules))
    with pytest.raises(DeadlineUnreachable):
        late.begin()
    patient.called_by(ClientIdentity(remaining_s=1.0, rules=rules))
    patient.begin()
