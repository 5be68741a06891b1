"""How clients prove who they are: keys, certificates, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from outrider import Client, SyncClient, Unauthenticated
from outrider.access import is_local
from outrider.channel import HEALTH_SERVING, HEALTH_WATCH
from outrider.errors import (
    CallError,
    DeadlineUnreachable,
    PermissionDenied,
    QuotaExceeded,
    decode_error,
)
from outrider.runtime.core import errors
from outrider.runtime.serving.status import trailing_status
from outrider.v1 import inference_pb2 as wire

from tests.certificates import Authority

KEY = "sk-outrider-0123456789"
# Seconds until a call that gets no answer fails its test; any machine needs far less.
PATIENCE_S = 60


class Door(grpc.GenericRpcHandler):
    """Answers GetServerInfo and health, to those who show a key or a certificate.

    Attributes:
        asked: method and authorization of each call.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        shown = dict(details.invocation_metadata).get("authorization")
        self.asked.append((details.method, shown))

        async def check(context: Any) -> None:
            is_named = "x509_common_name" in context.auth_context()
            if not is_named and shown != f"Bearer {KEY}":
                code, message, trailing = trailing_status(errors.Unauthenticated())
                await context.abort(code, message, trailing)

        async def answer(request: bytes, context: Any) -> bytes:
            await check(context)
            return wire.GetServerInfoResponse(model="security").SerializeToString()

        async def watch(request: bytes, context: Any) -> None:
            await check(context)
            await context.write(HEALTH_SERVING)
            await asyncio.Event().wait()

        if details.method == HEALTH_WATCH:
            return grpc.unary_stream_rpc_method_handler(watch)
        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def door(
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[tuple[str, Door]]:
    """A server whose health is closed, too; over TLS with ``credentials``."""
    server, answers = grpc.aio.server(), Door()
    server.add_generic_rpc_handlers((answers,))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", answers
    finally:
        await server.stop(0)


async def model_by(address: str, **access: Any) -> set[str]:
    """The model that both clients hear of, each once it is ready."""
    async with Client(address, **access) as client:
        await client.wait_ready(timeout_s=PATIENCE_S)
        first = (await client.info(timeout_s=PATIENCE_S)).model

    def program() -> str:
        with SyncClient(address, **access) as blocking:
            blocking.wait_ready(timeout_s=PATIENCE_S)
            return blocking.info(timeout_s=PATIENCE_S).model

    return {first, await asyncio.to_thread(program)}


def server_tls(authority: Authority, *, asks_clients: bool = False) -> grpc.ServerCredentials:
    pair = authority.issue("server")
    return grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())],
        root_certificates=authority.ca.read_bytes() if asks_clients else None,
        require_client_auth=asks_clients,
    )


async def test_a_key_goes_with_every_call_and_with_the_wait_for_health():
    async with door() as (address, answers):
        assert await model_by(address, api_key=KEY) == {"security"}
    assert HEALTH_WATCH in dict(answers.asked)
    assert {shown for _, shown in answers.asked} == {f"Bearer {KEY}"}


async def test_over_tls_grpc_s_own_health_checks_have_the_key(tmp_path: Path):
    authority = Authority(tmp_path)
    async with door(server_tls(authority)) as (address, answers):
        assert await model_by(address, api_key=KEY, tls_ca=authority.ca) == {"security"}
    assert {shown for _, shown in answers.asked} == {f"Bearer {KEY}"}


async def test_a_certificate_is_shown_to_a_server_that_asks(tmp_path: Path):
    authority = Authority(tmp_path)
    own = authority.issue("client")
    access = {"tls_ca": authority.ca, "tls_certificate": own.certificate, "tls_key": own.key}
    async with door(server_tls(authority, asks_clients=True)) as (address, answers):
        assert await model_by(address, **access) == {"security"}
    assert {shown for _, shown in answers.asked} == {None}


async def test_a_server_of_another_authority_gets_no_key(tmp_path: Path):
    (tmp_path / "other").mkdir()
    other, ours = Authority(tmp_path / "other"), Authority(tmp_path)
    async with (
        door(server_tls(other)) as (address, answers),
        Client(address, api_key=KEY, tls_ca=ours.ca) as client,
    ):
        with pytest.raises(CallError):
            await client.info(timeout_s=0.5)
    assert answers.asked == []


async def test_a_wrong_key_is_not_tried_again():
    async with door() as (address, answers), Client(address, api_key="wrong") as client:
        with pytest.raises(Unauthenticated, match="valid credentials are required") as refused:
            await client.info(timeout_s=PATIENCE_S)
        assert len(answers.asked) == 1
    assert refused.value.reason == "UNAUTHENTICATED"


async def test_a_failed_call_shows_the_key_nowhere():
    async with door() as (address, _):
        wrong = KEY[::-1]
        async with Client(address, api_key=wrong) as client:
            with pytest.raises(Unauthenticated) as refused:
                await client.info(timeout_s=PATIENCE_S)
            shown = [repr(client), repr(vars(client)), str(refused.value)]
        with SyncClient(address, api_key=wrong) as blocking:
            with pytest.raises(Unauthenticated) as also:
                await asyncio.to_thread(blocking.info, timeout_s=PATIENCE_S)
            shown += [repr(blocking), repr(vars(blocking))]
    for error in (refused.value, also.value):
        # As tools print it that show variables, frame by frame; this test's own have the key by its own hand.
        chain = traceback.TracebackException.from_exception(error, capture_locals=True)
        shown += [
            frame for frame in chain.format() if __name__ not in frame and __file__ not in frame
        ]
    assert len(shown) > 8 and not [text for text in shown if wrong in text]


@pytest.mark.parametrize("client", [Client, SyncClient])
@pytest.mark.parametrize(
    "address", ["example.org:50051", "dns:///10.0.0.1:50051", "[2001:db8::1]:1"]
)
def test_a_key_does_not_leave_the_machine_in_plain_text(client: Any, address: str):
    with pytest.raises(
        ValueError, match="api_key: goes over TLS or to this machine only"
    ) as refused:
        client(address, api_key=KEY)
    assert KEY not in str(refused.value)


async def test_a_key_leaves_the_machine_in_plain_text_where_that_is_asked_for_by_name():
    async with Client("10.0.0.1:1", api_key=KEY, allow_insecure=True):
        pass


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("localhost:1", True),
        ("localhost", True),
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("::1", True),
        ("dns:///localhost:1", True),
        ("dns:localhost:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv6:[::1]:1", True),
        ("unix:/run/outrider.sock", True),
        ("unix-abstract:outrider", True),
        ("dns://8.8.8.8/localhost:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("localhost.example.org:1", False),
        ("127.0.0.1.example.org:1", False),
        ("xds:///localhost", False),
        ("localhost@example.org:1", False),
        ("0.0.0.0:1", False),
        ("", False),
    ],
)
def test_which_addresses_are_of_this_machine(address: str, is_here: bool):
    assert is_local(address) is is_here


@pytest.mark.parametrize("client", [Client, SyncClient])
@pytest.mark.parametrize("key", ["", "two words", "line\n", "ümlaut", b"bytes"])
def test_a_key_that_cannot_be_sent_is_refused_without_its_value(client: Any, key: Any):
    with pytest.raises(ValueError, match=r"^api_key: must be printable ASCII letters") as refused:
        client("localhost:1", api_key=key)
    assert not key or str(key) not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tls_ca": "junk"}, "tls_ca: must hold certificates"),
        ({"tls_ca": "empty"}, "tls_ca: must hold certificates"),
        ({"tls_certificate": "own"}, "one needs the other"),
        ({"tls_key": "own.key"}, "one needs the other"),
        ({"tls_certificate": "own", "tls_key": "other.key"}, "the key that fits it"),
        ({"tls_certificate": "own", "tls_key": "cut"}, "the key that fits it"),
        ({"tls_certificate": "own", "tls_key": "locked"}, "tls_key: must be without a passphrase"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], words: str
):
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    contents = {
        "junk": b"junk",
        "empty": b"",
        "own": own.certificate.read_bytes(),
        "own.key": own.key.read_bytes(),
        "other.key": other.key.read_bytes(),
        "cut": own.key.read_bytes()[:100],
        "locked": locked(own.key.read_bytes()),
    }
    given = {}
    for argument, name in files.items():
        given[argument] = tmp_path / f"{name}.given"
        given[argument].write_bytes(contents[name])
    with pytest.raises(ValueError, match=words):
        Client("localhost:1", **given)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pem"):
        SyncClient("localhost:1", tls_ca="nowhere.pem")


def test_two_sources_of_credentials_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="credentials: not with tls_ca"):
        Client(
            "localhost:1",
            credentials=grpc.ssl_channel_credentials(),
            tls_ca=Authority(tmp_path).ca,
        )


class Ended(grpc.RpcError):
    """A call that ended with an error of the server."""

    def __init__(self, error: errors.ServingError) -> None:
        self._code, self._message, self._trailing = trailing_status(error)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._trailing


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.Unauthenticated(), Unauthenticated),
        (errors.PermissionDenied(), PermissionDenied),
        (errors.QuotaExceeded("tokens_per_s", 2.5), QuotaExceeded),
        (errors.DeadlineUnreachable(), DeadlineUnreachable),
    ],
)
def test_refusals_at_the_door_have_classes_of_their_own(
    error: errors.ServingError, kind: type[CallError]
):
    found = decode_error(Ended(error))
    assert type(found) is kind
    assert found.reason == error.reason
    assert found.retry_after_s == getattr(error, "retry_after_s", None)
    assert found.metadata.get("quota") == getattr(error, "quota", None)


def locked(key: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    return load_pem_private_key(key, password=None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    )
