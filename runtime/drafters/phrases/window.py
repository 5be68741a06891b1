"""The lookahead window: trajectories of guesses that a model advances by one token per pass.

Row 0 holds W - 1 tokens, rows 1 .. B - 1 hold W each, B being the length of phrases (the source's N
is B + 1). Token i of row 0 stands i + 1 places behind the last token; token i of row r >= 1 stands
r + i places behind it and sees row 0 up to token i - 1, then its own column from row 1 down. So the
window is a tree behind the last token, fed beside the other draft tokens:

    last - R0[0] - R0[1] - ...           W = 3, B = 3: column i is R1[i], R2[i]
      |      |       |
    R1[0]  R1[1]   R1[2]
      |      |       |
    R2[0]  R2[1]   R2[2]     -> the model's choices behind these are the next row

Each column with its choice is a phrase behind the token above it. Nothing of the window is ever
emitted for being in it; a node that equals the target's own draw is kept like any other.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(arXiv:2402.02057).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from outrider.runtime.core.tree import TreeBuilder

Phrase = tuple[int, ...]


def window_nodes(width: int, phrase_length: int) -> int:
    """Return the number of tokens of a window of W columns and phrases of B tokens."""
    return width * phrase_length - 1


@dataclass(slots=True)
class LookaheadWindow:
    """Rows of one request's window.

    Attributes:
        rows: [B] lists; the first of W - 1 tokens, the others of W. B is at least 2.
    """

    rows: list[list[int]]

    @classmethod
    def from_text(cls, text: Sequence[int], *, width: int, phrase_length: int) -> LookaheadWindow:
        """Return a window filled with pieces of a text, spread evenly over it; no random numbers are needed.

        Args:
            text: at least one token; read round and round where it is short.
            width: W, at least 1.
            phrase_length: B, at least 2.
        """
        starts = [len(text) * column // width for column in range(width)]
        rows = [
            [text[(start + level) % len(text)] for start in starts]
            for level in range(phrase_length)
        ]
        # Column i hangs on token i - 1 of row 0, so the first column needs none.
        return cls([rows[0][1:], *rows[1:]])

    @property
    def num_nodes(self) -> int:
        """Return the number of the window's tokens."""
        return sum(map(len, self.rows))

    @property
    def depth(self) -> int:
        """Return the number of places between the last token and the window's deepest one."""
        return len(self.rows[-1]) + len(self.rows) - 2

    def place(self, tree: TreeBuilder) -> list[int]:
        """Hang the window behind the root; nodes the tree has already are shared.

        Returns:
            The last node of each column.
        """
        above = [0]
        for token in self.rows[0]:
            above.append(tree.add(above[-1], token))
        for row in self.rows[1:]:
            if row is self.rows[1]:
                ends = [tree.add(node, token) for node, token in zip(above, row, strict=True)]
            else:
                ends = [tree.add(node, token) for node, token in zip(ends, row, strict=True)]
        return ends

    def advance(
        self, last: int, choices: Sequence[int], ends: Collection[int] = ()
    ) -> Iterator[tuple[int, Phrase]]:
        """Move the window on by one row, and give the phrases it found, by key token.

        Args:
            last: the token it hung behind.
            choices: the model's, behind the last node of each column.
            ends: tokens that are replaced in the window, since nothing follows them.
        """
        keys = [last, *self.rows[0]]
        found = [
            (key, (*(row[column] for row in self.rows[1:]), choice))
            for column, (key, choice) in enumerate(zip(keys, choices, strict=True))
        ]
        newest = [last if choice in ends else choice for choice in choices]
        self.rows = [self.rows[1][1:], *self.rows[2:], newest]
        yield from found
