"""The loops of a suffix automaton (``runtime.drafters.text.automaton``), compiled.

In Python a token costs ten microseconds and more right behind a model's pass, which has pushed everything out of the
processor's caches. One file, because the functions call each other (``engines.jit``).

States and edges are columns of tables; a state's edges are a linked list, and an open hash table finds the edge of a
state and a token. Shapes: ``states`` [4, S] int32, ``edges`` [4, E] int32, ``slots`` [2^k] int32 at most half full, -1
where empty, ``used`` [HEADER] int64: states and edges in use, and where the tables are; ``texts`` [P, 8] int64, where
requests stand in their own automaton and in their scope's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, carray, float64, int32, int64, types, void
from outrider.engines.jit import njit_exact, pointer

Table = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROOT = 0
# Rows of ``states``: state of the longest suffix that ends elsewhere too, -1 of the root; tokens of the longest
# substring; occurrences; first of its edges, -1 for none.
LINK, LENGTH, COUNT, FIRST = range(4)
# Rows of ``edges``.
FROM, TOKEN, TO, NEXT = range(4)
# Entries of ``used``: how many states and edges, the tables' addresses, tokens there are and there is room for, and
# how often all was forgotten.
STATES, EDGES, STATES_AT, EDGES_AT, SLOTS_AT, NUM_SLOTS, TOKENS, ROOM, CLEARED = range(9)
HEADER = 9
# Columns of ``texts``: addresses of ``used`` of both automata and of the tokens, how many of these were seen, their
# state in the own automaton; in the scope's the match's state and tokens, and ``CLEARED`` when it was found.
OWN, SHARED, TOKENS_AT, SEEN, WHOLE, PLACE, REACHED, FOUND_IN = range(8)
ASKED = 3
"""Numbers that ask for a text: its row of ``texts``, how many tokens are known, and how many are wanted."""
# Entries of ``figures``.
SCORE, MATCHED, STATE, TOTAL = range(4)

STATES_PER_TOKEN, EDGES_PER_TOKEN = 2, 3
REMATCH = 64
"""Tokens followed again through a scope's automaton that was cleared."""

MAX_LINKS = 64
"""Suffix links followed to keep counts; in highly repetitive text shorter substrings are counted
low, which only makes drafts shorter."""
MAX_CANDIDATES = 6
"""Match lengths tried, longest first."""

_TABLE, _LINE = int32[:, ::1], int32[::1]
_IDS, _NUMBERS = int64[::1], float64[::1]
_PLACE = types.UniTuple(int64, 2)
_ROWS, _TABLES = int64[:, ::1], types.Tuple((_TABLE, _TABLE, _LINE))


@njit_exact(int64(_TABLE, _LINE, int64, int64))
def slot_of(edges: Table, slots: Table, state: int, token: int) -> int:
    """Where the hash table has the edge of a state and a token, or would have it."""
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
    """The state behind a state's token; -1 where nothing goes on so."""
    edge = slots[slot_of(edges, slots, state, token)]
    return int(edges[TO, edge]) if edge >= 0 else -1


@njit_exact(void(_TABLE, _TABLE, _LINE, _IDS, int64, int64, int64))
def add_edge(
    states: Table, edges: Table, slots: Table, used: Ints, state: int, token: int, to: int
) -> None:
    """Let a state go on by a token that it did not know."""
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
    """A state without edges."""
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
    """Extend the text whose whole is state ``last`` by tokens that there is room for; the new whole."""
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
    """The longest known suffix after more tokens, as state and length, 0 for none.

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
    """Edge of the most frequent next token, ties by lower id; -1 at an end."""
    best, greatest = -1, 0
    edge = states[FIRST, state]
    while edge >= 0:
        count = states[COUNT, edges[TO, edge]]
        is_tie = count == greatest and best >= 0 and edges[TOKEN, edge] < edges[TOKEN, best]
        if count > greatest or is_tie:
            best, greatest = edge, count
        edge = edges[NEXT, edge]
    return best


@njit_exact(int64(_TABLE, _TABLE, int64, int64, float64, int64, float64, boolean, _ROWS, _NUMBERS))
def continue_text(
    states: Table,
    edges: Table,
    state: int,
    matched: int,
    factor: float,
    length: int,
    min_prob: float,
    is_own_end: bool,
    chains: Ints,
    figures: Floats,
) -> int:
    """Write the best-scored of the likeliest continuations of a match and of its suffixes; its number of tokens.

    Args:
        states: [4, S].
        edges: [4, E].
        state: of the longest match.
        matched: its tokens.
        factor: tokens proposed per matched one.
        length: tokens at most.
        min_prob: the chain ends where the product of its tokens' shares falls below.
        is_own_end: whether one occurrence of every match is the context's own end, which nothing follows.
        chains: [2, L] overwritten, L at least ``length``; the first row holds the tokens.
        figures: [4] overwritten; score, matched tokens, state behind the match, its occurrences.
    """
    figures[:] = 0.0
    num_best = 0
    for _ in range(MAX_CANDIDATES):
        if state == ROOT or matched == 0:
            break
        budget = min(length, int(factor * matched + 1e-6))
        total = states[COUNT, state] - int(is_own_end)
        first_total, at, num = total, state, 0
        score, prob = 0.0, 1.0
        while num < budget and total > 0:
            edge = likeliest(states, edges, at)
            if edge < 0:
                break
            at = edges[TO, edge]
            count = states[COUNT, at]
            prob *= min(count / total, 1.0)
            if prob < min_prob:
                break
            chains[1, num] = edges[TOKEN, edge]
            num += 1
            score += prob
            total = count
        if score > figures[SCORE]:
            num_best = num
            chains[0, :num] = chains[1, :num]
            figures[SCORE], figures[MATCHED] = score, matched
            figures[STATE], figures[TOTAL] = state, first_total
        state = states[LINK, state]
        matched = states[LENGTH, state]
    return num_best


@njit_exact(_TABLES(_IDS))
def tables(used: Ints) -> tuple[Table, Table, Table]:
    """States, edges and slots of an automaton."""
    num_states, num_edges = STATES_PER_TOKEN * used[ROOM] + 1, EDGES_PER_TOKEN * used[ROOM] + 1
    return (
        carray(pointer(used[STATES_AT]), (4, num_states), np.int32),
        carray(pointer(used[EDGES_AT]), (4, num_edges), np.int32),
        carray(pointer(used[SLOTS_AT]), (used[NUM_SLOTS],), np.int32),
    )


@njit_exact(boolean(_IDS, _IDS, _IDS, _IDS))
def see(text: Ints, tokens: Ints, own: Ints, shared: Ints) -> bool:
    """Take in what is new of a text; False, and nothing done, where its own automaton has no room.

    Args:
        text: row of ``texts``.
        tokens: all that are known.
        own: ``used`` of the text's own automaton.
        shared: of its scope's.
    """
    first = text[SEEN]
    num_new = len(tokens) - first
    if num_new > 0:
        if own[TOKENS] + num_new > own[ROOM]:
            return False
        states, edges, slots = tables(own)
        text[WHOLE] = append(states, edges, slots, own, text[WHOLE], tokens[first:])
        own[TOKENS] += num_new
        text[SEEN] = len(tokens)
    if text[FOUND_IN] != shared[CLEARED]:
        text[PLACE], text[REACHED], text[FOUND_IN] = ROOT, 0, shared[CLEARED]
        first = max(0, len(tokens) - REMATCH)
    states, edges, slots = tables(shared)
    text[PLACE], text[REACHED] = advance(
        states, edges, slots, text[PLACE], text[REACHED], tokens[first:]
    )
    return True


@njit_exact(int64(_ROWS, _IDS, _IDS, float64, float64, _IDS, float64[:, :, ::1], _ROWS))
def continue_texts(
    texts: Ints,
    asked: Ints,
    drafted: Ints,
    factor: float,
    min_prob: float,
    found: Ints,
    figures: Floats,
    chains: Ints,
) -> int:
    """Write the better of the best continuations of each text's own tokens and of its scope's, see ``continue_text``.

    Args:
        texts: [P, 8]; the rows asked for are brought up to date.
        asked: [ASKED * n].
        drafted: tokens that follow what is known.
        factor: tokens proposed per matched one.
        min_prob: a chain ends where the product of its tokens' shares falls below.
        found: [n + n * L] overwritten: how many tokens of each, and then these, text after text.
        figures: [n, 2, 4] overwritten: of the own automaton and of the scope's.
        chains: [2, L] overwritten, L at least as much as anybody wants.

    Returns:
        How many texts were continued; fewer than n where the next one's own automaton has no room.
    """
    end = num_rows = len(asked) // ASKED
    for row in range(num_rows):
        place, known, wanted = asked[ASKED * row], asked[ASKED * row + 1], asked[ASKED * row + 2]
        text = texts[place]
        tokens = carray(pointer(text[TOKENS_AT]), (known,), np.int64)
        own = carray(pointer(text[OWN]), (HEADER,), np.int64)
        shared = carray(pointer(text[SHARED]), (HEADER,), np.int64)
        if not see(text, tokens, own, shared):
            return row
        for source in range(2):
            if source == 0:
                states, edges, slots = tables(own)
                state = max(states[LINK, text[WHOLE]], ROOT)
                matched = states[LENGTH, state]
            else:
                states, edges, slots = tables(shared)
                state, matched = text[PLACE], text[REACHED]
            if len(drafted) > 0:
                state, matched = advance(states, edges, slots, state, matched, drafted)
            is_own_end = source == 0 and len(drafted) == 0
            num = continue_text(
                states, edges, state, matched, factor, wanted, min_prob, is_own_end,
                chains, figures[row, source],
            )  # fmt: skip
            if source == 0 or figures[row, 1, SCORE] > figures[row, 0, SCORE]:
                found[row] = num
                found[end : end + num] = chains[0, :num]
        end += found[row]
    return num_rows
