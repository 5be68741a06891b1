"""Files of a server's doors, and what callers show there: keys, tokens, certificates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from outrider.runtime.serving.doors.keys import new_key

from scripts.bench.doors.certificates import Authority

AUDIENCE = "benchmark"
TENANT = "own"
URI = f"spiffe://benchmark/{TENANT}"
_HOUR_S = 3600.0


class Papers:
    """What both sides need for each kind of door.

    Args:
        folder: for the files.
        num_keys: lines of the file of keys; the caller's is the last one.
    """

    def __init__(self, folder: Path, num_keys: int = 100) -> None:
        made = [new_key(TENANT, ("generate", "info"), f"key-{i}") for i in range(num_keys)]
        self.key = made[-1][0]
        self.keys = _secret(folder / "keys", "".join(f"{known.line()}\n" for _, known in made))
        self.authority = Authority(folder)
        self.server, self.own = self.authority.issue("server"), self.authority.issue("own", [URI])
        signer = ec.generate_private_key(ec.SECP256R1())
        public = jwt.algorithms.ECAlgorithm.to_jwk(signer.public_key(), as_dict=True)
        named = public | {"kid": "signer", "alg": "ES256"}
        self.key_set = _secret(folder / "keys.json", json.dumps({"keys": [named]}))
        claims = {"sub": TENANT, "aud": AUDIENCE, "exp": time.time() + _HOUR_S}
        self.token = jwt.encode(claims, signer, algorithm="ES256", headers={"kid": "signer"})
        certificates = f'[tenants.{TENANT}]\ncertificates = ["{URI}"]\n'
        self.tenants = _secret(folder / "tenants.toml", certificates)

    def doors(self, kind: str) -> dict[str, Any]:
        """Return the fields of ``DoorOptions`` by which callers of a kind, one of ``options``, are known."""
        return {
            "key": {"keys": self.keys},
            "jwt": {"jwt_keys": self.key_set, "jwt_audience": AUDIENCE},
            "mtls": {
                "tls_certificate": self.server.certificate,
                "tls_key": self.server.key,
                "tls_client_ca": self.authority.ca,
                "tenants": self.tenants,
            },
        }.get(kind, {})

    def options(self, kind: str) -> tuple[str, ...]:
        """Return the options of a server: of "open", "key", "jwt", and over TLS "tls" and "mtls"."""
        fields = self.doors("mtls" if kind == "tls" else kind)
        if kind == "tls":
            fields = {name: fields[name] for name in ("tls_certificate", "tls_key")}
        words = ((f"--{name.replace('_', '-')}", str(value)) for name, value in fields.items())
        return tuple(word for pair in words for word in pair)

    def access(self, kind: str) -> dict[str, Any]:
        """Return the arguments of a client for such a server."""
        ca = {"tls_ca": self.authority.ca}
        own = {"tls_certificate": self.own.certificate, "tls_key": self.own.key}
        return {
            "key": {"api_key": self.key},
            "jwt": {"api_key": self.token},
            "tls": ca,
            "mtls": ca | own,
        }.get(kind, {})


def _secret(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path
