"""Credentials of the client's commands: from files, shown to the server and to nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import Result
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_REFUSED
from typer.testing import CliRunner

from tests.certificates import Authority
from tests.client.test_access import KEY, door, server_tls


async def run(*arguments: str | Path, **environment: str) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, app, list(map(str, arguments)), env=environment
    )


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return path


async def test_a_key_comes_from_a_file_or_from_one_that_the_environment_names(key_file: Path):
    async with door() as (address, _):
        given = await run("info", "--address", address, "--api-key-file", key_file)
        named = await run("info", "--address", address, OUTRIDER_API_KEY_FILE=str(key_file))
    for result in (given, named):
        assert (result.exit_code, "security" in result.stdout) == (0, True), result.output


async def test_certificates_come_from_files(tmp_path: Path):
    authority = Authority(tmp_path)
    own = authority.issue("client")
    async with door(server_tls(authority, asks_clients=True)) as (address, _):
        result = await run(
            *("info", "--address", address, "--tls-ca", authority.ca),
            *("--tls-certificate", own.certificate, "--tls-key", own.key),
        )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["info", "generate", "chat"])
async def test_a_key_that_the_server_does_not_know_is_refused_in_a_line(
    tmp_path: Path, command: str
):
    (tmp_path / "key").write_text("another")
    async with door() as (address, _):
        prompt = ("--prompt", "a") if command == "generate" else ()
        arguments = ("--address", address, "--api-key-file", tmp_path / "key", *prompt)
        result = await asyncio.to_thread(
            CliRunner().invoke, app, [command, *map(str, arguments)], input="a\n"
        )
    assert result.exit_code == EXIT_REFUSED
    assert result.stderr == "outrider: UNAUTHENTICATED: valid credentials are required\n"


@pytest.mark.parametrize(
    ("content", "address", "said"),
    [
        (KEY.encode(), "example.org:1", "outrider: api_key: goes over TLS or to this machine only"),
        (b"two words", "localhost:1", "outrider: api_key: must be printable ASCII letters"),
        (b"\xff\xfe", "localhost:1", "outrider: api_key: must be printable ASCII letters"),
        (b"", "localhost:1", "outrider: api_key: must be printable ASCII letters"),
        (None, "localhost:1", "outrider: [Errno 2] No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["info", "chat"])
async def test_a_key_that_cannot_be_sent_is_refused_in_a_line(
    tmp_path: Path, command: str, content: bytes | None, address: str, said: str
):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    result = await run(command, "--address", address, "--api-key-file", path)
    assert result.exit_code == EXIT_REFUSED
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    assert KEY not in result.output


async def test_a_key_leaves_the_machine_in_plain_text_where_that_is_asked_for(key_file: Path):
    options = ("--api-key-file", key_file, "--allow-insecure", "--timeout-s", "0.2")
    result = await run("generate", "--address", "192.0.2.1:1", "--prompt", "a", *options)
    assert "DEADLINE_EXCEEDED" in result.stderr or "UNAVAILABLE" in result.stderr, result.output


async def test_no_option_takes_the_key_itself():
    result = await run("info", "--api-key", KEY)
    assert result.exit_code == 2 and "No such option" in result.output
