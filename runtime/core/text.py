"""From tokens to text that is safe to show.

Two hold-backs, one after the other: bytes that do not yet form a character, and characters that
may yet turn out to begin a stop string. Invariant: what has been shown is a prefix of the final
text, whatever tokens follow and however they were grouped into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

NUM_CONTEXT_TOKENS = 6
"""Prompt tokens decoded along, for tokenizers whose first token loses its leading space."""

MAX_WINDOW = 64
"""Tokens without a clean character border after which the bytes are taken as they are."""

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The tokenizer's way back."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD."""
        ...


@runtime_checkable
class PieceDecoder(Decoder, Protocol):
    """A tokenizer that may know of a token what it adds to any text, whatever stands beside it."""

    def piece(self, token: int, skip_special_tokens: bool) -> str | None:
        """Text of a token of whole characters, the same behind any text; None for any other token."""
        ...


class IncrementalDecoder:
    """Decodes one token after another, never showing half a character."""

    def __init__(
        self, decoder: Decoder, prompt_tokens: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._decode = partial(decoder.decode, skip_special_tokens=skip_special_tokens)
        self._piece = decoder.piece if isinstance(decoder, PieceDecoder) else None
        self._skips_special = skip_special_tokens
        window = self._context(prompt_tokens)
        self._window, self._num_clean = window, len(window)
        self._num_shown = len(self._decode(window))

    def _context(self, prompt_tokens: Sequence[int]) -> tuple[int, ...]:
        """Return a few tokens that end the prompt's text, without special ones behind it that are left out."""
        size = NUM_CONTEXT_TOKENS
        while size < len(prompt_tokens) and not self._decode(prompt_tokens[-size:]):
            size *= 2
        window = tuple(prompt_tokens[-size:])
        while len(window) > NUM_CONTEXT_TOKENS:
            half = len(window) // 2
            behind = window[half:]
            window = behind if self._decode(behind) else window[:half]
        return window

    def push(self, *tokens: int) -> str:
        """Return the characters that these tokens completed, together."""
        shown: list[str] = []
        for token in tokens:
            if self._piece is not None and self._num_clean == len(self._window):
                piece = self._piece(token, self._skips_special)
                if piece:
                    self._window, self._num_clean, self._num_shown = (token,), 1, len(piece)
                    shown.append(piece)
                    continue
            shown.append(self._decode_behind(token))
        return "".join(shown)

    def _decode_behind(self, token: int) -> str:
        """Return the characters that a token completed, which may depend on those before it."""
        window = self._window = (*self._window, token)
        text, num_shown = self._decode(window), self._num_shown
        is_clean = not text.endswith(REPLACEMENT) or len(window) > MAX_WINDOW
        if is_clean and len(text) > num_shown:
            # The tokens since the last clean border are the context of the next ones.
            self._window = window[self._num_clean :]
            self._num_clean = len(self._window)
            self._num_shown = len(self._decode(self._window))
            return text[num_shown:]
        stable = len(text) if is_clean else len(text.rstrip(REPLACEMENT))
        self._num_shown = max(num_shown, stable)
        return text[num_shown:stable]

    def flush(self) -> str:
        """Return the text that is still held back, incomplete characters included."""
        text = self._decode(self._window)
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was completed, and the text before (or with) it."""

    stop: str
    text: str


class StopScanner:
    """Finds the stop string that is completed first, across any borders."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool) -> None:
        self._stop_strings = tuple(stop for stop in stop_strings if stop)
        self._include_stop = include_stop
        self._held = ""

    @property
    def has_stops(self) -> bool:
        """Return whether there is anything to find."""
        return bool(self._stop_strings)

    def push(self, text: str) -> str | StopMatch:
        """Text that can no longer be part of a stop string, or the match.

        Where several stop strings are completed by the same character, the longest wins.
        """
        if not self._stop_strings:
            return text
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            end, stop = match
            self._held = ""
            return StopMatch(stop, pending[: end if self._include_stop else end - len(stop)])
        num_held = self._num_held(pending)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [
            (position + len(stop), -len(stop), stop)
            for stop in self._stop_strings
            if (position := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _num_held(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


class CompletionText:
    """The text of one answer, as its tokens come."""

    def __init__(self, decoder: IncrementalDecoder, scanner: StopScanner) -> None:
        self._decoder = decoder
        self._scanner = scanner
        self._has_stops = scanner.has_stops

    def push(self, tokens: Sequence[int]) -> tuple[str, int, str | None]:
        """Return text that became safe to show, the tokens taken, and the stop string that they completed."""
        if not self._has_stops:
            return self._decoder.push(*tokens), len(tokens), None
        pieces: list[str] = []
        for num_taken, token in enumerate(tokens, start=1):
            text = self._decoder.push(token)
            shown = self._scanner.push(text) if text else text
            if isinstance(shown, StopMatch):
                return "".join((*pieces, shown.text)), num_taken, shown.stop
            pieces.append(shown)
        return "".join(pieces), len(tokens), None

    def finish(self) -> str:
        """The rest, once no token can follow."""
        rest = self._scanner.push(self._decoder.flush())
        if isinstance(rest, StopMatch):
            return rest.text
        return rest + self._scanner.flush()
