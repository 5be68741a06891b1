"""The compiled loops of a suffix automaton (``runtime.drafters.text.automaton``).

In Python a token costs ten microseconds and more right behind a model's pass, which has pushed everything out of the
processor's caches. One file, because the functions call each other (``engines.jit``).

States and edges are columns of tables. The edges of a state are a linked list, and an open hash table finds the edge of
a state and a token. Shapes: ``states`` [4, S] int32, ``edges`` [4, E] int32, ``slots`` [2^k] int32, at most half full,
-1 where empty, ``used`` [2] int64, the number of states and edges in use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int32, int64, types, void
from outrider.engines.jit import njit_exact

Table = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

ROOT = 0
# Rows of ``states``: state of the longest suffix that ends elsewhere too, -1 of the root; tokens of the longest
# substring; occurrences; first of its edges, -1 for none.
LINK, LENGTH, COUNT, FIRST = range(4)
# Rows of ``edges``.
FROM, TOKEN, TO, NEXT = range(4)
# Entries of ``used``.
STATES, EDGES = range(2)

MAX_LINKS = 64
"""Suffix links followed to keep counts; in highly repetitive text shorter substrings are counted
low, which only makes drafts shorter."""
MAX_CANDIDATES = 6
"""Match lengths tried, longest first."""

_TABLE, _LINE = int32[:, ::1], int32[::1]
_IDS = int64[::1]
_PLACE = types.UniTuple(int64, 2)
_CHAIN = types.Tuple((int64, float64))
_FOUND = types.Tuple((_IDS, float64, int64, int64, int64))


@njit_exact(int64(_TABLE, _LINE, int64, int64))
def slot_of(edges: Table, slots: Table, state: int, token: int) -> int:
    """Return the slot of the edge of a state and a token, or the empty one it would take."""
    mixed = (state * 2_654_435_761) ^ (token * 2_246_822_519)
    at = (mixed ^ (mixed >> 17)) & (len(slots) - 1)
    while slots[at] >= 0:
        edge = slots[at]
        if edges[FROM, edge] == state and edges[TOKEN, edge] == token:
            break
        at = (at + 1) & (len(slots) - 1)
    return at


@njit_exact(int64(_TABLE, _LINE, int64, int64))
def follow(edges: Table, slots: Table, state: int, token: int) -> int:
    """Return the state behind a state's token; -1 where there is none."""
    edge = slots[slot_of(edges, slots, state, token)]
    return int(edges[TO, edge]) if edge >= 0 else -1


@njit_exact(void(_TABLE, _TABLE, _LINE, _IDS, int64, int64, int64))
def add_edge(
    states: Table, edges: Table, slots: Table, used: Ints, state: int, token: int, to: int
) -> None:
    """Add an edge for a token that a state has none for."""
    edge = int(used[EDGES])
    if edge >= edges.shape[1]:
        raise IndexError
    used[EDGES] = edge + 1
    edges[FROM, edge], edges[TOKEN, edge], edges[TO, edge] = state, token, to
    edges[NEXT, edge] = states[FIRST, state]
    states[FIRST, state] = edge
    slots[slot_of(edges, slots, state, token)] = edge


@njit_exact(void(_TABLE, _LINE, int64))
def hash_edges(edges: Table, slots: Table, num_edges: int) -> None:
    """Fill an empty hash table with all edges."""
    for edge in range(num_edges):
        slots[slot_of(edges, slots, edges[FROM, edge], edges[TOKEN, edge])] = edge


@njit_exact(void(_TABLE, int64, int64))
def count_up(states: Table, state: int, by: int) -> None:
    """Count an occurrence of a text's end, and of its suffixes."""
    for _ in range(MAX_LINKS):
        if state == ROOT:
            break
        states[COUNT, state] = max(0, states[COUNT, state] + by)
        state = states[LINK, state]


@njit_exact(int64(_TABLE, _IDS, int64, int64, int64))
def add_state(states: Table, used: Ints, length: int, link: int, count: int) -> int:
    """Add a state without edges, and return it."""
    state = int(used[STATES])
    if state >= states.shape[1]:
        raise IndexError
    used[STATES] = state + 1
    states[LINK, state], states[LENGTH, state], states[COUNT, state] = link, length, count
    states[FIRST, state] = -1
    return state


@njit_exact(int64(_TABLE, _TABLE, _LINE, _IDS, int64, int64, int64))
def split(
    states: Table, edges: Table, slots: Table, used: Ints, state: int, token: int, other: int
) -> int:
    """Give the shorter substrings of ``other`` that end in ``token`` a state of their own."""
    shorter = add_state(
        states, used, states[LENGTH, state] + 1, states[LINK, other], states[COUNT, other]
    )
    edge = states[FIRST, other]
    while edge >= 0:
        add_edge(states, edges, slots, used, shorter, edges[TOKEN, edge], edges[TO, edge])
        edge = edges[NEXT, edge]
    states[LINK, other] = shorter
    while state != -1:
        edge = slots[slot_of(edges, slots, state, token)]
        if edge < 0 or edges[TO, edge] != other:
            break
        edges[TO, edge] = shorter
        state = states[LINK, state]
    return shorter


@njit_exact(int64(_TABLE, _TABLE, _LINE, _IDS, int64, _IDS))
def append(states: Table, edges: Table, slots: Table, used: Ints, last: int, tokens: Ints) -> int:
    """Extend the text whose whole is state ``last`` by tokens that there is room for; return the new whole."""
    for token in tokens:
        known = follow(edges, slots, last, token)
        if known >= 0:
            is_exact = states[LENGTH, known] == states[LENGTH, last] + 1
            whole = known if is_exact else split(states, edges, slots, used, last, token, known)
        else:
            whole = add_state(states, used, states[LENGTH, last] + 1, ROOT, 0)
            state, other = last, -1
            while state != -1:
                other = follow(edges, slots, state, token)
                if other >= 0:
                    break
                add_edge(states, edges, slots, used, state, token, whole)
                state = states[LINK, state]
            if state != -1:
                is_exact = states[LENGTH, other] == states[LENGTH, state] + 1
                if not is_exact:
                    other = split(states, edges, slots, used, state, token, other)
                states[LINK, whole] = other
        count_up(states, whole, 1)
        last = whole
    return last


@njit_exact(void(_TABLE, _TABLE, _LINE, _IDS))
def remove(states: Table, edges: Table, slots: Table, tokens: Ints) -> None:
    """Take back the counts of a text that was appended from the root; states stay."""
    state = ROOT
    for token in tokens:
        state = follow(edges, slots, state, token)
        count_up(states, state, -1)


@njit_exact(_PLACE(_TABLE, _TABLE, _LINE, int64, int64, _IDS))
def advance(
    states: Table, edges: Table, slots: Table, state: int, matched: int, tokens: Ints
) -> tuple[int, int]:
    """Return the longest known suffix after more tokens, as state and length, 0 for none.

    Later appends may have split the state of a match: it is the shorter part's then.
    """
    while state != ROOT and matched <= states[LENGTH, states[LINK, state]]:
        state = states[LINK, state]
    for token in tokens:
        while True:
            behind = follow(edges, slots, state, token)
            if behind >= 0 and states[COUNT, behind] > 0:
                state, matched = behind, matched + 1
                break
            if state == ROOT:
                matched = 0
                break
            state = states[LINK, state]
            matched = states[LENGTH, state]
    return state, matched


@njit_exact(int64(_TABLE, _TABLE, int64))
def likeliest(states: Table, edges: Table, state: int) -> int:
    """Return the edge of the most frequent next token, ties by lower id; -1 at an end."""
    best, greatest = -1, 0
    edge = states[FIRST, state]
    while edge >= 0:
        count = states[COUNT, edges[TO, edge]]
        is_tie = count == greatest and best >= 0 and edges[TOKEN, edge] < edges[TOKEN, best]
        if count > greatest or is_tie:
            best, greatest = edge, count
        edge = edges[NEXT, edge]
    return best


@njit_exact(_CHAIN(_TABLE, _TABLE, int64, int64, int64, float64, _IDS))
def likeliest_chain(
    states: Table, edges: Table, at: int, total: int, length: int, min_prob: float, chain: Ints
) -> tuple[int, float]:
    """Write the likeliest continuation of a state, token by token.

    Args:
        states: [4, S].
        edges: [4, E].
        at: the state.
        total: its occurrences that something may follow.
        length: tokens at most.
        min_prob: the chain ends where the product of its tokens' shares falls below.
        chain: [L] int64 overwritten, L at least ``length``.

    Returns:
        Tokens written, and the sum of their estimated probabilities.
    """
    num, score, prob = 0, 0.0, 1.0
    while num < length and total > 0:
        edge = likeliest(states, edges, at)
        if edge < 0:
            break
        at = edges[TO, edge]
        count = states[COUNT, at]
        prob *= min(count / total, 1.0)
        if prob < min_prob:
            break
        chain[num] = edges[TOKEN, edge]
        num += 1
        score += prob
        total = count
    return num, score


@njit_exact(_FOUND(_TABLE, _TABLE, _LINE, int64, int64, _IDS, boolean, int64, float64, float64))
def continue_text(
    states: Table,
    edges: Table,
    slots: Table,
    state: int,
    matched: int,
    drafted: Ints,
    is_own_end: bool,
    length: int,
    factor: float,
    min_prob: float,
) -> tuple[Ints, float, int, int, int]:
    """Find the best-scored of the likeliest continuations of a match and of its suffixes.

    Args:
        states: [4, S].
        edges: [4, E].
        slots: [2^k].
        state: of the longest match.
        matched: its tokens.
        drafted: [n] int64, tokens behind the match.
        is_own_end: one occurrence of every match is the context's own end, which nothing follows.
        length: tokens at most.
        factor: tokens proposed per matched one.
        min_prob: the chain ends where the product of its tokens' shares falls below.

    Returns:
        The continuation's tokens, [m] int64, and its score; matched tokens, their state and its occurrences.
    """
    state, matched = advance(states, edges, slots, state, matched, drafted)
    best, chain = np.empty(length, np.int64), np.empty(length, np.int64)
    num_best, best_score = 0, 0.0
    best_matched = best_state = best_total = 0
    for _ in range(MAX_CANDIDATES):
        if state == ROOT or matched == 0:
            break
        budget = min(length, int(factor * matched + 1e-6))
        total = states[COUNT, state] - int(is_own_end)
        num, score = likeliest_chain(states, edges, state, total, budget, min_prob, chain)
        if score > best_score:
            best, chain = chain, best
            num_best, best_score = num, score
            best_matched, best_state, best_total = matched, state, total
        state = states[LINK, state]
        matched = states[LENGTH, state]
    return best[:num_best], best_score, best_matched, best_state, best_total
