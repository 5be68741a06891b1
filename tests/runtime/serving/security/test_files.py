"""Files of authentication and TLS: who may touch them, the certificate they hold, and that they are read again."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.certificate import read_certificate
from outrider.runtime.serving.security.files import MOST_BYTES, read_file, read_text, stamp_of
from outrider.runtime.serving.security.options import CertificateFiles, SecurityOptions
from outrider.runtime.serving.security.reload import WatchedFile

from tests.runtime.serving.security.credentials import Authority, pem_of, write

AUTHORITY = Authority()


@pytest.mark.parametrize(
    ("mode", "is_secret", "said"),
    [
        (0o600, True, None),
        (0o640, True, None),
        (0o644, False, None),
        (0o644, True, "others can read"),
        (0o604, True, "others can read"),
        (0o602, True, "others can write"),
        (0o666, False, "others can write"),
    ],
)
def test_a_secret_that_others_can_read_or_a_file_that_they_can_write_is_refused(
    tmp_path: Path, mode, is_secret, said
):
    path = write(tmp_path / "file", "text", mode)
    if said is None:
        assert read_file("option", path, is_secret=is_secret) == b"text"
        return
    with pytest.raises(ConfigError, match=f"option: .*{said}"):
        read_file("option", path, is_secret=is_secret)


def test_what_is_no_file_is_refused_and_waits_for_nobody(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "large", b"x" * (MOST_BYTES + 1))
    write(tmp_path / "latin", "ü".encode("latin-1"))
    for name in ("missing", "pipe", "large", "latin", "."):
        with pytest.raises(ConfigError, match="option: must be"):
            read_text("option", tmp_path / name)


def written(folder: Path, chain: bytes, key: bytes, mode: int = 0o600) -> CertificateFiles:
    return CertificateFiles(
        chain=write(folder / "chain.pem", chain, 0o644), key=write(folder / "key.pem", key, mode)
    )


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)],
    ids=["P-384", "RSA"],
)
def test_a_certificate_is_read_with_its_key(tmp_path: Path, key):
    certificate = read_certificate(written(tmp_path, *AUTHORITY.certificate("a.example", key=key)))
    assert b"PRIVATE KEY" in certificate.key and b"CERTIFICATE" in certificate.chain
    assert "PRIVATE" not in repr(certificate)


CHAIN, KEY = AUTHORITY.certificate("a.example")
ENCRYPTED = pem_of(ec.generate_private_key(ec.SECP256R1()), password=b"word")
ED25519 = AUTHORITY.certificate("a.example", key=ed25519.Ed25519PrivateKey.generate())
P521 = AUTHORITY.certificate("a.example", key=ec.generate_private_key(ec.SECP521R1()))


@pytest.mark.parametrize(
    ("chain", "key", "said"),
    [
        (b"", KEY, "tls_certificate: must be certificates in PEM"),
        (CHAIN[:-40], KEY, "tls_certificate: must be certificates in PEM"),
        (KEY, KEY, "tls_certificate: must be certificates in PEM"),
        (CHAIN, CHAIN, "tls_key: must be a PEM key without a passphrase"),
        (CHAIN, KEY[:-40], "tls_key: must be a PEM key without a passphrase"),
        (CHAIN, ENCRYPTED, "tls_key: must be a PEM key without a passphrase"),
        (CHAIN, AUTHORITY.certificate("b")[1], "tls_key: must be the key of the certificate"),
        (ED25519[0], KEY, "tls_key: must be the key of the certificate"),
        (*ED25519, "tls_key: must be RSA of 2048 bits, P-256 or P-384"),
        (*P521, "tls_key: must be RSA of 2048 bits, P-256 or P-384"),
        (*AUTHORITY.certificate("a", days=-1), "tls_certificate: must have no certificate that"),
    ],
)
def test_a_pair_that_grpc_could_not_serve_is_refused(tmp_path: Path, chain, key, said):
    with pytest.raises(ConfigError) as refusal:
        read_certificate(written(tmp_path, chain, key))
    assert said in str(refusal.value) and "BEGIN" not in str(refusal.value)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tls_key: .*others can read"):
        read_certificate(written(tmp_path, CHAIN, KEY, mode=0o644))


def test_an_authority_that_is_none_is_refused(tmp_path: Path):
    files = written(tmp_path, CHAIN, KEY)
    bad = CertificateFiles(chain=files.chain, key=files.key, client_ca=files.key)
    with pytest.raises(ConfigError, match="tls_client_ca: must be certificates in PEM"):
        read_certificate(bad)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tls_certificate": Path("a")}, "tls_key: must be given with tls_certificate"),
        ({"tls_key": Path("a")}, "tls_key: must be given with tls_certificate"),
        ({"tls_client_ca": Path("a")}, "tls_client_ca: must be given with tls_certificate"),
        ({"jwt_keys": Path("a")}, "jwt_audience: must be given with jwt_keys"),
        ({"jwt_keys": Path("a"), "jwt_audience": ""}, "jwt_audience: must be given"),
        ({"jwt_audience": "a"}, "jwt_keys: must be given with jwt_audience"),
        ({"reload_every_s": 0.0}, "reload_every_s: must be above 0"),
        ({"reload_every_s": float("nan")}, "reload_every_s: must be above 0"),
        ({"reload_every_s": 1e9}, "reload_every_s: must be above 0"),
    ],
)
def test_options_that_miss_another_are_refused(options, said):
    with pytest.raises(ConfigError) as refusal:
        SecurityOptions(**options)
    assert said in str(refusal.value)


def number(path: Path) -> int:
    try:
        text = path.read_text()
        if text == "secret":
            raise KeyError(text)
        return int(text)
    except (OSError, ValueError):
        raise ConfigError("file", "must be a number") from None


def test_a_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog
):
    path = write(tmp_path / "file", "1")
    file = WatchedFile("number", [path], lambda: number(path))
    with caplog.at_level(logging.INFO):
        assert file.look() and file() == 1 and not caplog.records
        write(path, "2")
        assert file.look() and file() == 2
        assert [one.message for one in caplog.records] == ["number: read again"]
        write(path, "two")
        assert [file.look() for _ in range(3)] == [False, True, True]
        assert file() == 2
        path.unlink()
        assert [file.look() for _ in range(3)] == [False, True, True]
        assert file() == 2
        write(path, "secret")
        assert not file.look() and file() == 2
        write(path, "3")
        assert file.look() and file() == 3
    said = "changed and cannot be used, what was read before stays: file: must be a number"
    assert [said in one.message for one in caplog.records].count(True) == 2
    assert "stays: KeyError" in caplog.text and "secret" not in caplog.text


def test_a_failure_that_passes_leaves_the_old_no_longer_in_force(tmp_path: Path, caplog):
    path, failures = write(tmp_path / "file", "1"), [OSError(24, "too many files"), OSError(5)]

    def read() -> int:
        if failures and path.read_text() != "1":
            raise failures[-1]
        return number(path)

    file = WatchedFile("number", [path], read)
    write(path, "2")
    assert [file.look() for _ in range(3)] == [False, True, True] and file() == 1
    path.chmod(0o640)
    assert [file.look() for _ in range(2)] == [False, True] and file() == 1
    assert caplog.text.count("stays: OSError") == 2
    failures.clear()
    assert file.look() and file() == 2


def test_a_file_of_a_new_owner_is_read_again(tmp_path: Path):
    path = write(tmp_path / "file", "1")
    before, ends_s = stamp_of([path]), time.monotonic() + 5.0
    # Its own owner once more: whoever runs the tests may do that, and the system notes it as it does any other.
    while stamp_of([path]) == before:
        assert time.monotonic() < ends_s
        os.chown(path, os.getuid(), os.getgid())


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_read_again(tmp_path: Path):
    path = write(tmp_path / "file", "1")
    file = WatchedFile("number", [path], lambda: number(path))
    status = path.stat()
    fresh = write(tmp_path / "other", "2")
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.replace(path)
    assert file.look() and file() == 2


def test_a_file_that_cannot_be_read_at_first_refuses_the_start(tmp_path: Path):
    with pytest.raises(ConfigError):
        WatchedFile("number", [], lambda: number(tmp_path / "missing"))
