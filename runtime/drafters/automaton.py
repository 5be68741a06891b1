"""A suffix automaton that counts: where any substring of the texts ended, and how often.

A state stands for all substrings that end at the same set of places; ``count`` is the size of that
set. Appending a token is O(1) amortised plus one increment per suffix link, of which there are few
in natural text and at most ``MAX_LINKS`` are followed.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
"""

from __future__ import annotations

MAX_LINKS = 64
"""Suffix links followed to keep counts; in highly repetitive text shorter substrings are counted
low, which only makes drafts shorter."""

ROOT = 0


class SuffixAutomaton:
    """Substrings of several texts with their counts. Not thread-safe.

    Attributes:
        following: per state, token -> state.
        link: per state, the state of its longest suffix that ends elsewhere too; -1 of the root.
        length: per state, tokens of its longest substring.
        count: per state, occurrences.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]

    def append(self, last: int, token: int) -> int:
        """Extend the text whose whole is state ``last`` (``ROOT`` begins one); the new whole."""
        known = self.following[last].get(token)
        if known is not None:
            is_exact = self.length[known] == self.length[last] + 1
            whole = known if is_exact else self._split(last, token, known)
        else:
            whole = self._add(self.length[last] + 1, {}, ROOT, 0)
            state = last
            while state != -1 and token not in self.following[state]:
                self.following[state][token] = whole
                state = self.link[state]
            if state != -1:
                other = self.following[state][token]
                is_exact = self.length[other] == self.length[state] + 1
                self.link[whole] = other if is_exact else self._split(state, token, other)
        self._count_up(whole, 1)
        return whole

    def remove(self, tokens: list[int]) -> None:
        """Take back the counts of a text that was appended from the root; states stay."""
        state = ROOT
        for token in tokens:
            state = self.following[state][token]
            self._count_up(state, -1)

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest known suffix after one more token, as state and length, 0 for none."""
        while True:
            following = self.following[state].get(token)
            if following is not None and self.count[following] > 0:
                return following, matched + 1
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            matched = self.length[state]

    def settle(self, state: int, matched: int) -> int:
        """The state of a match after later appends may have split the one it was in."""
        while state != ROOT and matched <= self.length[self.link[state]]:
            state = self.link[state]
        return state

    def likeliest(self, state: int) -> tuple[int, int, int] | None:
        """Most frequent next token, its state and its count, ties by lower id; None at an end."""
        best: tuple[int, int, int] | None = None
        greatest = 0
        for token, following in self.following[state].items():
            count = self.count[following]
            if count > greatest or (count == greatest > 0 and best and token < best[0]):
                best, greatest = (token, following, count), count
        return best

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Next tokens with their states and counts, most frequent first, ties by lower id."""
        found = [(t, to, self.count[to]) for t, to in self.following[state].items()]
        return sorted((one for one in found if one[2] > 0), key=lambda one: (-one[2], one[0]))

    def _add(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1

    def _split(self, state: int, token: int, other: int) -> int:
        """Give the shorter substrings of ``other`` that end in ``token`` a state of their own."""
        shorter = self._add(
            self.length[state] + 1,
            dict(self.following[other]),
            self.link[other],
            self.count[other],
        )
        self.link[other] = shorter
        while state != -1 and self.following[state].get(token) == other:
            self.following[state][token] = shorter
            state = self.link[state]
        return shorter

    def _count_up(self, state: int, by: int) -> None:
        for _ in range(MAX_LINKS):
            if state == ROOT:
                break
            self.count[state] = max(0, self.count[state] + by)
            state = self.link[state]
