"""Keys: what a line may be, and how the one that somebody presents is found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.keys import (
    PREFIX,
    Key,
    find_key,
    hash_key,
    new_key,
    parse_keys,
)

HASH = "a" * 64


class LookUps(Mapping[bytes, Key]):
    """Keys that can be looked up, and not gone through."""

    def __init__(self, keys: Mapping[bytes, Key]) -> None:
        self._keys = keys
        self.asked: list[bytes] = []

    def __getitem__(self, digest: bytes) -> Key:
        self.asked.append(digest)
        return self._keys[digest]

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("gone through")

    def __len__(self) -> int:
        raise AssertionError("counted")


def test_a_new_key_is_found_by_its_line_and_cannot_be_read_from_it():
    secret, known = new_key("acme:eu", ["metrics", "generate"], "nightly")
    keys = parse_keys(known.line())
    assert keys == {known.digest: known}
    assert known.line().startswith("nightly:") and known.line().endswith(
        ":acme:eu:generate,metrics"
    )
    assert known.digest == hashlib.sha256(secret.encode()).digest()
    assert secret.startswith(PREFIX) and secret not in known.line() + repr(known)
    assert find_key(keys, secret) == known
    assert new_key("acme", ["info"])[0] != new_key("acme", ["info"])[0]


def test_comments_and_empty_lines_are_no_keys():
    assert parse_keys(f"# note\n\n  \n  a:{HASH}:x:info \n") == parse_keys(
        f"a:{HASH.upper()}:x:info"
    )


@pytest.mark.parametrize("presented", ["", "wrong", "first", "last", "\udcff", "\ud800", "ümläut"])
def test_one_hash_is_looked_up_whatever_is_presented(presented):
    digests = [hash_key("first"), *(bytes([n]) * 32 for n in range(5)), hash_key("last")]
    lines = "\n".join(f"k{i}:{one.hex()}:x:info" for i, one in enumerate(digests))
    keys = LookUps(parse_keys(lines))
    found = find_key(keys, presented)
    assert (found and found.name) == {"first": "k0", "last": "k6"}.get(presented)
    assert keys.asked == [hash_key(presented)]


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
