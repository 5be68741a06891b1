"""The graph of shared exponentials: Philox 4x64 in integers, the same words as ``engines.sampling.noise``.

TensorRT has no bitwise operators, and nothing unsigned but bytes. So a word of 64 bits is four limbs
of 16 bits in int64; products are sums of limb products with carries; and exclusive-or looks pairs of
bytes up in a table of 65,536 entries.

Of the four words of a counter those at even places are multiplied, both at once: a limb is
[2, B, R, blocks]. Every round swaps the two, so the multipliers' order alternates:

    even' = high(even * multipliers) ^ swapped(odd) ^ swapped(key)        odd' = low(even * multipliers)

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox-4x64-10.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.sampling.noise import Purpose
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Graph, Value

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LIMB = 1 << 16
_NUM_LIMBS = names.SEED_LIMBS
_BYTE = 1 << 8
_WORDS_PER_BLOCK = 8  # of 32 bits
_LEAST_ABOVE_MINUS_ONE = float(np.float32(2.0**-24 - 1.0))
# Down to here eight terms of log1p's series are exact to float32; below, log(1 + x) is to 1e-6.
_SERIES_LIMIT = -0.1
_SERIES_LENGTH = 8

Word = list[Value]  # limbs, lowest first


def noise_graph(*, vocab_size: int) -> onnx.ModelProto:
    """Return the graph of race exponentials at given positions of given seeds, one per token."""
    graph = Graph("noise")
    seeds = graph.input(names.SEEDS, INT64, ["batch", _NUM_LIMBS])
    positions = graph.input(names.POSITIONS, INT64, ["batch", "positions"]).unsqueeze(2)
    num_blocks = -(-vocab_size // _WORDS_PER_BLOCK)
    # Numpy's generator counts up before it draws.
    blocks = graph.ids(num_blocks).unsqueeze(0).unsqueeze(0) + 1
    zero = (positions + blocks) * 0  # [B, R, blocks]
    even = [_pair(limb, zero) for limb in _split(zero + blocks)]
    odd = [_pair(limb, zero) for limb in _split(zero + positions)]
    none = seeds.slice(0, 1, 1).unsqueeze(2) * 0
    # A round reads the key swapped.
    key = [
        _pair(none + (int(Purpose.RACE) >> (16 * i)) % _LIMB, seeds.slice(i, i + 1, 1).unsqueeze(2))
        for i in range(_NUM_LIMBS)
    ]
    table = _xor_table(graph)
    multipliers, steps = _MULTIPLIERS, _WEYL[::-1]
    for _ in range(_NUM_ROUNDS):
        high, low = _product(even, multipliers)
        even = _xor(table, _xor(table, high, _swapped(odd)), key)
        odd, multipliers = low, multipliers[::-1]
        key = _swapped(_plus(key, steps))
        steps = steps[::-1]
    drawn = _in_order(even, odd, positions).slice(0, vocab_size, 2)
    graph.output(names.RACES, _exponential(drawn), ["batch", "positions", vocab_size])
    return graph.model()


def _in_order(even: Word, odd: Word, positions: Value) -> Value:
    """Return all words of 32 bits in drawing order, [B, R, 8 * blocks] int64.

    An even number of rounds leaves the words in their first order.
    """
    words = []
    for place in (0, 1):
        for word in (even, odd):
            limbs = [limb.slice(place, place + 1, 0).squeeze(0) for limb in word]
            words += [low + high * _LIMB for low, high in list(pairwise(limbs))[::2]]
    graph = positions.graph
    stacked = graph.concat([word.unsqueeze(3) for word in words], 3)
    lengths = [positions.length(0), positions.length(1), graph.constant([-1], INT64)]
    return graph.op("Reshape", stacked, graph.concat(lengths, 0))


def _exponential(words: Value) -> Value:
    """Return -log(1 - u) of u = (word + 0.5) * 2 ** -32, in float32, as in ``engines.sampling.noise``."""
    graph = words.graph
    negated = (words.cast(FLOAT) + 0.5) * -(2.0**-32)
    negated = graph.op("Max", negated, _LEAST_ABOVE_MINUS_ONE)
    # log1p(x) = x (1 - x (1/2 - x (1/3 - ...))): the least values win the race, and keep their bits.
    series = negated * 0.0 + 1.0 / _SERIES_LENGTH
    for power in range(_SERIES_LENGTH - 1, 0, -1):
        series = (negated * series) * -1.0 + 1.0 / power
    logarithm = graph.op("Log", negated + 1.0)
    return (negated > _SERIES_LIMIT).where(negated * series, logarithm) * -1.0


def _product(word: Word, multipliers: tuple[int, ...]) -> tuple[Word, Word]:
    """Return upper and lower 64 bits of both products; every sum of limb products is below 2 ** 36."""
    graph = word[0].graph
    factors = [
        graph.constant(
            np.reshape([(m >> (16 * i)) % _LIMB for m in multipliers], (2, 1, 1, 1)), INT64
        )
        for i in range(_NUM_LIMBS)
    ]
    limbs: Word = []
    carry = word[0] * 0
    for column in range(2 * _NUM_LIMBS - 1):
        for i in range(max(0, column - 3), min(column, 3) + 1):
            carry = carry + word[i] * factors[column - i]
        limbs.append(carry % _LIMB)
        carry = carry // _LIMB
    limbs.append(carry)
    return limbs[_NUM_LIMBS:], limbs[:_NUM_LIMBS]


def _plus(word: Word, numbers: tuple[int, ...]) -> Word:
    """Return sums modulo 2 ** 64."""
    graph = word[0].graph
    limbs: Word = []
    carry = word[0] * 0
    for i, limb in enumerate(word):
        step = np.reshape([(n >> (16 * i)) % _LIMB for n in numbers], (2, 1, 1, 1))
        total = limb + graph.constant(step, INT64) + carry
        limbs.append(total % _LIMB)
        carry = total // _LIMB
    return limbs


def _xor(table: Value, one: Word, other: Word) -> Word:
    """Return the exclusive-or of two words; all limbs at once."""
    graph = table.graph
    left, right = graph.concat(one, 0), graph.concat(other, 0)
    upper = (left // _BYTE) * _BYTE + right // _BYTE
    lower = (left % _BYTE) * _BYTE + right % _BYTE
    found = graph.op("Gather", table, upper, axis=0) * _BYTE + graph.op(
        "Gather", table, lower, axis=0
    )
    return [found.slice(2 * i, 2 * i + 2, 0) for i in range(_NUM_LIMBS)]


def _xor_table(graph: Graph) -> Value:
    """Return [65536] int64 whose entry 256 a + b is a ^ b; made of sums of bits, so that the file stays small."""
    numbers = graph.ids(_BYTE)
    rows, columns = numbers.unsqueeze(1), numbers.unsqueeze(0)
    table = (rows + columns) * 0
    for bit in range(8):
        total = (rows // (1 << bit)) % 2 + (columns // (1 << bit)) % 2
        table = table + (total % 2) * (1 << bit)
    return graph.op("Reshape", table, graph.constant([-1], INT64))


def _swapped(word: Word) -> Word:
    order = word[0].graph.constant([1, 0], INT64)
    return [limb.graph.op("Gather", limb, order, axis=0) for limb in word]


def _pair(first: Value, second: Value) -> Value:
    return first.graph.concat([first.unsqueeze(0), second.unsqueeze(0)], 0)


def _split(value: Value) -> Word:
    """Return the limbs of a number below 2 ** 63."""
    limbs: Word = []
    for _ in range(_NUM_LIMBS):
        limbs.append(value % _LIMB)
        value = value // _LIMB
    return limbs
