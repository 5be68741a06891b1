"""The suite of trees: every engine that takes them passes it, beside ``EngineContract``."""

from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines.base import Engine, EngineError, FloatArray, Span
from outrider.engines.trees import chain_length, path_to

from tests.engines.contract import EngineContract, extend_one, make_tokens, span, wanted_logits

# Leading chain 0-1-2-3, two phrases behind 2, a sibling of 1 with a child, a leaf deep in a phrase.
PARENTS = (0, 1, 2, 2, 4, 0, 6, 5)
NUM_NODES = len(PARENTS) + 1
LEAVES = (3, 7, 8)


def tree(
    slot: int,
    start: int,
    tokens: Sequence[int],
    parents: Sequence[int] = PARENTS,
    num_logits: int | None = None,
) -> Span:
    """A tree that wants all its logits unless told otherwise."""
    wanted = len(tokens) if num_logits is None else num_logits
    return Span(
        slot=slot, start=start, tokens=tuple(tokens), num_logits=wanted, parents=tuple(parents)
    )


def random_parents(rng: np.random.Generator, num_nodes: int) -> tuple[int, ...]:
    return tuple(int(rng.integers(0, index + 1)) for index in range(num_nodes - 1))


class TreeContract(EngineContract):
    """Tests of one backend, whose engines take trees of at least 9 tokens.

    ``branch_atol`` is the tolerance for tokens off the leading chain, whose keys lie elsewhere in
    the cache than a chain's would; tokens of the leading chain are held to ``atol``.
    """

    branch_atol = 0.0

    def assert_branch_same(self, found: FloatArray, expected: FloatArray) -> None:
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=self.branch_atol)

    def chain_logits(self, engine: Engine, text: Sequence[int], chain: Sequence[int]) -> FloatArray:
        """Logits [len(chain), V] of a chain behind a text, fed alone to slot 2."""
        self.from_scratch(engine, tuple(text))
        return extend_one(engine, 2, len(text), chain)

    def assert_tree_of_chains(
        self,
        engine: Engine,
        found: FloatArray,
        text: Sequence[int],
        tokens: Sequence[int],
        parents: tuple[int, ...],
    ) -> None:
        """Every token's row [V] is that of the chain from the root to it."""
        leading = chain_length(parents)
        for node in range(len(tokens)):
            path = path_to(node, parents)
            alone = self.chain_logits(engine, text, [tokens[index] for index in path])[-1]
            check = self.assert_same if node < leading else self.assert_branch_same
            check(found[node], alone)

    def test_tree_logits_are_those_of_chains_fed_alone(self, engine: Engine) -> None:
        text, tokens = make_tokens(engine, 5, seed=40), make_tokens(engine, NUM_NODES, seed=41)
        extend_one(engine, 0, 0, text)
        found = wanted_logits(engine, [tree(0, 5, tokens)])[0]
        self.assert_tree_of_chains(engine, found, text, tokens, PARENTS)

    def test_a_tree_may_stand_in_an_empty_slot(self, engine: Engine) -> None:
        tokens = make_tokens(engine, NUM_NODES, seed=42)
        found = wanted_logits(engine, [tree(0, 0, tokens)])[0]
        for node in range(NUM_NODES):
            chain = [tokens[index] for index in path_to(node, PARENTS)]
            self.assert_branch_same(found[node], extend_one(engine, 2, 0, chain)[-1])

    def test_a_tree_that_is_a_chain_has_the_bits_of_a_chain(self, engine: Engine) -> None:
        text, tokens = make_tokens(engine, 3, seed=43), make_tokens(engine, 6, seed=44)
        extend_one(engine, 0, 0, text)
        found = wanted_logits(engine, [tree(0, 3, tokens, range(5))])[0]
        self.assert_same(found, self.chain_logits(engine, text, tokens))
        tail = make_tokens(engine, 2, seed=45)
        after = extend_one(engine, 0, 9, tail)
        self.assert_same(after, self.chain_logits(engine, text + tokens, tail))

    @pytest.mark.parametrize("leaf", LEAVES)
    def test_a_kept_path_goes_on_like_the_chain_it_spells(self, engine: Engine, leaf: int) -> None:
        text, tokens = make_tokens(engine, 5, seed=46), make_tokens(engine, NUM_NODES, seed=47)
        tail = make_tokens(engine, 4, seed=48)
        extend_one(engine, 0, 0, text)
        path = path_to(leaf, PARENTS)
        for length in range(1, len(path) + 1):
            wanted_logits(engine, [tree(0, 5, tokens)])
            engine.keep_path(0, path[:length])
            kept = [tokens[index] for index in path[:length]]
            found = extend_one(engine, 0, 5 + length, tail)
            expected = self.chain_logits(engine, [*text, *kept], tail)
            is_leading = path[length - 1] < chain_length(PARENTS)
            (self.assert_same if is_leading else self.assert_branch_same)(found, expected)

    def test_a_tree_is_forgotten_by_going_on_before_it(self, engine: Engine) -> None:
        text, tail = make_tokens(engine, 5, seed=49), make_tokens(engine, 3, seed=50)
        expected = self.chain_logits(engine, text, tail)
        extend_one(engine, 0, 0, text)
        wanted_logits(engine, [tree(0, 5, make_tokens(engine, NUM_NODES, seed=51))])
        self.assert_same(extend_one(engine, 0, 5, tail), expected)

    def test_without_keep_path_a_slot_holds_the_leading_chain(self, engine: Engine) -> None:
        text, tokens = make_tokens(engine, 5, seed=52), make_tokens(engine, NUM_NODES, seed=53)
        tail = make_tokens(engine, 2, seed=54)
        extend_one(engine, 0, 0, text)
        wanted_logits(engine, [tree(0, 5, tokens)])
        with pytest.raises(EngineError, match="beyond its 9 valid tokens"):
            engine.extend([span(0, 10, tail)])
        expected = self.chain_logits(engine, text + tokens[:4], tail)
        self.assert_same(extend_one(engine, 0, 9, tail), expected)

    def test_rows_of_a_batch_are_chains_trees_or_nothing(self, engine: Engine) -> None:
        texts = [make_tokens(engine, count, seed=55 + count) for count in (4, 7, 2)]
        tails = [make_tokens(engine, count, seed=60 + count) for count in (NUM_NODES, 3, 2)]
        alone = []
        for text, tail in zip(texts, tails, strict=True):
            extend_one(engine, 2, 0, text)
            is_tree = len(tail) == NUM_NODES
            rows = [tree(2, len(text), tail) if is_tree else span(2, len(text), tail)]
            alone.append(wanted_logits(engine, rows)[0])
        wanted_logits(engine, [span(row, 0, text, 0) for row, text in enumerate(texts)])
        mixed = [tree(0, 4, tails[0]), span(1, 7, tails[1]), span(2, 2)]
        together = wanted_logits(engine, mixed)
        self.assert_same(together[0], alone[0])
        self.assert_same(together[1], alone[1])
        self.assert_same(extend_one(engine, 2, 2, tails[2]), alone[2])

    def test_only_descendants_see_a_token(self, engine: Engine) -> None:
        text, tokens = make_tokens(engine, 4, seed=70), make_tokens(engine, NUM_NODES, seed=71)
        extend_one(engine, 0, 0, text)
        before = wanted_logits(engine, [tree(0, 4, tokens)])[0]
        for changed in range(NUM_NODES):
            other = list(tokens)
            other[changed] = (tokens[changed] + 1) % engine.limits.vocab_size
            after = wanted_logits(engine, [tree(0, 4, other)])[0]
            for node in range(NUM_NODES):
                if changed in path_to(node, PARENTS):
                    assert np.abs(after[node] - before[node]).max() > 1e-4
                else:
                    self.assert_same(after[node], before[node])

    def test_siblings_with_one_token_have_one_row(self, engine: Engine) -> None:
        text = make_tokens(engine, 4, seed=72)
        extend_one(engine, 0, 0, text)
        found = wanted_logits(engine, [tree(0, 4, (3, 5, 5, 6, 6), (0, 0, 1, 2))])[0]
        self.assert_branch_same(found[2], found[1])
        self.assert_branch_same(found[4], found[3])

    def test_the_last_logits_of_a_tree_may_be_wanted_alone(self, engine: Engine) -> None:
        tokens = make_tokens(engine, NUM_NODES, seed=73)
        whole = wanted_logits(engine, [tree(0, 0, tokens)])[0]
        found = wanted_logits(engine, [tree(0, 0, tokens, num_logits=3)])[0]
        self.assert_same(found, whole[-3:])

    def test_keeping_a_path_leaves_other_slots_alone(self, engine: Engine) -> None:
        texts = [make_tokens(engine, 6, seed=74 + slot) for slot in range(3)]
        tail = make_tokens(engine, 3, seed=77)
        wanted_logits(engine, [span(slot, 0, text, 0) for slot, text in enumerate(texts)])
        expected = [extend_one(engine, slot, 6, tail) for slot in (0, 2)]
        wanted_logits(engine, [tree(1, 6, make_tokens(engine, NUM_NODES, seed=78))])
        engine.keep_path(1, path_to(8, PARENTS))
        for slot, logits in zip((0, 2), expected, strict=True):
            self.assert_same(extend_one(engine, slot, 6, tail), logits)

    def test_an_impossible_path_is_refused_and_changes_nothing(self, engine: Engine) -> None:
        tokens = make_tokens(engine, NUM_NODES, seed=79)
        wanted_logits(engine, [tree(0, 0, tokens), span(1, 0, tokens)])
        for path, message in (
            ((), "slot 0: path: must begin at the root"),
            ((1,), "slot 0: path: must begin at the root"),
            ((0, 2), "slot 0: path: token 2 is no child of token 0"),
            ((0, 99), "slot 0: path: token 99 is no child"),
        ):
            with pytest.raises(EngineError, match=message):
                engine.keep_path(0, path)
        engine.keep_path(0, (0, 6, 7))
        for slot in (0, 1, 99):
            with pytest.raises(EngineError, match=f"slot {slot}: its last span was no tree"):
                engine.keep_path(slot, (0,))
        tail = make_tokens(engine, 2, seed=80)
        expected = self.chain_logits(engine, [tokens[node] for node in (0, 6, 7)], tail)
        self.assert_branch_same(extend_one(engine, 0, 3, tail), expected)

    def test_a_moved_slot_has_no_tree_left(self, engine: Engine) -> None:
        tokens = make_tokens(engine, NUM_NODES, seed=81)
        wanted_logits(engine, [tree(0, 0, tokens), span(1, 0, tokens)])
        engine.move_slot(1, 0, 9)
        with pytest.raises(EngineError, match="was no tree"):
            engine.keep_path(0, (0, 1))

    def broken_spans(self, engine: Engine) -> list[tuple[list[Span], str]]:
        limits = engine.limits
        most = limits.max_tree_nodes
        return [
            *super().broken_spans(engine),
            ([tree(0, 3, (1, 2), (0, 0))], "2 parents for 2 tokens"),
            ([tree(0, 3, (), ())], "0 parents for 0 tokens"),
            ([tree(0, 3, (1, 2), (1,))], "the parent of token 1"),
            ([tree(0, 3, (1, 2), (-1,))], "the parent of token 1"),
            ([tree(0, 3, (1,) * (most + 1), range(most), 0)], "max_extend|max_tree_nodes"),
            ([tree(0, 4, (1, 2), (0,))], "beyond its 3 valid tokens"),
            ([tree(0, 3, (1, limits.vocab_size), (0,))], "token id"),
        ]

    def test_a_tree_fills_a_slot_by_its_depth(self, engine: Engine) -> None:
        limits = engine.limits
        tokens = make_tokens(engine, limits.max_context - 2, seed=82)
        for begin in range(0, len(tokens), limits.max_extend):
            extend_one(engine, 0, begin, tokens[begin : begin + limits.max_extend])
        nodes = make_tokens(engine, 6, seed=83)
        wide = wanted_logits(engine, [tree(0, len(tokens), nodes, (0,) * 5)])[0]
        engine.keep_path(0, (0, 5))
        with pytest.raises(EngineError, match="limit max_context"):
            engine.extend([tree(0, len(tokens), nodes, (0, 1, 0, 0, 0))])
        chain = extend_one(engine, 0, len(tokens), (nodes[0], nodes[5]))
        self.assert_same(wide[0], chain[0])
        self.assert_branch_same(wide[5], chain[1])

    def test_a_random_trace_with_trees_equals_extends_from_scratch(self, engine: Engine) -> None:
        rng = np.random.default_rng(84)
        held: list[tuple[int, ...]] = [(), ()]
        for _ in range(14):
            spans = []
            for slot in (0, 1):
                start = int(rng.integers(max(0, len(held[slot]) - 2), len(held[slot]) + 1))
                room = min(9, 32 - start)
                tokens = make_tokens(engine, int(rng.integers(0, room + 1)), int(rng.integers(1e9)))
                held[slot] = held[slot][:start]
                if tokens and rng.random() < 0.7:
                    spans.append(tree(slot, start, tokens, random_parents(rng, len(tokens))))
                else:
                    spans.append(span(slot, start, tokens))
            found = wanted_logits(engine, spans)
            for slot, one in enumerate(spans):
                if one.parents is None:
                    path = tuple(range(len(one.tokens)))
                else:
                    path = path_to(int(rng.integers(0, len(one.tokens))), one.parents)
                    engine.keep_path(slot, path)
                held[slot] += tuple(one.tokens[node] for node in path)
                expected = self.from_scratch(engine, held[slot])[len(held[slot]) - len(path) :]
                self.assert_branch_same(found[slot][list(path)], expected)
