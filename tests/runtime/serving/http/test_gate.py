"""HTTP's gate: nothing is answered to strangers, whatever is asked for, and both security share what they know."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from outrider import CallError, Client
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import SCOPES
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.http.app import api_routes
from outrider.runtime.serving.http.factory import open_api
from outrider.runtime.serving.http.pages import read_pages
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.security.options import SecurityOptions
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.serving.security.credentials import (
    AUDIENCE,
    Issuer,
    bearer,
    key_security,
    key_set,
    write,
)
from tests.runtime.serving.security.test_quotas import security as share_security

PAGES = read_pages()
DECLARED = api_routes(
    ServerState(RequestAccounting(Metrics(), lambda: 0.0)), max_bytes=1, started_s=0.0, pages=PAGES
)
ROUTES = [
    (method, one.path)
    for one in DECLARED
    for method in (("GET", "HEAD") if one.method == "GET" else (one.method,))
]
PROBES = {(one.method, one.path) for one in DECLARED if one.is_probe and one.path not in PAGES}
UNKNOWN = [
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/completions"),
    ("GET", "/v1/completions/"),
    ("GET", "//metrics"),
    ("GET", "/../metrics"),
    ("POST", "/v1/embeddings"),
    ("POST", "/metrics"),
    ("OPTIONS", "/v1/completions"),
    ("DELETE", "/v1/models"),
    ("TRACE", "/health"),
]


def test_every_route_of_the_application_has_a_scope() -> None:
    gets = {(("GET" if method == "HEAD" else method), path) for method, path in ROUTES}
    assert gets == {(one.method, one.path) for one in DECLARED}
    assert {one.scope for one in DECLARED} == {*SCOPES}
    assert {("GET", "/health"), ("GET", "/live")} == PROBES


async def test_no_route_is_answered_to_strangers(start_http, tmp_path: Path):
    security, _ = key_security(tmp_path, has_open_health=False)
    async with start_http(security=security) as http:
        for method, path in [*ROUTES, *UNKNOWN]:
            answer = await http.ask(path, method=method)
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.error["type"] == "authentication_error"
                assert answer.error["message"] == "valid credentials are required"
        for wrong in ("Bearer nonsense", "Basic eDp5", "bearer", "Bearer é"):
            answer = await http.ask("/v1/models", authorization=wrong)
            assert answer.status == 401


async def test_probes_are_answered_to_anybody_unless_told_otherwise(start_http, tmp_path: Path):
    security, _ = key_security(tmp_path)
    async with start_http(security=security) as http:
        for method, path in PROBES:
            assert (await http.ask(path, method=method)).status == 200
            assert (await http.ask(path, method="POST")).status == 401


async def test_a_key_opens_what_its_scopes_say_and_nothing_that_does_not_exist(
    start_http, tmp_path: Path
):
    security, keys = key_security(tmp_path)
    async with start_http(security=security) as http:
        answer = await http.ask(
            "/v1/completions",
            {"prompt": "a", "max_tokens": 2, "temperature": 0},
            **bearer(keys["x"]),
        )
        assert answer.json()["choices"][0]["text"] == "bc"
        assert (await http.ask("/v1/models", **bearer(keys["x"]))).status == 200
        assert (await http.ask("/metrics", **bearer(keys["x"]))).status == 403
        assert (await http.ask("/metrics", **bearer(keys["scraper"]))).status == 200
        assert (await http.ask("/v1/models", **bearer(keys["scraper"]))).status == 403
        assert (await http.ask("/docs", **bearer(keys["x"]))).status == 404
        assert (await http.ask("/v1/completions", **bearer(keys["x"]))).status == 405


async def test_a_json_web_token_says_the_tenant_and_what_he_may(start_http, tmp_path: Path):
    issuer = Issuer("ES256", "k")
    path = write(tmp_path / "jwks", key_set(issuer))
    security = Security(SecurityOptions(jwt_keys=path, jwt_audience=AUDIENCE))
    async with start_http(security=security) as http:
        token = bearer(issuer.token(scope="info"))
        assert (await http.ask("/v1/models", **token)).status == 200
        assert (await http.ask("/v1/models", **token, outrider_tenant="alice")).status == 200
        assert (await http.ask("/v1/models", **token, outrider_tenant="bob")).status == 403
        assert (await http.ask("/v1/completions", {"prompt": "a"}, **token)).status == 403
        expired = bearer(issuer.token(exp=1))
        assert (await http.ask("/v1/models", **expired)).status == 401


async def test_a_tenant_is_believed_as_gRPC_believes_it(start_http, tmp_path: Path):
    security, keys = key_security(tmp_path)
    async with start_http(security=security) as http:
        asked = {**bearer(keys["x"]), "outrider_tenant": "y"}
        assert (await http.ask("/v1/models", **asked)).status == 403
        asked["outrider_tenant"] = "x"
        assert (await http.ask("/v1/models", **asked)).status == 200
    async with start_http() as http:
        assert (await http.ask("/v1/models", outrider_tenant="y")).status == 200
        assert (await http.ask("/v1/models", outrider_tenant="no way")).status == 400


async def test_pages_of_other_sites_and_strange_names_of_this_machine_are_refused(start_http):
    async with start_http() as http:
        own = f"http://127.0.0.1:{http.port}"
        assert (await http.ask("/v1/models", origin=own)).status == 200
        assert (await http.ask("/v1/models", origin="https://evil.example")).status == 403
        assert (await http.ask("/v1/models", origin="null")).status == 403
        assert (await http.ask("/v1/models", host="localhost:1")).status == 200
        assert (await http.ask("/v1/models", host="rebound.example")).status == 403


async def test_both_doors_draw_on_one_share(start_http, tmp_path: Path):
    text = "[tenants.x]\nrequests_per_s = 0.001\nburst_requests = 2"
    async with start_http(security=share_security(tmp_path, text)) as http:
        fields = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = await http.ask("/v1/completions", fields, outrider_tenant="x")
        assert answer.status == 200
        options = (("grpc.enable_retries", 0),)
        async with Client(http.running.address, tenant="x", options=options) as client:
            assert (await client.complete("a", max_tokens=3, temperature=0.0)).text == "bcd"
            with pytest.raises(CallError) as refusal:
                await client.complete("a", max_tokens=3)
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await http.ask("/v1/completions", fields, outrider_tenant="x")
        assert answer.status == 429
        assert answer.error["code"] == "rate_limit_exceeded"
        assert 900_000 < int(answer.headers["retry-after-ms"]) <= 1_000_000
        assert (await http.complete(**fields)).status == 200


async def test_the_audit_log_has_what_is_refused_at_the_gate_and_behind_it(
    start_http, tmp_path: Path
):
    security, keys = key_security(tmp_path)
    audit = AuditLog(tmp_path / "audit")
    async with start_http(security=security, audit=audit) as http:
        await http.ask("/v1/completions", {"prompt": "secret"})
        await http.ask("/guess")
        await http.ask("/v1/completions", {"prompt": 7}, **bearer(keys["x"]))
        await http.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, **bearer(keys["x"]))
    text = (tmp_path / "audit").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(one["method"], one["key"], one["code"]) for one in lines] == [
        ("POST /v1/completions", "", "UNAUTHENTICATED"),
        ("unknown", "", "UNAUTHENTICATED"),
        ("POST /v1/completions", "key:key-of-x", "INVALID_ARGUMENT"),
        ("POST /v1/completions", "key:key-of-x", "OK"),
    ]
    assert {one["peer"] for one in lines} == {"127.0.0.1"}
    assert "secret" not in text and keys["x"] not in text


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("0.0.0.0:0", "is reachable from other machines"),
        ("[::]:0", "is reachable from other machines"),
        ("127.0.0.1", "must be HOST:PORT"),
        ("127.0.0.1:99999", "must be HOST:PORT"),
        ("unix:/run/x", "must be HOST:PORT"),
    ],
)
def test_an_address_that_others_reach_needs_tls(address: str, rule: str) -> None:
    readiness = ServerState(RequestAccounting(Metrics(), lambda: 0.0))
    with pytest.raises(ConfigError, match=f"http_address: {rule}"):
        open_api(readiness, Security(SecurityOptions()), ServeOptions(http_address=address))


async def test_headers_that_are_no_addresses_are_refused_as_strange_ones(start_http):
    async with start_http() as http:
        for headers in ({"host": "["}, {"origin": "http://["}, {"origin": "//]"}):
            assert (await http.ask("/v1/models", **headers)).status == 403
