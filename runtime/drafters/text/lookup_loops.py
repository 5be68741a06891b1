"""The search of prompt lookup (``runtime.drafters.text.lookup``), compiled.

A text is searched from its end each time: a nanosecond per token, where attention reads thousands of bytes of the same
token. So nothing is kept per request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, int64, types, void
from outrider.engines.jit import njit_exact, pointer

Ints = npt.NDArray[np.int64]

ASKED = 3
"""Numbers that ask for a text: address of its tokens, how many are known, and how many are wanted."""

_IDS = int64[::1]


@njit_exact(types.UniTuple(int64, 2)(_IDS, _IDS, int64, int64))
def find(tokens: Ints, drafted: Ints, shortest: int, longest: int) -> tuple[int, int]:
    """Where tokens follow the last occurrence of the longest end of ``tokens + drafted`` that occurs before.

    Args:
        tokens: a text; an occurrence has at least one more token of it behind.
        drafted: that follow it.
        shortest: tokens of an end at least.
        longest: at most.

    Returns:
        The place behind the occurrence, and the occurrence's length; 0 and 0 for none.
    """
    num, num_drafted = len(tokens), len(drafted)
    num_all = num + num_drafted
    place = size = 0
    for end in range(num - 1, 0, -1):
        same = 0
        while same < min(longest, end, num_all):
            at = num_all - 1 - same
            last = drafted[at - num] if at >= num else tokens[at]
            if tokens[end - 1 - same] != last:
                break
            same += 1
        if same >= shortest and same > size:
            place, size = end, same
            if same == longest:
                break
    return place, size


@njit_exact(void(_IDS, int64, int64, _IDS))
def find_all(asked: Ints, shortest: int, longest: int, found: Ints) -> None:
    """Write what several texts may go on with.

    Args:
        asked: [n * ASKED].
        shortest: as of ``find``.
        longest: likewise.
        found: [n + n * L] overwritten, L at least as much as anybody wants: how many tokens of each text, and then
            these, text after text.
    """
    nothing = np.zeros(0, np.int64)
    end = num_rows = len(asked) // ASKED
    for row in range(num_rows):
        at, known, wanted = asked[ASKED * row], asked[ASKED * row + 1], asked[ASKED * row + 2]
        tokens = carray(pointer(at), (known,), np.int64)
        place, size = find(tokens, nothing, shortest, longest)
        num = min(wanted, known - place) if size > 0 else 0
        found[row] = num
        found[end : end + num] = tokens[place : place + num]
        end += num
