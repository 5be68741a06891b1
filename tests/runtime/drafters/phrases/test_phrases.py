"""The phrase pool, its harvest by hand, and Ouroboros with empty, wrong and perfect pools."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.phrases.ouroboros import OuroborosDrafter
from outrider.runtime.drafters.phrases.phrases import (
    PhraseDrafter,
    PhrasePool,
    corrected,
    matching_segments,
    windows,
)

from tests.runtime.drafters.rows import draft, outcome
from tests.runtime.markov import MAX_GAMMA, PAIRS, Harness, limits


def pool(pool_size: int = 2, max_keys: int = 100) -> PhrasePool:
    return PhrasePool(pool_size=pool_size, max_keys=max_keys)


def test_the_newest_phrases_come_first_and_the_oldest_goes() -> None:
    held = pool()
    for phrase in ((1,), (2,), (1,), (3,)):
        held.put(7, phrase)
    assert held.get(7, 5) == [(3,), (1,)]
    assert held.get(7, 1) == [(3,)]
    assert held.get(8, 5) == []
    held.replace(7, (3,), (4,))
    assert held.get(7, 5) == [(4,), (1,)]


def test_a_pool_is_bounded_in_keys_too() -> None:
    held = pool(max_keys=2)
    for key in (1, 2, 1, 3):
        held.put(key, (key,))
    assert (held.get(1, 1), held.get(2, 1), held.get(3, 1)) == ([(1,)], [], [(3,)])
    assert len(held) == 2


def test_threads_may_share_a_pool() -> None:
    held = pool(pool_size=4, max_keys=8)

    def write(seed: int) -> None:
        for number in range(2000):
            held.put((number * seed) % 11, (number % 7, seed))
            held.get(number % 11, 4)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) <= 32


@pytest.mark.parametrize(
    ("drafted", "said", "num_accepted", "expected"),
    [
        ((2, 4, 2, 4, 6, 8), (2, 4, 6, 8, 9, 9, 0), 2, []),
        ((1, 5, 6, 7, 8), (1, 6, 6, 7, 8, 9), 1, [(5, (6, 7)), (6, (7, 8)), (7, (8, 9))]),
        ((1, 5), (1, 5, 9), 2, []),
    ],
)
def test_the_hand_examples_of_matching_segments(drafted, said, num_accepted, expected) -> None:
    found = outcome([0], drafted, num_accepted, [(token,) for token in said], num_fed=1)
    assert list(matching_segments(found, 2)) == expected


def test_segments_and_corrections_follow_the_branches_of_a_tree() -> None:
    # 1 -> {2 -> 3, 4 -> 5}: nodes 1..5; the target says 4 behind node 1, 6 behind 4 and so on.
    found = replace(
        outcome([0], (1, 2, 3, 4, 5), 2, [(1,), (4,), (3,), (8,), (6,), (9,)], num_fed=1),
        parents=(0, 1, 2, 1, 4),
        path=(1, 4),
    )
    assert list(matching_segments(found, 2)) == [(2, (3, 8))]
    assert corrected(found, 1, (2, 3)) == (4, 3)
    assert corrected(found, 1, (4, 5)) == (4, 6)
    assert corrected(found, 1, (7, 7)) is None


def test_windows_are_cut_once_however_the_text_grows() -> None:
    assert list(windows([1, 2, 3, 4], 2)) == [(1, (2, 3)), (2, (3, 4))]
    drafter = phrase_drafter()
    text = [1, 2, 3, 4, 5, 1]
    assert draft(drafter, text[:2], scope="s", phrase_length=2) == ()
    assert draft(drafter, text, scope="s", phrase_length=2, gamma=3) == (2, 3, 4)
    assert len(drafter.new_state_pool("s", 2)) == 4


class CountingDrafter(PhraseDrafter):
    def new_state_pool(self, scope: str, length: int) -> PhrasePool:
        return self._pools.of((scope, length))


def phrase_drafter(*, harvests_rejected: bool = True) -> CountingDrafter:
    return CountingDrafter(
        DraftingConfig(
            phrase_length=2,
            pool_size=4,
            pool_keys=64,
            max_scopes=4,
            harvests_rejected=harvests_rejected,
        )
    )


@pytest.mark.parametrize("harvests_rejected", [True, False])
def test_rejected_drafts_reach_the_pool_by_option_only(harvests_rejected: bool) -> None:
    """T32."""
    drafter = phrase_drafter(harvests_rejected=harvests_rejected)
    choices = [(token,) for token in (1, 6, 6, 7, 8, 9)]
    drafter.observe([outcome([0, 1, 6], (1, 5, 6, 7, 8), 1, choices, num_fed=1, scope="s")])
    held = drafter.new_state_pool("s", 2)
    assert held.get(0, 9) == [(1, 6)]
    assert held.get(5, 9) == ([(6, 7)] if harvests_rejected else [])


def tree_harness(pair: str, max_nodes: int = 24, **settings: object) -> Harness:
    vocab_size, target_logits, _ = PAIRS[pair]
    bounds = replace(limits(vocab_size), max_tree_nodes=max_nodes)
    drafting = DraftingConfig(trees_may_round_differently=True)
    target = ScriptedEngine(target_logits, bounds)
    return Harness(pair, target=target, **{"drafting": drafting, **settings})


def ouroboros(harness: Harness) -> OuroborosDrafter:
    found = harness.worker._parts.drafters["ouroboros"]
    assert isinstance(found, OuroborosDrafter)
    return found


POOLS = {
    "empty": [],
    "wrong": [(key, (7, 7, 7)) for key in range(10)],
    "perfect": [(key, ((key + 1) % 10, (key + 2) % 10, (key + 3) % 10)) for key in range(10)],
    "shared beginnings": [
        (key, ((key + 1) % 10, (key + offset) % 10, 5)) for key in range(10) for offset in (2, 3, 4)
    ],
}


@pytest.mark.parametrize("max_nodes", [0, 3, 24])
@pytest.mark.parametrize("content", POOLS)
def test_greedy_answers_are_the_same_with_any_pool(content: str, max_nodes: int) -> None:
    """T28 for Ouroboros: the pool decides how fast, never what."""
    harness = tree_harness("F3", max_nodes)
    shared = ouroboros(harness)._phrases._pools.of(("tenant:", 3))
    for key, phrase in POOLS[content]:
        shared.put(key, phrase)
    harness.submit("plain", max_tokens=30, is_enabled=False, end_tokens=(2,), seed=1)
    # Three phrases are the default; what finds no room is cut.
    params = SpeculationParams(drafter="ouroboros", gamma=7, phrase_length=3)
    harness.submit("a", max_tokens=30, speculation=params)
    harness.submit("b", max_tokens=30, speculation=params, end_tokens=(2,), seed=1)
    harness.run()
    assert harness.tokens("b") == harness.tokens("plain")
    assert harness.tokens("a") == [token % 10 for token in range(4, 34)]
    assert harness.finished("a").report.off_reason is None


def test_phrases_stand_on_top_of_the_drafts_gamma() -> None:
    harness = tree_harness("F3")
    shared = ouroboros(harness)._phrases._pools.of(("tenant:", 3))
    for key, phrase in POOLS["perfect"]:
        shared.put(key, phrase)
    params = SpeculationParams(drafter="ouroboros", gamma=5, phrase_length=3, num_phrases=2)
    harness.submit("a", (1, 2, 3), max_tokens=12, speculation=params)
    harness.run()
    first = next(
        e for e in harness.events["a"] if isinstance(e, Progressed) and e.trace.draft_tokens
    )
    # One pass of the draft model, fed a phrase, says 5, 6 and, wrongly, 8; the phrases after 8 go on to gamma + 3.
    assert first.trace.draft_tokens == (5, 6, 8, 9, 0, 1, 2, 3)
    passes = ouroboros(harness).passes
    assert passes.num_passes < passes.num_drafted


def drafts_of(
    max_tokens: int, gamma: int = 2, max_open: int | None = None
) -> list[tuple[int, ...]]:
    """Return the drafts of a greedy answer on F3, with 4 tokens of phrases that are always right."""
    drafting = DraftingConfig(draft_passes=0, draft_lenience=1.0)
    target = ScriptedEngine(PAIRS["F3"][1], replace(limits(10), max_open=max_open))
    harness = Harness("F3", target=target, drafting=drafting)
    shared = ouroboros(harness)._phrases._pools.of(("tenant:", 4))
    for key, phrase in POOLS["perfect"]:
        shared.put(key, phrase)
    params = SpeculationParams(drafter="ouroboros", gamma=gamma)
    harness.submit("a", (1, 2, 3), max_tokens=max_tokens, speculation=params)
    harness.run()
    assert harness.tokens("a") == [token % 10 for token in range(4, 4 + max_tokens)]
    return [
        one.trace.draft_tokens
        for one in harness.events["a"]
        if isinstance(one, Progressed) and one.trace.draft_tokens
    ]


def test_a_draft_has_gamma_tokens_of_the_model_and_a_phrase_as_far_as_there_is_room() -> None:
    drafts = drafts_of(15)
    # Two tokens of the draft model, four of phrases.
    assert drafts[0] == (5, 6, 7, 8, 9, 0)
    assert max(map(len, drafts)) == 6
    # The prompt's pass gives the first token: of five, three are left to draft beside the one that follows.
    assert len(drafts_of(5)[0]) == 3


@pytest.mark.parametrize("max_open", [MAX_GAMMA, MAX_GAMMA + 2])
def test_no_draft_is_longer_than_the_target_can_take_back(max_open: int) -> None:
    assert max(map(len, drafts_of(25, MAX_GAMMA, max_open))) == max_open


def test_the_calls_of_a_draft_are_its_passes() -> None:
    harness = tree_harness("F3")
    shared = ouroboros(harness)._phrases._pools.of(("tenant:", 3))
    for key, phrase in POOLS["perfect"]:
        shared.put(key, phrase)
    params = SpeculationParams(drafter="ouroboros", gamma=5, phrase_length=3)
    harness.submit("a", (1, 2, 3), max_tokens=12, speculation=params)
    harness.run()
    found = ouroboros(harness)
    assert 0 < found.passes.num_passes < found.passes.num_drafted
    assert set(found.passes.num_calls.values()) == {1}


def wide_pair(num_nodes: int, max_extend: int = 64, **settings: object) -> Harness:
    """A pair on F3 whose trees have so many tokens, root included."""
    bounds = replace(limits(10), max_tree_nodes=num_nodes, max_extend=max_extend)
    _, target_logits, draft_logits = PAIRS["F3"]
    target, draft = ScriptedEngine(target_logits, bounds), ScriptedEngine(draft_logits, bounds)
    return Harness("F3", target=target, draft=draft, **settings)


@pytest.mark.parametrize(
    ("num_nodes", "asked", "field"),
    [
        # Of the draft model: 2 fed, a chain of 5 (4 of phrases), two phrases of 4, and a window of 4 x 3 - 1.
        (26, {"window": 3}, ""),
        (25, {"window": 3}, "window"),
        # Of the target: the root, gamma 6, and K x 4.
        (19, {"num_phrases": 3}, ""),
        (18, {"num_phrases": 3}, "num_phrases"),
        (18, {"num_phrases": 2}, ""),
        (18, {}, ""),
        (0, {"num_phrases": 1}, ""),
    ],
)
def test_what_a_request_asks_for_and_finds_no_room_is_refused(
    num_nodes: int, asked: dict[str, int], field: str
) -> None:
    harness = wide_pair(num_nodes)
    params = SpeculationParams(drafter="ouroboros", gamma=6, **asked)
    if not field:
        harness.submit("a", max_tokens=4, speculation=params)
        return
    with pytest.raises(RequestError, match=f"speculation.{field}: needs .*{num_nodes}|needs .*17"):
        harness.submit("a", max_tokens=4, speculation=params)


def test_a_phrase_that_no_pass_can_verify_is_refused_where_it_was_asked_for() -> None:
    params = SpeculationParams(drafter="ouroboros", gamma=8)
    harness = wide_pair(0, max_extend=12)
    harness.submit("a", max_tokens=4, speculation=params)
    with pytest.raises(
        RequestError, match=r"phrase_length: needs drafts of 12 tokens .*at most 11"
    ):
        harness.submit("b", max_tokens=4, speculation=replace(params, phrase_length=4))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"draft_window": 3}, "draft_window"),
        ({"num_phrases": 4}, "num_phrases"),
        ({"phrase_length": 9}, "phrase_length"),
    ],
)
def test_a_server_whose_own_drafter_has_no_room_does_not_start(
    settings: dict[str, int], key: str
) -> None:
    drafting = DraftingConfig(**settings)
    with pytest.raises(ConfigError, match=f"drafting.{key}: needs"):
        wide_pair(20, 16, default_drafter="ouroboros", default_gamma=8, drafting=drafting)
    wide_pair(20, 16, default_drafter="model", default_gamma=8, drafting=drafting)


@pytest.mark.parametrize("scope", list(HistoryScope))
def test_phrases_are_reused_within_their_scope_from_the_first_step(scope: HistoryScope) -> None:
    harness = Harness("F3", drafting=DraftingConfig(history_scope=scope))
    params = SpeculationParams(drafter="phrases", gamma=4, phrase_length=2)
    for name, tenant in (("first", "x"), ("same", "x"), ("other", "y")):
        harness.submit(name, (3, 3), max_tokens=14, speculation=params, tenant=tenant)
        harness.run()
    num_steps = {name: harness.finished(name).report.num_steps for name in harness.events}
    assert (num_steps["same"] < num_steps["first"]) is (scope is not HistoryScope.REQUEST)
    assert (num_steps["other"] < num_steps["first"]) is (scope is HistoryScope.SERVER)


@pytest.mark.parametrize("mode", [ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE])
def test_sampled_answers_are_the_same_whatever_the_pool_holds(mode: ExactnessMode) -> None:
    """T21's cure and T29: one draw per node of the trie, keyed by its position alone."""
    answers = []
    for num_phrases, content in ((0, ()), (3, "wrong"), (3, "shared beginnings")):
        harness = tree_harness("F4")
        shared = ouroboros(harness)._phrases._pools.of(("tenant:", 3))
        for key, phrase in POOLS[content] if content else ():
            shared.put(key % 4, tuple(token % 4 for token in phrase))
        params = SpeculationParams(
            drafter="ouroboros", gamma=6, phrase_length=3, num_phrases=num_phrases, mode=mode
        )
        harness.submit("a", max_tokens=60, temperature=1.0, speculation=params)
        harness.run()
        answers.append(harness.tokens("a"))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("harvests_rejected", [True, False])
def test_what_ouroboros_tried_and_the_target_corrected_reaches_the_pool_by_option_only(
    harvests_rejected: bool,
) -> None:
    """T32."""
    settings = DraftingConfig(trees_may_round_differently=True, harvests_rejected=harvests_rejected)
    vocab_size, target_logits, draft_logits = PAIRS["F4"]
    bounds = replace(limits(vocab_size), max_tree_nodes=24)
    harness = Harness(
        "F4",
        target=ScriptedEngine(target_logits, bounds),
        draft=ScriptedEngine(draft_logits, bounds),
        drafting=settings,
    )
    length, texts = 3, []
    for number in range(4):
        params = SpeculationParams(drafter="ouroboros", gamma=7, phrase_length=length)
        harness.submit(str(number), (number, 1, 2), max_tokens=40, seed=number, temperature=1.0,
                       speculation=params)  # fmt: skip
        harness.run()
        texts.append([number, 1, 2, *harness.tokens(str(number))])
    committed = {(key, phrase) for text in texts for key, phrase in windows(text, length)}
    shared = ouroboros(harness)._phrases._pools.of(("tenant:", length))
    held = {(key, phrase) for key in range(vocab_size) for phrase in shared.get(key, 99)}
    assert held
    assert (held <= committed) is not harvests_rejected
