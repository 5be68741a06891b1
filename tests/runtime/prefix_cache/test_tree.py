"""Texts are found by their tokens, share what they share, and never take more than the budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engines.base import FloatArray
from outrider.runtime.prefix_cache import tree as prefix_tree
from outrider.runtime.prefix_cache.tree import TOKEN_BYTES, PrefixTree

from tests.mutants import assert_caught

# Two floats a token.
CACHED = 8
SIZE = CACHED + TOKEN_BYTES


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int64)


def cached(text: str, start: int, end: int) -> FloatArray:
    """What an engine would have cached: of a token its place and itself, on the axis behind."""
    places = [(place, ord(text[place])) for place in range(start, end)]
    return np.array(places, dtype=np.float32).reshape(1, end - start, 2)


def put(tree: PrefixTree, text: str, scope: str = "") -> None:
    tree.insert(scope, ids(text), partial(cached, text), CACHED)


def found(tree: PrefixTree, text: str, scope: str = "") -> str:
    """The beginning that is kept; its cache must be that of the text."""
    pieces = tree.find(scope, ids(text))
    length = sum(piece.shape[-2] for piece in pieces)
    if pieces:
        np.testing.assert_array_equal(np.concatenate(pieces, axis=-2), cached(text, 0, length))
    return text[:length]


def nodes(tree: PrefixTree) -> list[object]:
    return list(tree._nodes)


def check(tree: PrefixTree, max_bytes: int) -> None:
    """T1, T2, and that the order of use knows the nodes that the roots lead to."""
    order = {node: place for place, node in enumerate(tree._nodes)}
    waiting = list(tree._roots.values())
    assert all(root.children for root in waiting)
    reached = []
    while waiting:
        node = waiting.pop()
        for first, child in node.children.items():
            assert child.parent is node
            assert first == child.tokens[0]
            assert child.values.shape[-2] == len(child.tokens)
            assert (
                child.values if child.values.base is None else child.values.base
            ).nbytes == child.values.nbytes
            if node.parent is not None:
                assert order[child] < order[node]
            reached.append(child)
            waiting.append(child)
    assert set(reached) == set(order)
    assert tree.num_bytes == sum(node.num_bytes for node in order) <= max_bytes


def test_the_longest_beginning_is_found() -> None:
    tree = PrefixTree(1000)
    for text in ("you are kind", "you are new", "hello"):
        put(tree, text)
    assert found(tree, "you are kind of new") == "you are kind"
    assert found(tree, "you are knit") == "you are k"
    assert found(tree, "you are") == "you are"
    assert found(tree, "help") == "hel"
    assert found(tree, "oh") == ""
    check(tree, 1000)


def test_texts_share_what_they_share() -> None:
    tree = PrefixTree(1000)
    read: list[tuple[int, int]] = []

    def reading(text: str, start: int, end: int) -> FloatArray:
        read.append((start, end))
        return cached(text, start, end)

    for text in ("abcdef", "abcxyz", "abc", "abcdefgh", "abcdef"):
        tree.insert("", ids(text), partial(reading, text), CACHED)
    assert read == [(0, 6), (3, 6), (6, 8)]
    assert tree.num_bytes == len("abcdefxyzgh") * SIZE
    check(tree, 1000)


def test_scopes_are_apart() -> None:
    tree = PrefixTree(1000)
    put(tree, "secret", scope="one")
    assert found(tree, "secret", scope="other") == ""
    put(tree, "secret", scope="other")
    assert tree.num_bytes == 12 * SIZE
    check(tree, 1000)


def test_what_was_unused_for_longest_goes_first() -> None:
    tree = PrefixTree(9 * SIZE)
    for text in ("aaa", "bbb", "ccc"):
        put(tree, text)
    found(tree, "aaa")
    put(tree, "dd")
    assert [found(tree, text) for text in ("aaa", "bbb", "ccc", "dd")] == ["aaa", "", "ccc", "dd"]
    assert tree.num_evicted == 1
    check(tree, 9 * SIZE)


def test_a_shared_beginning_outlives_its_ends() -> None:
    tree = PrefixTree(8 * SIZE)
    put(tree, "abcdef")
    put(tree, "abcxyz"[:5])
    put(tree, "qqq")
    assert found(tree, "abcdef") == "abc"
    assert found(tree, "abcxy") == "abcxy"
    check(tree, 8 * SIZE)


def test_of_a_text_without_room_the_beginning_is_kept() -> None:
    tree = PrefixTree(4 * SIZE + 3)
    put(tree, "abcdefgh")
    assert found(tree, "abcdefgh") == "abcd"
    put(tree, "abcdxy")
    assert found(tree, "abcdxy") == "abcd"
    put(tree, "abxy")
    assert found(tree, "abxy") == "abxy"
    put(tree, "xyz")
    assert found(tree, "xyz") == "xyz"
    check(tree, 4 * SIZE + 3)


def test_where_reading_fails_nothing_more_is_kept() -> None:
    tree = PrefixTree(8 * SIZE)
    put(tree, "abcdef")

    def fail(start: int, end: int) -> FloatArray:
        raise MemoryError

    for text in ("abcxyz", "uvw"):
        with pytest.raises(MemoryError):
            tree.insert("", ids(text), fail, CACHED)
        check(tree, 8 * SIZE)
    assert found(tree, "uvw") == ""
    assert found(tree, "abcdef") == "abc"


def beginning(text: str, others: Sequence[str]) -> int:
    """The obvious way: the longest beginning that any of the others has."""
    return max(
        (
            length
            for length in range(len(text) + 1)
            for one in others
            if one[:length] == text[:length]
        ),
        default=0,
    )


TEXTS = st.lists(
    st.tuples(st.sampled_from("xy"), st.text("ab", min_size=1, max_size=8)), max_size=24
)


@given(TEXTS, st.integers(3, 12))
def test_random_texts_are_found_as_the_obvious_way_finds_them(
    texts: list[tuple[str, str]], most: int
) -> None:
    everything, small = PrefixTree(10_000), PrefixTree(most * SIZE)
    kept: dict[str, list[str]] = {"x": [], "y": []}
    for scope, text in texts:
        assert len(found(everything, text, scope)) == beginning(text, kept[scope])
        # What is found is right, and never more than there is.
        assert len(found(small, text, scope)) <= beginning(text, kept[scope])
        put(everything, text, scope)
        put(small, text, scope)
        assert found(everything, text, scope) == text
        assert found(small, text, scope) == text[:most]
        kept[scope].append(text)
        check(everything, 10_000)
        check(small, most * SIZE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return at if differs[at] else length", "return length"),
        ("if count == len(node.tokens):", "if True:"),
        ("values[..., count:, :].copy()", "values[..., count:, :]"),
        ("            node = node.parent\n", "            break\n"),
        ("- _bytes_above(parent) - state_bytes", "- state_bytes"),
    ],
    ids=["all equal", "never parted", "views", "parents unused", "path uncounted"],
)
def test_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    def killer() -> None:
        test_the_longest_beginning_is_found()
        test_texts_share_what_they_share()
        test_a_shared_beginning_outlives_its_ends()
        test_of_a_text_without_room_the_beginning_is_kept()

    errors = (AssertionError, KeyError, ValueError)
    assert_caught(monkeypatch, prefix_tree, old, new, killer, errors)
