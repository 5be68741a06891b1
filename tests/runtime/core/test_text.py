from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.runtime.core.text import (
    MAX_WINDOW,
    CompletionText,
    IncrementalDecoder,
    StopMatch,
    StopScanner,
)

SPECIAL = 256


class ByteDecoder:
    """Token i is byte i; 256 is a special token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = bytearray()
        for token in ids:
            parts += b"<s>" if token == SPECIAL and not skip_special_tokens else b""
            parts += bytes([token]) if token < SPECIAL else b""
        return parts.decode("utf-8", errors="replace")


class BytePieces(ByteDecoder):
    """Knows tokens that are whole characters by themselves."""

    def piece(self, token: int, skip_special_tokens: bool) -> str | None:
        text = self.decode((token,), skip_special_tokens)
        return None if "\ufffd" in text else text


def decoder(prompt: Sequence[int] = (), *, skip: bool = True) -> IncrementalDecoder:
    return IncrementalDecoder(ByteDecoder(), prompt, skip_special_tokens=skip)


def completion(stops: Sequence[str], *, include: bool = False) -> CompletionText:
    return CompletionText(decoder(), StopScanner(stops, include_stop=include))


def scan(stops: Sequence[str], pieces: Sequence[str], *, include: bool = False) -> list[object]:
    scanner = StopScanner(stops, include_stop=include)
    shown: list[object] = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        if isinstance(shown[-1], StopMatch):
            return shown
    return [*shown, scanner.flush()]


# U+FFFD itself reads like half a character and waits for the next one; it has its own test.
characters = st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])


@given(st.text(characters, max_size=40), st.text(characters, max_size=5))
def test_pieces_are_whole_characters_and_add_up(text: str, prompt: str) -> None:
    incremental = decoder(tuple(prompt.encode()))
    pieces = [incremental.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    for piece, byte in zip(pieces, text.encode(), strict=True):
        assert piece or byte >= 0x80
    assert incremental.flush() == ""


@given(st.binary(max_size=3 * MAX_WINDOW))
def test_any_bytes_add_up_to_their_lossy_text_or_nearly(data: bytes) -> None:
    """Bytes that form no character show as U+FFFD; nothing else is lost or doubled."""
    incremental = decoder()
    shown = "".join(incremental.push(byte) for byte in data) + incremental.flush()
    assert shown.replace("\ufffd", "") == data.decode("utf-8", errors="replace").replace(
        "\ufffd", ""
    )


@given(
    st.lists(st.integers(0, SPECIAL), max_size=2 * MAX_WINDOW),
    st.lists(st.integers(0, SPECIAL), max_size=9),
    st.booleans(),
)
def test_knowing_pieces_changes_nothing(tokens: list[int], prompt: list[int], skip: bool) -> None:
    plain = IncrementalDecoder(ByteDecoder(), prompt, skip_special_tokens=skip)
    quick = IncrementalDecoder(BytePieces(), prompt, skip_special_tokens=skip)
    assert [quick.push(token) for token in tokens] == [plain.push(token) for token in tokens]
    assert quick.flush() == plain.flush()


def test_a_known_piece_is_not_decoded() -> None:
    class Silent(BytePieces):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "" if len(ids) != 1 else super().decode(ids, skip_special_tokens)

    quick = IncrementalDecoder(Silent(), (), skip_special_tokens=True)
    assert "".join(quick.push(byte) for byte in b"abc") == "abc"


@pytest.mark.parametrize("num_special", [0, 5, 6, 7, 300])
def test_the_context_is_short_however_many_special_tokens_end_the_prompt(num_special: int) -> None:
    class Counting(ByteDecoder):
        longest = 0

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    counting = Counting()
    prompt = (*b"some text", *[SPECIAL] * num_special)
    incremental = IncrementalDecoder(counting, prompt, skip_special_tokens=True)
    assert incremental.flush() == ""
    assert ByteDecoder().decode(incremental._window)[-1:] == "t"
    counting.longest = 0
    assert [incremental.push(token) for token in (SPECIAL, *b"ab")] == ["", "a", "b"]
    assert counting.longest <= 8


def test_an_incomplete_character_is_shown_only_at_the_end() -> None:
    incremental = decoder()
    assert incremental.push(0xC3) == ""
    assert incremental.flush() == "\ufffd"


def test_a_replacement_character_that_was_written_comes_with_the_next_one() -> None:
    incremental = decoder()
    pieces = [incremental.push(byte) for byte in "a\ufffdb".encode()]
    assert pieces == ["a", "", "", "", "\ufffdb"]
    incremental = decoder()
    assert [incremental.push(byte) for byte in "\ufffd".encode()] == ["", "", ""]
    assert incremental.flush() == "\ufffd"


def test_endless_broken_bytes_do_not_grow_the_window_for_ever() -> None:
    incremental = decoder()
    shown = "".join(incremental.push(0xC3) for _ in range(10 * MAX_WINDOW))
    assert len(shown) > 8 * MAX_WINDOW
    assert len(incremental._window) <= 2 * MAX_WINDOW


def test_special_tokens_are_left_out_or_shown() -> None:
    assert decoder().push(SPECIAL) == ""
    assert decoder(skip=False).push(SPECIAL) == "<s>"


def test_a_stop_string_is_cut_and_its_beginning_held_back() -> None:
    assert scan(["END"], ["aE", "N", "Dzz"]) == ["a", "", StopMatch("END", "")]


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    assert scan(["END"], ["aEN", "x"]) == ["a", "ENx", ""]
    assert scan(["END"], ["aEN"]) == ["a", "EN"]


def test_the_stop_string_completed_first_wins() -> None:
    assert scan(["cd", "b"], ["abcd"]) == [StopMatch("b", "a")]


def test_of_two_completed_together_the_longest_wins() -> None:
    assert scan(["b", "ab"], ["xab"]) == [StopMatch("ab", "x")]


def test_an_included_stop_string_is_shown() -> None:
    assert scan(["ab"], ["xa", "bc"], include=True) == ["x", StopMatch("ab", "ab")]


def test_an_empty_stop_string_stops_nothing() -> None:
    assert scan([""], ["ab"]) == ["ab", ""]


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), max_size=20),
)
def test_the_text_does_not_depend_on_the_borders(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)

    def total(shown: Sequence[object]) -> tuple[str, str | None]:
        text = "".join(s.text if isinstance(s, StopMatch) else str(s) for s in shown)
        last = shown[-1]
        return text, last.stop if isinstance(last, StopMatch) else None

    assert total(scan(stops, pieces)) == total(scan(stops, list(text)))


@pytest.mark.parametrize(("stops", "rest"), [((), "\ufffd"), (("\ufffd",), "")])
def test_finishing_shows_the_rest_up_to_a_stop_string(stops: Sequence[str], rest: str) -> None:
    text = completion(stops)
    assert text.push((0xC3,)) == ("", 1, None)
    assert text.finish() == rest


def test_finishing_shows_what_was_held_back() -> None:
    text = completion(["abc"])
    assert [text.push((byte,))[0] for byte in b"xab"] == ["x", "", ""]
    assert text.finish() == "ab"


@pytest.mark.parametrize(
    ("stops", "pushed"),
    [((), ("xabyz", 5, None)), (("ab",), ("x", 3, "ab")), (("q",), ("xabyz", 5, None))],
)
def test_tokens_of_a_step_are_taken_up_to_a_stop_string(
    stops: Sequence[str], pushed: tuple[str, int, str | None]
) -> None:
    assert completion(stops).push(b"xabyz") == pushed
