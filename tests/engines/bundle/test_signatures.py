"""Who vouches for a bundle: signatures that hold, and every way in which they do not."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, write_manifest
from outrider.engines.bundle.signatures import (
    check_signature,
    fingerprint_of,
    make_signer,
    read_signers,
    sign_manifest,
)


class Signer:
    """A key pair in files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
        self.key = make_signer(self.private, self.public)


@pytest.fixture
def ours(tmp_path: Path) -> Signer:
    return Signer(tmp_path, "ours")


@pytest.fixture
def other(tmp_path: Path) -> Signer:
    return Signer(tmp_path, "other")


def test_a_signed_bundle_loads_and_says_by_whom(root: Path, ours: Signer, other: Signer):
    sign_manifest(root, ours.private)
    bundle = load_bundle(root, (other.key, ours.key))
    assert bundle.signer == fingerprint_of(ours.key)
    assert load_bundle(root).signer == ""
    assert "manifest.sig" not in hash_files(root)


def test_an_unsigned_bundle_is_refused_where_signers_are_named(root: Path, ours: Signer):
    with pytest.raises(BundleError, match=r"manifest\.sig: missing: the bundle is not signed"):
        load_bundle(root, (ours.key,))


def test_a_bundle_signed_by_somebody_else_is_refused(root: Path, ours: Signer, other: Signer):
    sign_manifest(root, other.private)
    with pytest.raises(BundleError, match=r"manifest\.sig: no trusted signer's"):
        load_bundle(root, (ours.key,))


def flip_manifest(root: Path) -> None:
    text = (root / "manifest.json").read_bytes()
    # Still a manifest, and one that would load.
    (root / "manifest.json").write_bytes(text.replace(b'"max_batch": 2', b'"max_batch": 3'))


def flip_signature(root: Path) -> None:
    data = bytearray((root / "manifest.sig").read_bytes())
    data[40] ^= 1
    (root / "manifest.sig").write_bytes(data)


def cut_signature(root: Path) -> None:
    (root / "manifest.sig").write_bytes((root / "manifest.sig").read_bytes()[:63])


def lengthen_signature(root: Path) -> None:
    (root / "manifest.sig").write_bytes((root / "manifest.sig").read_bytes() + b"\n")


def tune(root: Path) -> None:
    manifest = load_bundle(root).manifest
    write_manifest(root, replace(manifest, versions={"onnx": "another"}))


def take_another_bundle_s(root: Path) -> None:
    twin = root.with_name("twin")
    shutil.copytree(root, twin)
    (twin / "tokenizer.json").write_text("{ }")
    manifest = Manifest.from_json((twin / "manifest.json").read_text())
    write_manifest(twin, replace(manifest, files=hash_files(twin)))
    sign_manifest(twin, root.parent / "ours.pem")
    shutil.copy(twin / "manifest.sig", root)


@pytest.mark.parametrize(
    "break_it",
    [
        flip_manifest,
        flip_signature,
        cut_signature,
        lengthen_signature,
        tune,
        take_another_bundle_s,
    ],
)
def test_a_signature_that_does_not_fit_the_manifest_is_refused(
    root: Path, ours: Signer, break_it: Callable[[Path], None]
):
    sign_manifest(root, ours.private)
    break_it(root)
    load_bundle(root)
    with pytest.raises(BundleError, match=r"manifest\.json was changed since; .*outrider sign"):
        load_bundle(root, (ours.key,))


def test_a_file_that_the_signed_manifest_does_not_describe_is_refused(root: Path, ours: Signer):
    sign_manifest(root, ours.private)
    (root / "target" / "model.onnx.data").write_bytes(bytes(15) + b"\1")
    with pytest.raises(BundleError, match=r"model\.onnx\.data: content differs"):
        load_bundle(root, (ours.key,))


def test_what_was_verified_is_what_is_parsed(
    root: Path, ours: Signer, monkeypatch: pytest.MonkeyPatch
):
    sign_manifest(root, ours.private)

    def check_and_swap(root: Path, manifest: bytes, signers: Sequence[bytes]) -> str:
        signer = check_signature(root, manifest, signers)
        flip_manifest(root)
        return signer

    monkeypatch.setattr("outrider.engines.bundle.bundle.check_signature", check_and_swap)
    assert load_bundle(root, (ours.key,)).manifest.max_batch == 2


def test_nothing_of_an_untrusted_manifest_is_parsed(
    root: Path, ours: Signer, monkeypatch: pytest.MonkeyPatch
):
    def must_not(text: str) -> Manifest:
        raise AssertionError("parsed")

    monkeypatch.setattr(Manifest, "from_json", must_not)
    with pytest.raises(BundleError, match="not signed"):
        load_bundle(root, (ours.key,))


def test_a_linked_signature_is_refused(root: Path, ours: Signer):
    sign_manifest(root, ours.private)
    (root / "manifest.sig").rename(root.parent / "elsewhere.sig")
    (root / "manifest.sig").symlink_to(root.parent / "elsewhere.sig")
    with pytest.raises(BundleError, match=r"manifest\.sig: symbolic links"):
        load_bundle(root, (ours.key,))


def test_openssl_signs_what_outrider_takes(root: Path, ours: Signer):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    subprocess.run(
        f"openssl pkeyutl -sign -rawin -inkey {ours.private} -in manifest.json -out manifest.sig".split(),
        cwd=root,
        check=True,
        capture_output=True,
    )
    assert load_bundle(root, (ours.key,)).signer


def test_a_file_of_several_signers_holds_all_of_them(tmp_path: Path, ours: Signer, other: Signer):
    both = tmp_path / "both.pem"
    both.write_bytes(b"# of 2026\n" + ours.public.read_bytes() + other.public.read_bytes())
    assert read_signers(both) == (ours.key, other.key)


@pytest.mark.parametrize("content", ["", "cut", "private", "both", "garbage", "rsa", "missing"])
def test_a_file_of_signers_that_does_not_parse_is_refused_in_a_line(
    tmp_path: Path, ours: Signer, content: str
):
    public, private = ours.public.read_bytes(), ours.private.read_bytes()
    texts = {
        "": b"",
        "cut": public + public[:60],
        "private": private,
        "both": public + private,
        "garbage": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        "rsa": rsa_public_key(),
    }
    path = tmp_path / "signers.pem"
    if content in texts:
        path.write_bytes(texts[content])
    with pytest.raises(BundleError, match=r"signers\.pem: (must hold|cannot be read)") as refused:
        read_signers(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "mode", "rule"),
    [
        ("whole", 0o644, "others may read"),
        ("cut", 0o600, "must be a private key of Ed25519"),
        ("public", 0o600, "must be a private key of Ed25519"),
        ("encrypted", 0o600, "without a passphrase"),
        ("missing", 0o600, "cannot be read"),
    ],
)
def test_a_private_key_that_cannot_sign_is_refused_in_a_line(
    root: Path, ours: Signer, content: str, mode: int, rule: str
):
    private = ours.private.read_bytes()
    texts = {
        "whole": private,
        "cut": private[:80],
        "public": ours.public.read_bytes(),
        "encrypted": encrypted(private),
    }
    path = root.parent / "private.pem"
    if content in texts:
        path.write_bytes(texts[content])
        path.chmod(mode)
    with pytest.raises(BundleError, match=rule) as refused:
        sign_manifest(root, path)
    assert "\n" not in str(refused.value)
    assert not (root / "manifest.sig").exists()


def test_a_new_signer_overwrites_nothing_and_is_its_owner_s(tmp_path: Path, ours: Signer):
    assert ours.private.stat().st_mode & 0o777 == 0o600
    before = ours.private.read_bytes()
    with pytest.raises(FileExistsError):
        make_signer(ours.private, tmp_path / "new.pub.pem")
    assert ours.private.read_bytes() == before


def rsa_public_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = generate_private_key(public_exponent=65537, key_size=2048).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def encrypted(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(private, password=None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
