"""Signatures of bundles: who vouches for a manifest, and so for every file that it lists.

``manifest.sig`` is a detached Ed25519 signature over the bytes of ``manifest.json``: 64 bytes and nothing else, as
``openssl pkeyutl -sign -rawin`` writes them. Whatever writes the manifest anew ends the signature. Everything happens
offline. Needs the package cryptography, which is imported when keys are read and signatures are made or checked.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engines.base import BundleError
from outrider.engines.bundle.files import MANIFEST_FILE, SIGNATURE_FILE, read_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_BYTES = 64
_AGAIN = "whoever vouches for the bundle must sign it again (outrider sign)"
_BEGIN = b"-----BEGIN "
_PUBLIC_KEY = re.compile(b"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


def fingerprint_of(signer: bytes) -> str:
    """Return a short name of a public key, for logs: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(signer).hexdigest()[:16]


def read_signers(path: Path) -> tuple[bytes, ...]:
    """Return the public keys of a file, 32 bytes each: PEM blocks, one or several.

    Raises:
        BundleError: the file cannot be read, or holds anything but public keys of Ed25519.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(path)
    blocks = _PUBLIC_KEY.findall(data)
    try:
        keys = [load_pem_public_key(block) for block in blocks]
    except (ValueError, UnsupportedAlgorithm):
        keys = []
    found = [key.public_bytes_raw() for key in keys if isinstance(key, Ed25519PublicKey)]
    # A block that is cut short, a private key or a certificate begins as well, and is no public key.
    if not found or len(found) != data.count(_BEGIN):
        raise BundleError(f"{path}: must hold public keys of Ed25519 in PEM, and nothing else")
    return tuple(found)


def check_signature(root: Path, manifest: bytes, signers: Sequence[bytes]) -> str:
    """Return the fingerprint of the signer who vouches for a manifest.

    Args:
        root: folder of the bundle, for its ``manifest.sig``.
        manifest: the very bytes that will be parsed.
        signers: public keys that are trusted, 32 bytes each.

    Raises:
        BundleError: there is no signature, or none of these made it over these bytes.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not is_signed(root):
        raise BundleError(f"{SIGNATURE_FILE}: missing: the bundle is not signed (outrider sign)")
    signature = read_plain(root, SIGNATURE_FILE, at_most=SIGNATURE_BYTES + 1)
    for signer in signers:
        try:
            Ed25519PublicKey.from_public_bytes(signer).verify(signature, manifest)
        except InvalidSignature:
            continue
        return fingerprint_of(signer)
    raise BundleError(
        f"{SIGNATURE_FILE}: no trusted signer's, or {MANIFEST_FILE} was changed since; {_AGAIN}"
    )


def is_signed(root: Path) -> bool:
    """Return whether a bundle has a signature, right or wrong."""
    return os.path.lexists(root / SIGNATURE_FILE)


def stale_line(root: Path) -> str:
    """Say that a manifest that was just written ended a bundle's signature; empty where there is none."""
    return f"{SIGNATURE_FILE}: no longer holds: {_AGAIN}" if is_signed(root) else ""


def sign_manifest(root: Path, key: Path) -> bytes:
    """Write ``manifest.sig`` by a private key, whole or not at all, and return the signer's public key, 32 bytes.

    Raises:
        BundleError: the key or the manifest cannot be read, or others may read the key.
    """
    private = _read_private(key)
    unfinished = root / f"{SIGNATURE_FILE}.new"
    unfinished.write_bytes(private.sign(read_plain(root, MANIFEST_FILE)))
    unfinished.replace(root / SIGNATURE_FILE)
    return private.public_key().public_bytes_raw()


def make_signer(private: Path, public: Path) -> bytes:
    """Write a new key pair to two new files, the private key for its owner alone; return the public key, 32 bytes.

    Raises:
        FileExistsError: one of the files exists.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    texts = {
        public: key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        private: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for path, text in texts.items():
        mode = 0o600 if path == private else 0o644
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(text)
    return key.public_key().public_bytes_raw()


def _read_private(path: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    # On Windows files have no such bits.
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise BundleError(f"{path}: others may read this private key; chmod 600")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:  # what cryptography says of a key with a passphrase
        raise BundleError(f"{path}: must be without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise BundleError(f"{path}: must be a private key of Ed25519 in PEM")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
