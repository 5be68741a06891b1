"""Valid tokens are remembered, until they end and no longer."""

from __future__ import annotations

import time
from typing import Any

import jwt
import pytest
from outrider.runtime.serving.security import tokens
from outrider.runtime.serving.security.tokens import TokenKeys, parse_key_set

from tests.runtime.serving.security.credentials import AUDIENCE, Issuer, key_set

ISSUER = Issuer("ES256", kid="k")


class Clock:
    """The time, which a test may move."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tokens whose signatures were checked."""
    found: list[str] = []
    decode = jwt.decode

    def noted(token: str, *arguments: Any, **options: Any) -> Any:
        found.append(token)
        return decode(token, *arguments, **options)

    monkeypatch.setattr(jwt, "decode", noted)
    return found


def keys_by(clock: Clock) -> TokenKeys:
    keys = parse_key_set(key_set(ISSUER))
    return TokenKeys(keys, audience=AUDIENCE, tenant_claim="sub", clock=clock)


def test_a_valid_token_is_checked_once(checked: list[str]):
    keys, token, other = keys_by(Clock()), ISSUER.token(), ISSUER.token(sub="bob")
    assert keys.claims(token) == keys.claims(token)
    assert checked == [token]
    found = keys.claims(other)
    assert found is not None and found.subject == "bob"


def test_a_token_that_has_ended_is_checked_again(checked: list[str]):
    clock = Clock()
    keys, token = keys_by(clock), ISSUER.token(exp=int(time.time()) + 1000)
    assert keys.claims(token) is not None
    clock.ahead_s = 1001.0
    keys.claims(token)
    assert checked == [token, token]


def test_a_token_that_is_not_valid_is_checked_each_time(checked: list[str]):
    keys, token = keys_by(Clock()), ISSUER.token(aud="others")
    assert keys.claims(token) is keys.claims(token) is None
    assert checked == [token, token]


def test_not_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch, checked: list[str]):
    monkeypatch.setattr(tokens, "MOST_REMEMBERED", 2)
    keys = keys_by(Clock())
    first, second, third = (ISSUER.token(sub=name) for name in ("a", "b", "c"))
    for token in (first, second, third, third, first):
        assert keys.claims(token) is not None
    assert checked == [first, second, third, first]


def test_a_token_that_never_seems_to_end_harms_nobody():
    keys, token = keys_by(Clock()), ISSUER.token(exp=10**400)
    assert keys.claims(token) == keys.claims(token) is not None
