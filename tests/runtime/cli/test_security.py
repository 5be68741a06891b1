"""Security by the command line: keys that are made, starts that are refused, and secrets that nobody repeats."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from outrider import CallError, Client
from outrider.runtime.cli.main import app
from outrider.runtime.serving.security.keys import find_key, parse_keys
from typer.testing import CliRunner

from tests.runtime.cli.test_cli import outrider
from tests.runtime.cli.test_refusals import refused
from tests.runtime.serving.security.credentials import (
    AUDIENCE,
    Authority,
    Issuer,
    bearer,
    key_set,
    write,
    write_keys,
)
from tests.runtime.serving.test_tenant import address_elsewhere

AUTHORITY = Authority()
CHAIN, KEY = AUTHORITY.certificate("localhost")


def test_a_new_key_is_printed_once_with_its_line():
    result = CliRunner().invoke(app, ["key", "new", "--tenant", "acme", "--name", "nightly"])
    assert result.exit_code == 0, result.output
    secret, line = result.stdout.splitlines()
    known = find_key(parse_keys(line), secret)
    assert (known.name, known.tenant, known.scopes) == ("nightly", "acme", {"generate", "info"})


def test_lines_of_new_keys_are_added_to_a_file_of_the_owner(tmp_path: Path):
    file = tmp_path / "keys"
    command = ["key", "new", "--tenant", "acme", "--scopes", "metrics, info", "--file", str(file)]
    secrets = [CliRunner().invoke(app, command).stdout.split()]
    file.write_text(file.read_text().rstrip("\n"))  # as editors may leave it
    secrets += [CliRunner().invoke(app, command).stdout.split() for _ in range(2)]
    keys = parse_keys(file.read_text())
    assert [find_key(keys, *one) for one in secrets] == [*keys.values()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tenant", "a b"), "key: must name a tenant"),
        (("--tenant", "a", "--scopes", "all"), "key: scopes must be some of"),
        (("--tenant", "a", "--name", "a:b"), "key: must"),
        (("--tenant", "a", "--file", "/nowhere/keys"), "No such file"),
    ],
)
def test_a_key_that_cannot_be_is_refused(options, said):
    assert said in refused("key", "new", *options)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files of keys and certificates, by the names that ``test_a_start`` uses."""
    made = {
        "chain": write(tmp_path / "chain", CHAIN),
        "key": write(tmp_path / "key", KEY),
        "open-key": write(tmp_path / "open-key", KEY, 0o644),
        "other-key": write(tmp_path / "other-key", AUTHORITY.certificate("x")[1]),
        "open-keys": write(tmp_path / "open-keys", "", 0o644),
        "broken": write(tmp_path / "broken", "hidden [words"),
        "tenants": write(tmp_path / "tenants", "[tenants.a]\nmax_slot = 1\n"),
        "missing": tmp_path / "missing",
    }
    return {f"@{name}": path for name, path in made.items()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--host 0.0.0.0", "host: is reachable from other machines and needs tls_certificate"),
        ("--host ::", "host: is reachable from other machines and needs tls_certificate"),
        ("--host example.org", "host: is reachable from other machines"),
        ("--host 0.0.0.0 --keys @broken", "keys, line 1: must begin with an id"),
        ("--metrics-address 0.0.0.0:0", "metrics_address: is reachable from other machines"),
        ("--metrics-address 127.0.0.1", "metrics_address: "),
        ("--metrics-address a:1 --metrics-port 1", "metrics_port: must be left out where"),
        ("--http-address 0.0.0.0:0", "http_address: is reachable from other machines"),
        ("--http-address a:1 --http-port 1", "http_port: must be left out where"),
        ("--tls-certificate @chain", "tls_key: must be given with tls_certificate"),
        ("--tls-client-ca @chain", "tls_client_ca: must be given with tls_certificate"),
        ("--tls-certificate @chain --tls-key @open-key", "tls_key: must not be a file that others"),
        ("--tls-certificate @chain --tls-key @other-key", "tls_key: must be the key of the"),
        (
            "--tls-certificate @broken --tls-key @key",
            "tls_certificate: must be certificates in PEM",
        ),
        ("--tls-certificate @chain --tls-key @missing", "tls_key: must be a readable file"),
        ("--keys @open-keys", "keys: must not be a file that others can read"),
        ("--keys @missing", "keys: must be a readable file"),
        ("--jwt-keys @broken", "jwt_audience: must be given with jwt_keys"),
        ("--jwt-keys @broken --jwt-audience a", "jwt_keys: must be JSON with a list named keys"),
        ("--tenants @broken", "tenants: must be TOML"),
        ("--tenants @tenants", "tenants, tenants.a: has the unknown name 'max_slot'"),
        ("--reload-every-s 0", "reload_every_s: must be above 0"),
    ],
)
def test_a_start_is_refused_in_a_line(files: dict[str, Path], options: str, said: str):
    words = [str(files.get(word, word)) for word in options.split()]
    line = refused("serve", "no-bundle", *words)
    assert line.startswith(f"outrider: {said}")
    assert "hidden" not in line


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("cryptography", "--tls-certificate @chain --tls-key @key"),
        ("cryptography", "--jwt-keys @set --jwt-audience a"),
        ("jwt", "--jwt-keys @set --jwt-audience a"),
    ],
)
def test_a_library_that_is_missing_is_named(
    files: dict[str, Path], tmp_path: Path, monkeypatch, missing: str, options: str
):
    files["@set"] = write(tmp_path / "set", key_set(Issuer("ES256")))
    for name in list(sys.modules):
        if name.partition(".")[0] == missing:
            monkeypatch.setitem(sys.modules, name, None)
    words = [str(files.get(word, word)) for word in options.split()]
    line = refused("serve", "no-bundle", *words)
    assert line == f"outrider: needs {missing}: pip install 'outrider-server[auth]'"


def secret_parts(*secrets: str) -> list[str]:
    """Pieces of secrets that are long enough to be no accident."""
    parts = [part for one in secrets for part in re.split(r"[\s.]+", one)]
    return [part[start : start + 16] for part in parts for start in range(0, len(part) - 15, 8)]


async def scraped(port: int, headers: dict[str, str], host: str) -> tuple[int, str]:
    request = urllib.request.Request(f"https://{host}:{port}/metrics", headers=headers)
    context = ssl.create_default_context(cadata=AUTHORITY.pem.decode())
    context.check_hostname = False

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, context=context, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


def free_port(host: str) -> int:
    import socket

    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


async def test_no_secret_is_ever_repeated(tiny_bundle: Path, tmp_path: Path):
    host, issuer = address_elsewhere(), Issuer("ES256")
    keys = write_keys(tmp_path / "keys", x="generate,info,metrics")
    forged = Issuer("ES256").token()
    write(tmp_path / "jwks", key_set(issuer))
    write(tmp_path / "chain", CHAIN, 0o644)
    write(tmp_path / "key", KEY)
    write(tmp_path / "tenants", "[tenants.x]\nmax_slots = 2\n")
    metrics_port, socket_path = free_port(host), tmp_path / "socket"
    server = await outrider(
        *("serve", str(tiny_bundle), "--host", host, "--port", "0", "--uds", str(socket_path)),
        *("--port-file", str(tmp_path / "port"), "--metrics-address", f"{host}:{metrics_port}"),
        *("--tls-certificate", str(tmp_path / "chain"), "--tls-key", str(tmp_path / "key")),
        *("--keys", str(tmp_path / "keys"), "--tenants", str(tmp_path / "tenants")),
        *("--jwt-keys", str(tmp_path / "jwks"), "--jwt-audience", AUDIENCE),
        *("--reload-every-s", "0.05", "--gamma", "2", "--lb-delay-s", "0"),
    )
    told: list[str] = []
    try:
        await asyncio.wait_for(server.stdout.readline(), 60)
        address = f"{host}:{(tmp_path / 'port').read_text().strip()}"
        options = (("grpc.ssl_target_name_override", "localhost"), ("grpc.enable_retries", 0))
        trust = grpc.ssl_channel_credentials(AUTHORITY.pem)
        async with (
            Client(address, credentials=trust, options=options) as client,
            Client(f"unix:{socket_path}", options=options[1:]) as beside,
        ):
            for one in (client, beside):
                for secret in (keys["x"], issuer.token()):
                    info = await one.info(metadata=bearer(secret))
                    told.append(str(info))
                for secret in (keys["x"][:-1], forged, issuer.token(exp=1)):
                    with pytest.raises(CallError) as refusal:
                        await one.info(metadata=bearer(secret))
                    assert refusal.value.code is grpc.StatusCode.UNAUTHENTICATED
                    told += [str(refusal.value), repr(refusal.value)]
            answer = client.generate("the quick", max_tokens=4, metadata=bearer(keys["x"]))
            assert [chunk async for chunk in answer]
            # Somebody pastes the key itself, half a private key, and a key set with a private part.
            write(tmp_path / "keys", f"x:{keys['x']}:x:info")
            write(tmp_path / "key", KEY[: len(KEY) // 2])
            write(tmp_path / "jwks", key_set(issuer).replace('"kid"', '"d": "AQAB", "kid"'))
            async with asyncio.timeout(30):
                failures = 0
                while failures < 3:
                    code, text = await scraped(metrics_port, bearer(keys["x"]), host)
                    assert code == 200
                    failures = text.count("outrider_reload_failures_total{")
            told.append(text)
            told.append((await scraped(metrics_port, bearer(forged), host))[1])
            # All of what was in force still is.
            told.append(str(await client.info(metadata=bearer(keys["x"]))))
    finally:
        server.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(server.communicate(), 60)
    assert server.returncode == 0, err.decode()
    assert err.decode().count("changed and cannot be used") == 3, err.decode()
    assert 0 < float(re.search(r"expiry_seconds\{.*\} ([\d.e+]+)", told[-3])[1]) < 86_400
    everything = "\n".join([out.decode(), err.decode(), *told])
    body = "".join(KEY.decode().splitlines()[1:-1])
    for part in secret_parts(keys["x"], forged, issuer.token(), body):
        assert part not in everything, part
