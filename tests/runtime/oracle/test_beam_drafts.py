"""Appendix A.4: whatever was drafted, the beams that live are the plain search's; small laws, many of them tied."""

from __future__ import annotations

from itertools import product

import pytest
from outrider.runtime.oracle.beam_drafts import best_beams, drafted_texts, steps_of_pass

from tests.runtime.loop.beams.test_beam import LAWS, BeamRules, BeamState, advance, every

START = [((), 0.0)]


def speculated(target_row, draft_row, *, num_beams, width, gamma, max_steps):
    """What lives in the end, and the passes of the target that it took."""
    live, num_left, num_passes = START, max_steps, 0
    while num_left:
        texts = drafted_texts(live, draft_row, width=width, gamma=gamma)
        assert len(texts) <= len(live) + width * gamma

        def row_of(tokens, texts=tuple(texts)):
            assert tokens in texts, "the pass computed no other rows"
            return target_row(tokens)

        live, num_steps = steps_of_pass(
            live, row_of, texts, num_beams=num_beams, max_steps=num_left
        )
        assert num_steps, "every pass is good for a step"
        num_left, num_passes = num_left - num_steps, num_passes + 1
    return live, num_passes


def plain(row_of, num_beams, num_steps):
    """The search that is served, without ends."""
    rules, state = BeamRules(num_beams=num_beams, max_tokens=num_steps + 1), BeamState()
    for _ in range(num_steps):
        state = advance(state, [every(row_of(one.tokens)) for one in state.live], rules)
    return [(one.tokens, one.log_prob) for one in state.live]


@pytest.mark.parametrize("params", LAWS)
@pytest.mark.parametrize("draft", ["same", "tied", "other"])
def test_a_draft_changes_nothing(params, draft):  # T34
    row_of = LAWS[params](1)
    draft_of = {"same": row_of, "tied": LAWS["tied"](9), "other": LAWS["zeros"](9)}[draft]
    for num_beams, extra, gamma, max_steps in product((1, 2, 3), (0, 2), (0, 1, 2, 6), (1, 5)):
        found, num_passes = speculated(
            row_of,
            draft_of,
            num_beams=num_beams,
            width=num_beams + extra,
            gamma=gamma,
            max_steps=max_steps,
        )
        assert found == plain(row_of, num_beams, max_steps), (num_beams, extra, gamma)
        assert num_passes <= max_steps


@pytest.mark.parametrize(("gamma", "num_passes"), [(0, 6), (1, 3), (2, 2), (5, 1), (9, 1)])
def test_a_draft_like_the_target_saves_passes(gamma, num_passes):
    row_of = LAWS["random"](2)
    found = speculated(row_of, row_of, num_beams=2, width=2, gamma=gamma, max_steps=6)
    assert found[1] == num_passes


@pytest.mark.parametrize("seed", range(4))
def test_a_second_step_is_taken_where_the_targets_best_are_among_the_drafts(seed):
    """top_w of the target within top_u of the draft."""
    target, draft = LAWS["random"](seed), LAWS["random"](seed + 9)
    taken = []
    for width in (2, 3, 4, 5):
        texts = drafted_texts(START, draft, width=width, gamma=1)
        _, num_steps = steps_of_pass(START, target, texts, num_beams=2, max_steps=9)
        wanted, drafted = best_beams(START, target, 2), best_beams(START, draft, width)
        are_among = {tokens for tokens, _ in wanted} <= {tokens for tokens, _ in drafted}
        assert num_steps == 1 + are_among
        taken.append(num_steps)
    assert taken == sorted(taken) and taken[-1] == 2
