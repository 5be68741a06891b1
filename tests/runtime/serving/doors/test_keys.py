"""Keys: what a line may be, and that all are compared whoever asks."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.doors import keys as module
from outrider.runtime.serving.doors.keys import PREFIX, find_key, hash_key, new_key, parse_keys

HASH = "a" * 64


def test_a_new_key_is_found_by_its_line_and_cannot_be_read_from_it():
    secret, known = new_key("acme:eu", ["metrics", "generate"], "nightly")
    (parsed,) = parse_keys(known.line())
    assert parsed == known
    assert known.line().startswith("nightly:") and known.line().endswith(
        ":acme:eu:generate,metrics"
    )
    assert known.digest == hashlib.sha256(secret.encode()).digest()
    assert secret.startswith(PREFIX) and secret not in known.line() + repr(known)
    assert find_key([parsed], secret) is parsed
    assert new_key("acme", ["info"])[0] != new_key("acme", ["info"])[0]


def test_comments_and_empty_lines_are_no_keys():
    assert parse_keys(f"# note\n\n  \n  a:{HASH}:x:info \n") == parse_keys(
        f"a:{HASH.upper()}:x:info"
    )


@pytest.mark.parametrize("presented", ["", "wrong", "first", "last", "\udcff", "\ud800", "ümläut"])
def test_all_keys_are_compared_whatever_is_presented(presented, monkeypatch):
    digests = [hash_key("first"), *(bytes([n]) * 32 for n in range(5)), hash_key("last")]
    known = parse_keys("\n".join(f"k{i}:{one.hex()}:x:info" for i, one in enumerate(digests)))
    compared = []
    compare = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", noting)
    found = find_key(known, presented)
    assert (found is not None) == (presented in ("first", "last"))
    assert compared == [(32, 32)] * len(known)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 2: must be id:sha256:tenant:scopes"),
        (f"a b:{HASH}:x:info", "line 2: must begin with an id"),
        (f":{HASH}:x:info", "line 2: must begin with an id"),
        (f"a:{HASH[:-1]}:x:info", "line 2: must be id:sha256:tenant:scopes"),
        (f"a:{HASH}::info", "line 2: must name a tenant"),
        (f"a:{HASH}:info", "line 2: must name a tenant"),
        (f"a:{HASH}:x y:info", "line 2: must name a tenant"),
        (f"a:{HASH}:x:", "line 2: scopes must be some of"),
        (f"a:{HASH}:x:admin", "line 2: scopes must be some of"),
        (f"first:{HASH}:x:info", "line 2: must have an id and a key of its own"),
        (f"a:{'b' * 64}:x:info", "line 2: must have an id and a key of its own"),
        (f"a:{hash_key('').hex()}:x:info", "line 2: must have an id and a key of its own"),
    ],
)
def test_a_line_that_is_no_key_is_refused_by_its_number_and_not_repeated(line, said):
    with pytest.raises(ConfigError) as refusal:
        parse_keys(f"first:{'b' * 64}:x:info\n{line}")
    assert said in str(refusal.value)
    assert HASH[:-1] not in str(refusal.value)
