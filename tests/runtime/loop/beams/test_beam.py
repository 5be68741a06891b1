"""Beam search: that of an independent implementation; small laws, many of them tied."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from outrider.engines.sampling.base import Continuations
from outrider.runtime.loop.beams.beam import (
    BeamRules,
    BeamState,
    Hypothesis,
    advance,
    ranked,
)

from tests.runtime.oracle.laws import random_row_of

END = 2
DYADIC = np.array([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])


def tied_row_of(seed):
    """Probabilities of 1/2 and 1/4, some 0: sums are exact, so that many are equal."""

    def row_of(prefix):
        return DYADIC[np.random.default_rng([seed, len(prefix), *prefix]).integers(len(DYADIC))]

    return row_of


def log_of(row_of):
    def log_row(prefix):
        with np.errstate(divide="ignore"):
            return np.log2(row_of(prefix))

    return log_row


LAWS = {
    "random": lambda seed: log_of(random_row_of(seed, 3)),
    "zeros": lambda seed: log_of(random_row_of(seed, 3, num_zeros=1)),
    "tied": lambda seed: log_of(tied_row_of(seed)),
}
GRID = [
    BeamRules(
        num_beams=num_beams,
        max_tokens=5,
        end_tokens=frozenset(ends),
        length_penalty=penalty,
        stops_early=stopping == "early",
        is_exhaustive=stopping == "never",
    )
    for num_beams, ends, penalty, stopping in product(
        (1, 2, 3), ((), (END,), (1, END)), (0.0, 1.0, -0.5, 2.0), ("early", "by bound", "never")
    )
]


def plain(row_of, rules):
    """Finished (tokens, sum), best first: written apart from the module under test, by full sorts of full lists."""
    width, live, done = rules.num_beams, [((), 0.0)], []
    for length in range(1, rules.max_tokens + 1):
        rows = [row_of(tokens) for tokens, _ in live]
        order = sorted(
            (-(total + float(row[token])), rank, token)
            for rank, ((_, total), row) in enumerate(zip(live, rows, strict=True))
            for token in range(len(row))
            if row[token] > -np.inf
        )
        found = [((*live[rank][0], token), -loss) for loss, rank, token in order]
        done += [one for one in found[:width] if one[0][-1] in rules.end_tokens]
        live = [one for one in found if one[0][-1] not in rules.end_tokens][:width]
        if length == rules.max_tokens:
            done += live
        done.sort(key=lambda one: -one[1] / len(one[0]) ** rules.length_penalty)
        del done[width:]
        if not live:
            break
        if len(done) == width:
            tokens, total = done[-1]
            worst = total / len(tokens) ** rules.length_penalty
            lengths = range(length + 1, rules.max_tokens + 1)
            lengths = lengths if rules.is_exhaustive else [length]
            hopes = [live[0][1] / n**rules.length_penalty for n in lengths]
            if rules.stops_early or all(hope <= worst for hope in hopes):
                break
    return done


def every(row):
    """A whole row [V] of log-probabilities as continuations, those that cannot follow included."""
    return Continuations(tokens=np.arange(len(row)), log_probs=np.asarray(row, dtype=np.float64))


def likeliest(row, count):
    """The ``count`` likeliest of a row, of equals the lower tokens."""
    ids = np.argsort(-row, kind="stable")[:count]
    return Continuations(tokens=ids, log_probs=row[ids])


def searched(row_of, rules):
    """The finished hypotheses."""
    state = BeamState()
    while not state.is_over:
        rows = [likeliest(row_of(one.tokens), rules.row_size) for one in state.live]
        state = advance(state, rows, rules)
    return [(one.tokens, one.log_prob) for one in state.finished]


@pytest.mark.parametrize("params", LAWS)
@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_independent_ones(params, seed):
    row_of = LAWS[params](seed)
    for rules in GRID:
        assert searched(row_of, rules) == plain(row_of, rules), rules


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_answers(seed):
    row_of = LAWS["random"](seed)
    for penalty in (0.0, 1.0, 2.0):
        rules = BeamRules(
            num_beams=81,
            max_tokens=4,
            end_tokens=frozenset({END}),
            length_penalty=penalty,
            is_exhaustive=True,
        )
        found = searched(row_of, rules)
        answers = {}
        for tokens in product(range(3), repeat=4):
            length = tokens.index(END) + 1 if END in tokens else 4
            answer = tokens[:length]
            total = sum(row_of(answer[:i])[token] for i, token in enumerate(answer))
            answers[answer] = total / length**penalty
        assert found[0][0] == max(answers, key=answers.get)


def greedy(row_of, max_tokens):
    tokens = ()
    while len(tokens) < max_tokens and END not in tokens:
        tokens = (*tokens, int(np.argmax(row_of(tokens))))
    return tokens


@pytest.mark.parametrize("params", LAWS)
def test_one_beam_that_stops_early_is_greedy_decoding(params):  # T34
    row_of = LAWS[params](3)
    rules = BeamRules(num_beams=1, max_tokens=6, end_tokens=frozenset({END}), stops_early=True)
    assert searched(row_of, rules)[0][0] == greedy(row_of, 6)


def test_of_equal_sums_the_higher_hypothesis_and_then_the_lower_token_ranks_first():  # T34
    live = [Hypothesis((7,), -1.0), Hypothesis((8,), -1.0)]
    row = np.array([-1.0, -0.5, -0.5])
    best = [one.tokens for one in ranked(live, [every(row), every(row)], 5)]
    assert best == [(7, 1), (7, 2), (8, 1), (8, 2), (7, 0)]


def test_an_end_below_the_beams_is_not_finished():
    """Rank 3 of 2 beams: its sum is dropped, whatever its score would be, and the search goes on with rank 4."""
    state = BeamState(live=(Hypothesis((0,), -1.0), Hypothesis((1,), -2.0)))
    rows = [every([-0.2, -5.0, -0.1]), every([-3.0, -3.5, -0.5])]
    rules = BeamRules(num_beams=2, max_tokens=9, end_tokens=frozenset({END}))
    after = advance(state, rows, rules)
    assert [one.tokens for one in after.live] == [(0, 0), (1, 0)]
    assert [one.tokens for one in after.finished] == [(0, END)]


def test_where_short_answers_score_higher_the_next_token_may_still_win():
    state = BeamState(live=(Hypothesis((1,), -1.1),), finished=(Hypothesis((0, END), -2.0),))
    rules = BeamRules(
        num_beams=1,
        max_tokens=9,
        end_tokens=frozenset({END}),
        length_penalty=-1.0,
        is_exhaustive=True,
    )
    going_on = [every([-0.1, -np.inf, -np.inf])]  # -1.2 times 3 tokens at best, against -4
    assert not advance(state, going_on, rules).is_over


def test_a_finished_hypothesis_is_beaten_only_by_more():
    done = Hypothesis((0, END), -2.0)
    state = BeamState(live=(Hypothesis((1, 1), -2.9),), finished=(done,))
    rules = BeamRules(num_beams=1, max_tokens=3, end_tokens=frozenset({END}), is_exhaustive=True)
    rows = [every([-np.inf, -np.inf, -0.1])]  # -3 over 3 tokens: -1, as -2 over 2
    after = advance(state, rows, rules)
    assert after.is_over
    assert after.finished == (done,)


def test_a_settled_search_takes_no_further_pass():
    """A live sum of -3 can at best stay so, -1 per token at 3 tokens: no more than -2 over 2."""
    state = BeamState(live=(Hypothesis((1,), -2.9),), finished=(Hypothesis((0, END), -2.0),))
    rules = BeamRules(num_beams=1, max_tokens=3, end_tokens=frozenset({END}), is_exhaustive=True)
    assert advance(state, [every([-0.1, -np.inf, -np.inf])], rules).is_over


def test_a_search_that_is_not_exhaustive_looks_at_the_present_length_only():
    """-2.4 over 2 is worse than -2 over 2, though at 9 tokens it could be better than anything."""
    state = BeamState(live=(Hypothesis((1,), -2.3),), finished=(Hypothesis((0, END), -2.0),))
    rows = [every([-0.1, -np.inf, -np.inf])]
    rules = BeamRules(num_beams=1, max_tokens=9, end_tokens=frozenset({END}))
    assert advance(state, rows, rules).is_over
    assert not advance(state, rows, replace(rules, is_exhaustive=True)).is_over


def test_what_cannot_be_continued_is_over():
    rules = BeamRules(num_beams=2, max_tokens=4)
    after = advance(BeamState(), [every(np.full(3, -np.inf))], rules)
    assert after.is_over
    assert after.finished == ()


@pytest.mark.parametrize("params", LAWS)
def test_forced_tokens_count_in_the_length_as_if_they_were_drawn(params):
    """Of a law that draws two tokens surely first, the search finds what one that is told of them finds behind them."""
    row_of, sure = LAWS[params](2), np.array([0.0, -np.inf, -np.inf])

    def forced_row_of(prefix):
        return sure if len(prefix) < 2 else row_of(prefix[2:])

    for rules in GRID:
        longer = replace(rules, max_tokens=rules.max_tokens + 2)
        expected = [(tokens[2:], total) for tokens, total in plain(forced_row_of, longer)]
        told = replace(rules, num_forced=2)
        assert searched(row_of, told) == expected, rules
