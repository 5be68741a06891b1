"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

from outrider import affinity_metadata
from outrider.runtime.addons.ray.affinity import groups, key_of, ranked

NAMES = tuple(f"replica-{number}" for number in range(5))
KEYS = tuple(f"session:{number}" for number in range(500))


def test_every_proxy_finds_the_same_order_whatever_order_it_knows_replicas_in() -> None:
    for key in KEYS[:50]:
        order = [NAMES[index] for index in ranked(key, NAMES)]
        turned = NAMES[::-1]
        assert [turned[index] for index in ranked(key, turned)] == order
        assert sorted(order) == sorted(NAMES)


def test_keys_are_spread_over_all_replicas() -> None:
    firsts = Counter(ranked(key, NAMES)[0] for key in KEYS)
    assert sorted(firsts) == [*range(5)]
    assert min(firsts.values()) > 60


def test_a_replica_that_goes_moves_its_own_keys_only() -> None:
    for key in KEYS:
        order = [NAMES[index] for index in ranked(key, NAMES)]
        left = [name for name in NAMES if name != NAMES[2]]
        order.remove(NAMES[2])
        assert [left[index] for index in ranked(key, left)] == order


def test_a_key_has_a_first_replica_then_a_second_then_any() -> None:
    order = ranked("session:a", NAMES)
    assert groups("session:a", NAMES) == [order[:1], order[1:2], order[2:]]
    assert groups("session:a", NAMES[:1]) == [[0]]
    assert groups("session:a", ()) == []
    assert groups("", NAMES) == [[0, 1, 2, 3, 4]]


def test_a_session_wins_over_a_prefix() -> None:
    metadata = affinity_metadata(session="s", prefix="once upon a time")
    assert metadata["session_id"] == "s"
    prefix = key_of("", metadata.items())
    assert prefix.startswith("prefix:")
    assert key_of("s", metadata.items()) == "session:s"
    assert key_of("", [("outrider-prefix", b"bytes"), ("other", "a")]) == ""


def test_prompts_that_begin_alike_have_one_hash() -> None:
    shared = "You are helpful. " * 40
    texts = [affinity_metadata(prefix=shared + end) for end in ("a", "b")]
    assert texts[0] == texts[1] != affinity_metadata(prefix="Y" + shared)
    tokens = [affinity_metadata(prefix=[*range(200), end]) for end in (1, 2)]
    assert tokens[0] == tokens[1] != affinity_metadata(prefix=[*range(1, 201)])
    chats = [
        affinity_metadata(prefix=[{"role": "system", "content": shared}, {"role": "user", "content": end}])
        for end in ("a", "b")
    ]  # fmt: skip
    assert chats[0] == chats[1]
    assert affinity_metadata(prefix="ab", length=1) == affinity_metadata(prefix="ac", length=1)
    assert affinity_metadata() == {}
