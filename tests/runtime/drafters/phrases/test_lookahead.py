"""T40, lookahead: the window by hand, on the target and on the draft model; no window changes a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.trees import check_parents, tree_layout
from outrider.runtime.core.drafting import DraftingConfig, check_drafter_params
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.phrases.lookahead import LookaheadDrafter
from outrider.runtime.drafters.phrases.ouroboros import OuroborosDrafter
from outrider.runtime.drafters.phrases.window import LookaheadWindow

from tests.runtime.drafters.rows import outcome, row
from tests.runtime.markov import PAIRS, Harness, limits


def test_the_hand_example_of_a_window() -> None:
    """The model counts modulo 10; N = 3, W = 2, behind 5."""
    window = LookaheadWindow([[7], [6, 8]])
    tree = TreeBuilder()
    ends = window.place(tree)
    assert (tree.tokens, tree.parents) == ([7, 6, 8], [0, 0, 1])
    chosen = [(tree.tokens[node - 1] + 1) % 10 for node in ends]
    assert chosen == [7, 9]
    assert list(window.advance(5, chosen)) == [(5, (6, 7)), (7, (8, 9))]
    assert window.rows == [[8], [7, 9]]


def test_places_and_sight_of_a_wide_window() -> None:
    """R0[i] stands i + 1 behind the last token; R_r[i] stands r + i behind it and sees its own column."""
    window = LookaheadWindow([[10, 11], [20, 21, 22], [30, 31, 32]])
    tree = TreeBuilder()
    ends = window.place(tree)
    layout = tree_layout(tuple(tree.parents))
    seen = {
        tree.tokens[node - 1]: [
            tree.tokens[a - 1] for a in range(1, node) if layout.ancestors[node, a]
        ]
        for node in range(1, len(tree.tokens) + 1)
    }
    assert seen == {
        10: [], 11: [10], 20: [], 21: [10], 22: [10, 11], 30: [20], 31: [10, 21], 32: [10, 11, 22],
    }  # fmt: skip
    depths = {tree.tokens[node - 1]: int(layout.depths[node]) for node in range(1, 9)}
    assert depths == {10: 1, 11: 2, 20: 1, 21: 2, 22: 3, 30: 2, 31: 3, 32: 4}
    assert [tree.tokens[node - 1] for node in ends] == [30, 31, 32]
    assert (window.num_nodes, window.depth) == (8, 4)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 6), st.integers(2, 4))
def test_a_window_keeps_its_shape_and_finds_a_phrase_per_column(text, width, length) -> None:
    window = LookaheadWindow.from_text(text, width=width, phrase_length=length)
    for step in range(4):
        assert [len(line) for line in window.rows] == [width - 1, *[width] * (length - 1)]
        tree = TreeBuilder()
        ends = window.place(tree)
        check_parents(tree.parents)
        assert len(tree.tokens) <= window.num_nodes
        assert tree_layout(tuple(tree.parents)).depths.max() <= window.depth
        found = list(window.advance(3, [step] * width, ends=(2,)))
        assert len(found) == width == len(ends)
        assert all(len(phrase) == length and phrase[-1] == step for _, phrase in found)
    # An end token is replaced: nothing worth knowing follows it.
    assert 2 not in window.rows[-1][-1:] or length > 2


def drafter(**settings: object) -> LookaheadDrafter:
    return LookaheadDrafter(DraftingConfig(phrase_length=2, window=2, **settings), max_gamma=8)


def test_a_window_fills_the_pool_from_which_the_next_draft_comes() -> None:
    looking = drafter()
    here = replace(row([5], gamma=6), max_nodes=16)
    looking._windows["a"] = LookaheadWindow([[7], [6, 8]])
    (first,) = looking.propose([here], [0])
    assert (first.tokens, first.parents) == ((7, 6, 8), (0, 0, 1))
    # The target says 6 behind 5, and one more than each node's token behind the nodes.
    choices = [(6,), (8,), (7,), (9,)]
    told = replace(
        outcome([5, 6, 7], first.tokens, 1, choices, num_fed=1, gamma=6),
        parents=first.parents,
        path=(2,),
    )
    looking.observe([told])
    assert looking._windows["a"].rows == [[8], [7, 9]]
    (second,) = looking.propose([replace(row([5, 6, 7], gamma=6), max_nodes=16)], [0])
    assert second.tokens[:2] == (8, 9)
    looking.forget("a")
    assert not looking._windows and not looking._placed and not looking._states


def test_rows_without_trees_draft_from_the_pool_alone() -> None:
    looking = drafter()
    (found,) = looking.propose([row([1, 2, 3, 1], gamma=2)], [0])
    assert (found.tokens, found.parents) == ((2, 3), None)
    assert not looking._placed


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"drafter": "phrases", "window": 3}, "window"),
        ({"drafter": "lookahead", "window": 33}, "window"),
        ({"drafter": "ouroboros", "window": 3, "phrase_length": 1}, "window"),
        ({"drafter": "lookup", "num_phrases": 2}, "num_phrases"),
    ],
)
def test_windows_that_cannot_be_are_refused_by_name(params, field) -> None:
    with pytest.raises(RequestError) as refusal:
        check_drafter_params(SpeculationParams(**params), max_reference_bytes=9)
    assert refusal.value.field == f"speculation.{field}"


@pytest.mark.parametrize(
    "settings", [{"window": -1}, {"draft_window": 33}, {"draft_lenience": 0.0}]
)
def test_settings_out_of_range_are_refused_at_start(settings) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DraftingConfig(**settings)


def tree_pair(pair: str, **settings: object) -> Harness:
    """Both engines take trees."""
    vocab_size, target_logits, draft_logits = PAIRS[pair]
    bounds = replace(limits(vocab_size), max_tree_nodes=32, max_extend=32)
    return Harness(
        pair,
        target=ScriptedEngine(target_logits, bounds),
        draft=ScriptedEngine(draft_logits, bounds),
        drafting=DraftingConfig(trees_may_round_differently=True, **settings),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("window", [0, 1, 3, 5])
@pytest.mark.parametrize("pair", ["F3", "F4"])
@pytest.mark.parametrize("name", ["lookahead", "ouroboros"])
def test_no_window_changes_a_token(name: str, pair: str, window: int, temperature: float) -> None:
    """T28 and T29; both caches are audited after every step, the draft's side branches included (T30)."""
    harness = tree_pair(pair)
    for index, prompt in enumerate(((1, 2, 3), (3, 0), (2,))):
        for label, params in (
            ("plain", SpeculationParams(is_enabled=False)),
            (name, SpeculationParams(drafter=name, gamma=7, window=window, phrase_length=3)),
        ):
            harness.submit(
                f"{label}{index}", prompt, max_tokens=30, temperature=temperature, seed=index,
                speculation=params,
            )  # fmt: skip
            harness.worker.run_step()
    harness.run()
    for index in range(3):
        assert harness.tokens(f"{name}{index}") == harness.tokens(f"plain{index}")
        assert harness.finished(f"{name}{index}").report.off_reason is None
    harness.check_is_idle()


def num_steps(name: str, window: int) -> int:
    """Target passes of an answer that repeats nothing: what a window began with lies ahead of it."""
    harness = tree_pair("F3", harvests_rejected=False)
    params = SpeculationParams(drafter=name, gamma=6, window=window, phrase_length=3)
    harness.submit("a", (6, 4, 0), max_tokens=9, speculation=params)
    harness.run()
    assert harness.tokens("a") == list(range(1, 10))
    return harness.finished("a").report.num_steps


def test_a_window_on_the_target_drafts_where_nothing_has_been_seen_yet() -> None:
    assert num_steps("lookahead", 0) > num_steps("lookahead", 4)


def test_a_window_on_the_draft_model_saves_passes_of_it() -> None:
    passes = []
    for window in (0, 4):
        harness = tree_pair("F3", harvests_rejected=False, draft_lenience=1.0)
        params = SpeculationParams(drafter="ouroboros", gamma=6, window=window, phrase_length=3)
        harness.submit("a", (0,), max_tokens=12, speculation=params)
        harness.run()
        found = harness.worker._parts.drafters["ouroboros"]
        assert isinstance(found, OuroborosDrafter)
        passes.append(found.passes.num_passes)
        assert not found.passes._windows
    assert passes[1] < passes[0]


def test_a_phrase_stays_in_the_draft_where_the_draft_model_finds_it_nearly_as_likely() -> None:
    """Behind 3 letters the draft errs by one (F3); its own choice and the truth differ by 8 in logits."""
    drafted = []
    for lenience in (1.0, 1e-4):
        harness = tree_pair("F3", draft_lenience=lenience)
        params = SpeculationParams(drafter="ouroboros", gamma=5, phrase_length=3)
        pool = harness.worker._parts.drafters["ouroboros"]._phrases._pools.of(("tenant:", 3))
        for key in range(10):
            pool.put(key, tuple((key + step) % 10 for step in (1, 2, 3)))
        harness.submit("a", (1, 2, 3), max_tokens=12, speculation=params)
        harness.run()
        assert harness.tokens("a") == [token % 10 for token in range(4, 16)]
        drafted.append(harness.finished("a").report)
    assert drafted[1].draft_utilization > drafted[0].draft_utilization
    assert drafted[1].draft_utilization == 1.0


def test_enough_passes_and_a_phrase_end_the_drafting() -> None:
    passes = {}
    for limit in (1, 8):
        harness = tree_pair("F3", draft_passes=limit, draft_lenience=1.0)
        params = SpeculationParams(drafter="ouroboros", gamma=8, phrase_length=3)
        harness.submit("a", (*range(10), 0, 1), max_tokens=24, speculation=params)
        harness.run()
        assert harness.tokens("a") == [token % 10 for token in range(2, 26)]
        passes[limit] = harness.worker._parts.drafters["ouroboros"].passes.num_passes
    assert passes[1] < passes[8]
