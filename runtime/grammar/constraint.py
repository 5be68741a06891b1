"""The constraint of one answer, over a matcher of llguidance.

The matcher stands behind the committed tokens and those of the draft that was asked about last (the *path*). What is
asked next about another draft is rolled back to what both have in common, so that a draft model's own masks are those
that its draft is judged by, and a commit consumes again nothing that was accepted.

End tokens are never consumed: a matcher that has stopped takes one without counting it, and a roll-back then takes back
a token of the text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from outrider.engines.sampling.base import IntArray32
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import GrammarParams
from outrider.runtime.grammar.library import GrammarError, compiled, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_KEPT = 32
"""Compiled grammars that wait for their next request: a few hundred KiB each."""
_ANY = np.int32(-1)


class GrammarConstraint:
    """Implements ``runtime.grammar.base.Constraint``.

    Args:
        matcher: has consumed nothing; this constraint's alone.
        vocab_size: V of the target.
        end_ids: tokens that end an answer.
        name: of the request's field, for errors.
    """

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, end_ids: Sequence[int], name: str
    ) -> None:
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self._name = name
        self._words = -(-vocab_size // 32)
        self._path: list[int] = []
        # Rows 0.._num_filled - 1 are those of the path.
        self._num_filled = 0
        self._rows = np.empty((0, self._words), dtype=np.int32)

    def commit(self, tokens: Sequence[int]) -> None:
        """See ``Constraint.commit``."""
        num_common = self._back_to(tokens)
        rest = [*tokens[num_common:]]
        is_good = not rest or self._matcher.consume_tokens(rest)
        self._path.clear()
        self._num_filled = 0
        if not is_good or self._matcher.is_error():
            raise RequestError(self._name, "became too complex to go on with at this answer")

    def forced(self, most: int) -> tuple[int, ...]:
        """See ``Constraint.forced``."""
        self._back_to(())
        if most < 1:
            return ()
        if self._matcher.is_stopped():
            return tuple(self._end_ids) if len(self._end_ids) == 1 else ()
        tokens = self._matcher.compute_ff_tokens()[:most]
        num_before_end = next((i for i, t in enumerate(tokens) if t in self._end_ids), most)
        return tuple(tokens[:num_before_end])

    def fits(self, tokens: Sequence[int]) -> int:
        """See ``Constraint.fits``."""
        num_fitting = self._walk(tokens)
        if num_fitting < len(tokens) and tokens[num_fitting] in self._end_ids:
            return num_fitting + self._allows(num_fitting, tokens[num_fitting])
        return num_fitting

    def masks(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> IntArray32:
        """See ``Constraint.masks``."""
        if parents is not None:
            return self._tree_masks(tokens, parents)
        self._make_room(1 + len(tokens))
        num_fitting = self._walk(tokens)
        self._rows[num_fitting + 1 : 1 + len(tokens)] = _ANY
        return self._rows[: 1 + len(tokens)]

    def begin(self, num_tokens: int) -> IntArray32:
        """See ``Constraint.begin``."""
        self._make_room(1 + num_tokens)
        self._walk(())
        return self._rows

    def follow(self, tokens: Sequence[int]) -> IntArray32:
        """See ``Constraint.follow``."""
        self._make_room(1 + len(tokens))
        if self._walk(tokens) < len(tokens):
            self._rows[len(tokens)] = _ANY
        row: IntArray32 = self._rows[len(tokens)]
        return row

    def _tree_masks(self, tokens: Sequence[int], parents: Sequence[int]) -> IntArray32:
        masks = np.full((1 + len(tokens), self._words), _ANY, dtype=np.int32)
        masks[0] = self.follow(())
        paths: list[tuple[int, ...]] = [()]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            paths.append((*paths[parent], token))
            masks[node] = self.follow(paths[node])
        return masks

    def _walk(self, tokens: Sequence[int]) -> int:
        """Move behind the leading tokens that fit, with the masks on the way; return how many these are."""
        num_fitting = self._back_to(tokens)
        self._make_room(1 + len(tokens))
        self._fill()
        for token in tokens[num_fitting:]:
            if token in self._end_ids or not self._allows(num_fitting, token):
                break
            self._matcher.consume_token(token)
            self._path.append(token)
            num_fitting += 1
            self._fill()
        return num_fitting

    def _back_to(self, tokens: Sequence[int]) -> int:
        """Roll back to what the path has in common with these tokens; return how many."""
        path, num_common = self._path, 0
        for mine, other in zip(path, tokens, strict=False):
            if mine != other:
                break
            num_common += 1
        if num_common < len(path):
            self._matcher.rollback(len(path) - num_common)
            del path[num_common:]
            self._num_filled = min(self._num_filled, num_common + 1)
        return num_common

    def _fill(self) -> None:
        """Have the masks up to the path's end; where the library gives up, no token may follow."""
        place = len(self._path)
        if place < self._num_filled:
            return
        row = self._rows[place]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            row[:] = 0
        self._num_filled = place + 1

    def _allows(self, place: int, token: int) -> bool:
        is_known = 0 <= token < 32 * self._words
        return is_known and bool(self._rows[place, token >> 5] >> (token & 31) & 1)

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._rows):
            rows = np.empty((num_rows, self._words), dtype=np.int32)
            rows[: self._num_filled] = self._rows[: self._num_filled]
            self._rows = rows


class GrammarConstraints:
    """Implements ``runtime.grammar.base.Constraints`` over the tokenizer of one model.

    Args:
        tokenizer: bytes of the ``tokenizer.json`` of what the model writes.
        vocab_size: V of the target.
        end_ids: tokens that end an answer, at least one.

    Raises:
        ValueError: the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer: bytes, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = open_tokenizer(tokenizer.decode(), vocab_size, end_ids)
        self._vocab_size, self._end_ids = vocab_size, tuple(end_ids)
        self._kept: OrderedDict[GrammarParams, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def is_kept(self, params: GrammarParams) -> bool:
        """Return whether a grammar need not be compiled again."""
        return params in self._kept

    def constraint(self, params: GrammarParams) -> GrammarConstraint:
        """See ``Constraints.constraint``; the grammar is compiled where none of the last requests had it."""
        with self._lock:
            kept = self._kept.get(params)
            if kept is not None:
                self._kept.move_to_end(params)
                return self._constraint(kept.deep_copy(), params)
        try:
            matcher = compiled(
                self._tokenizer,
                params.kind,
                params.text,
                allows_whitespace=params.allows_whitespace,
                made_of=params.field,
            )
        except GrammarError as error:
            raise RequestError(params.name, str(error)) from error
        with self._lock:
            self._kept[params] = matcher
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return self._constraint(matcher.deep_copy(), params)

    def _constraint(self, matcher: LLMatcher, params: GrammarParams) -> GrammarConstraint:
        return GrammarConstraint(
            matcher, vocab_size=self._vocab_size, end_ids=self._end_ids, name=params.name
        )
