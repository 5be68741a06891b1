"""JSON web tokens: whose key signed them, by its own algorithm, for us, and until when."""

from __future__ import annotations

import base64
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.tokens import ALGORITHMS, Claims, TokenKeys, parse_key_set

from tests.runtime.serving.security.credentials import AUDIENCE, Issuer, key_set

ISSUERS = {name: Issuer(name, kid=f"k-{name}") for name in ALGORITHMS}
EC = ISSUERS["ES256"]
ALL = tuple(ISSUERS.values())


def claims_of(token: str, *, claim: str = "sub", issuers=ALL) -> Claims | None:
    keys = parse_key_set(key_set(*issuers))
    return TokenKeys(keys, audience=AUDIENCE, tenant_claim=claim).claims(token)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_by_any_key_of_the_set_is_valid(algorithm):
    token = ISSUERS[algorithm].token(team="acme", scope="info openid")
    assert claims_of(token, claim="team") == Claims("alice", "acme", frozenset({"info"}))


def test_without_a_scope_a_token_generates():
    assert claims_of(EC.token()) == Claims("alice", "alice", frozenset({"generate", "info"}))


def test_one_key_needs_no_kid():
    alone = Issuer("ES256")
    assert claims_of(alone.token(headers={}), issuers=[alone]) is not None


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def forged(header: dict[str, str], key: bytes) -> str:
    """A token as an attacker makes it, without asking a library that knows better."""
    import hashlib
    import hmac

    claims = {"sub": "alice", "aud": AUDIENCE, "exp": time.time() + 60}
    body = ".".join(base64url(json.dumps(part).encode()) for part in (header, claims))
    signature = hmac.new(key, body.encode(), hashlib.sha256).digest() if key else b""
    return f"{body}.{base64url(signature)}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_public_key_is_no_shared_secret(algorithm):
    issuer = ISSUERS[algorithm]
    public = issuer.key.public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for secret in (pem, pem.strip(), json.dumps(issuer.entry()).encode()):
        assert claims_of(forged({"alg": "HS256", "kid": issuer.kid}, secret)) is None


@pytest.mark.parametrize("name", ["none", "None", "NONE", ""])
def test_an_unsigned_token_is_none(name):
    assert claims_of(forged({"alg": name, "kid": EC.kid}, b"")) is None


def test_a_token_does_not_choose_the_algorithm_of_a_key():
    # RS512 by the very key, which is one for RS256.
    issuer = ISSUERS["RS256"]
    claims = {"sub": "alice", "aud": AUDIENCE, "exp": time.time() + 60}
    token = jwt.encode(claims, issuer.key, algorithm="RS512", headers={"kid": issuer.kid})
    assert claims_of(token) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": time.time() - 60},
        {"exp": None},
        {"exp": "soon"},
        {"exp": 1e400},
        {"nbf": time.time() + 3600},
        {"iat": time.time() + 3600},
        {"aud": None},
        {"aud": "somebody else"},
        {"aud": ["somebody", "else"]},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "a" * 257},
        {"sub": "not a tenant"},
        {"headers": {"kid": "unknown"}},
        {"headers": {"kid": "k-RS256"}},
        {"headers": {}},
    ],
)
def test_a_token_that_is_not_for_us_now_is_none(changes):
    assert claims_of(EC.token()) is not None
    assert claims_of(EC.token(**changes)) is None


def test_a_token_by_somebody_else_is_none():
    assert claims_of(Issuer("ES256", kid=EC.kid).token()) is None


@pytest.mark.parametrize(
    "token", ["", "a", "a.b", "a.b.c", "..", "a.b.c.d.e", "\udcff.b.c", "e30.e30.e30"]
)
def test_what_is_no_token_is_none(token):
    assert claims_of(token) is None


@pytest.mark.parametrize("scope", ["", "openid", ["generate"], 7])
def test_scopes_of_others_are_none_of_ours(scope):
    claims = claims_of(EC.token(scope=scope))
    assert claims is not None and claims.scopes == frozenset()


SHORT = rsa.generate_private_key(65537, 1024).public_key()
SHORT_ENTRY = jwt.get_algorithm_by_name("RS256").to_jwk(SHORT, as_dict=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON with a list named keys"),
        ("[]", "must be JSON with a list named keys"),
        ('{"keys": []}', "must be JSON with a list named keys"),
        ('{"keys": {}}', "must be JSON with a list named keys"),
        ("[" * 100_000, "must be JSON with a list named keys"),
        ('{"keys": [1]}', "key 1: must be a public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "key 1: must be a public key"),
        ('{"keys": [{"kty": "oct"}]}', "key 1: must be a key for ES256, RS256, EdDSA"),
        ('{"keys": [{"kty": "RSA", "n": "AQAB"}]}', "key 1: must be a key for"),
        (key_set(EC, Issuer("ES384", kid="b")), "key 2: must be a key for"),
        (key_set(EC, EC), "key 2: must have a kid of its own"),
        (key_set(Issuer("ES256"), EC), "key 1: must have a kid of its own"),
        (json.dumps({"keys": [EC.entry(d="c2VjcmV0")]}), "key 1: must be a public key"),
        (json.dumps({"keys": [EC.entry(kid=1)]}), "key 1: must have a kid of its own"),
        (json.dumps({"keys": [EC.entry(alg="HS256")]}), "key 1: must be a key for"),
        (json.dumps({"keys": [EC.entry(alg="none")]}), "key 1: must be a key for"),
        (json.dumps({"keys": [EC.entry(x="AQAB")]}), "key 1: must be a key for"),
        (json.dumps({"keys": [SHORT_ENTRY]}), "key 1: must have at least 2048 bits"),
    ],
)
def test_a_key_set_that_cannot_be_trusted_is_refused_and_not_repeated(text, said):
    with pytest.raises(ConfigError, match=r"^jwt_keys") as refusal:
        parse_key_set(text)
    assert said in str(refusal.value)
    assert "c2VjcmV0" not in str(refusal.value) and refusal.value.__cause__ is None
