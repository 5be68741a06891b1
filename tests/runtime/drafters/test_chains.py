"""T40: drafters without a model, by hand and against slow searches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.engines.base import BundleError
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.scopes import Scoped
from outrider.runtime.drafters.text import automaton_loops as loops
from outrider.runtime.drafters.text.automaton import ROOT, SuffixAutomaton
from outrider.runtime.drafters.text.automaton_loops import MAX_CANDIDATES
from outrider.runtime.drafters.text.datastore import DatastoreDrafter, continuations
from outrider.runtime.drafters.text.history import AnswerHistory
from outrider.runtime.drafters.text.lookup import find
from outrider.runtime.drafters.text.reference import ReferenceDrafter
from outrider.runtime.drafters.text.suffix import SuffixDrafter
from outrider.runtime.drafters.text.suffix_array import Datastore, sort_suffixes, write_datastore

from tests.runtime.drafters.rows import draft, outcome, row

TEXTS = st.lists(st.integers(0, 2), max_size=40)


# --- reference (LLMA)


def reference() -> ReferenceDrafter:
    return ReferenceDrafter(DraftingConfig(lookup_min_ngram=2, lookup_max_ngram=4))


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8), st.integers(0, 40))
def test_a_match_is_the_one_a_plain_search_finds(
    text: list[int], context: list[int], place: int
) -> None:
    """Of the longest end the first place at or behind the given one, else the last."""
    expected = (0, 0)
    for size in range(4, 0, -1):
        ends = [
            end
            for end in range(size, len(text))
            if size <= len(context) and text[end - size : end] == context[-size:]
        ]
        if ends:
            expected = next((end for end in ends if end >= place), ends[-1]), size
            break
    ids, behind = (np.array(one, dtype=np.int64) for one in (text, context))
    assert find(ids, behind, 1, 4, place) == expected


@pytest.mark.parametrize(
    ("history", "quoted", "expected"),
    [
        ([9, 1, 2], (1, 2, 3, 4), (3, 4)),
        ([9, 8, 7], (1, 2, 3, 4), ()),
        ([1, 2], (), ()),
        # Nothing follows the end of the reference.
        ([3, 4], (1, 2, 3, 4), ()),
        # Behind the place that was copied from last, a repeated line is followed in order.
        ([1, 2, 5, 1, 2], (1, 2, 5, 1, 2, 6), (6,)),
        ([1, 2], (1, 2, 5, 1, 2, 6), (5, 1, 2, 6)),
    ],
)
def test_a_reference_is_quoted_from_where_the_context_is(history, quoted, expected) -> None:
    drafter = reference()
    for length in range(1, len(history)):
        draft(drafter, history[:length], reference_tokens=quoted)
    assert draft(drafter, history, reference_tokens=quoted) == expected


# --- datastore (REST)


def store_of(folder: Path, *texts: list[int], vocab_size: int = 10) -> Datastore:
    write_datastore(texts, folder / "store", vocab_size=vocab_size)
    return Datastore.open(folder / "store", vocab_size=vocab_size)


def test_the_hand_example_of_retrieval(tmp_path: Path) -> None:
    store = store_of(tmp_path, [1, 2, 3, 1, 2, 4, 1, 2, 3])
    found = store.find([1, 2])
    assert sorted(store.suffixes[found.start : found.stop].tolist()) == [0, 3, 6]
    rows = sorted(continuations(store, found, 2, 2))
    assert rows == [[3, 1], [3, 10], [4, 1]]
    drafter = DatastoreDrafter(DraftingConfig(lookup_min_ngram=2, datastore_max_match=16), store)
    assert draft(drafter, [7, 1, 2], gamma=1) == (3,)
    assert draft(drafter, [7, 1, 2], gamma=2, key="b") == (3, 1)
    assert draft(drafter, [9, 9], key="c") == ()
    assert draft(drafter, [4, 1, 2], gamma=4, key="d") == (3,)


@settings(max_examples=40)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=12))
def test_a_datastore_finds_what_a_plain_search_finds(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], context: list[int]
) -> None:
    texts = [[0, 1], *texts]
    # A vocabulary of 2**20 packs three tokens into a key, so that longer patterns are narrowed.
    store = store_of(tmp_path_factory.mktemp("s"), *texts, vocab_size=1 << 20)
    whole = store.tokens.tolist()
    for size in range(1, len(context) + 1):
        pattern = context[-size:]
        places = [i for i in range(len(whole) - size + 1) if whole[i : i + size] == pattern]
        found = store.find(pattern)
        assert sorted(store.suffixes[found.start : found.stop].tolist()) == places
    size, found = store.longest_suffix(context, shortest=2, longest=8)
    sizes = [s for s in range(2, min(len(context), 8) + 1) if store.find(context[-s:])]
    assert size == max(sizes, default=0)
    assert not size or found == store.find(context[-size:])


def test_suffixes_are_sorted() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 300).astype(np.int32)
    order = sort_suffixes(tokens).tolist()
    keyed = [tokens[start : start + 32].tolist() for start in order]
    assert keyed == sorted(keyed)
    assert sorted(order) == list(range(300))


def test_a_datastore_of_another_vocabulary_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    store_of(tmp_path, [1, 2, 3])
    with pytest.raises(BundleError, match="vocabulary"):
        Datastore.open(tmp_path / "store", vocab_size=11)
    with pytest.raises(BundleError, match="exists already"):
        write_datastore([[1]], tmp_path / "store", vocab_size=10)
    with pytest.raises(BundleError, match="no text"):
        write_datastore([[]], tmp_path / "empty", vocab_size=10)
    np.save(tmp_path / "store" / "keys.npy", np.zeros(2, dtype=np.int64))
    with pytest.raises(BundleError, match="keys"):
        Datastore.open(tmp_path / "store", vocab_size=10)
    (tmp_path / "store" / "tokens.npy").write_bytes(b"x")
    with pytest.raises(BundleError, match="cannot be read"):
        Datastore.open(tmp_path / "store", vocab_size=10)


# --- suffix decoding


def slow_count(texts: list[list[int]], pattern: tuple[int, ...]) -> int:
    size = len(pattern)
    return sum(
        tuple(text[i : i + size]) == pattern for text in texts for i in range(len(text) - size + 1)
    )


@given(st.lists(TEXTS, max_size=3), st.integers(0, 2))
def test_the_automaton_counts_substrings(texts: list[list[int]], removed: int) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        half = automaton.append(ROOT, text[: len(text) // 2])
        automaton.append(half, text[len(text) // 2 :])
    if removed < len(texts):
        automaton.remove(texts[removed])
        texts = texts[:removed] + texts[removed + 1 :]
    for text in texts:
        for start in range(len(text)):
            state = ROOT
            for end in range(start, min(start + 6, len(text))):
                (state,) = (to for token, to, _ in automaton.followers(state) if token == text[end])
                assert automaton.count(state) == slow_count(texts, tuple(text[start : end + 1]))


@given(TEXTS, TEXTS)
def test_a_match_is_the_longest_known_suffix(text: list[int], context: list[int]) -> None:
    automaton = SuffixAutomaton()
    whole = ROOT
    state, matched = ROOT, 0
    for position, token in enumerate(context):
        if position < len(text):  # the automaton grows while it is followed
            whole = automaton.append(whole, text[position : position + 1])
        state, matched = automaton.advance(state, matched, [token])
        known, seen = text[: position + 1], context[: position + 1]
        sizes = [
            s for s in range(len(seen) + 1) if slow_count([known], tuple(seen[-s:] if s else ()))
        ]
        assert matched <= max(sizes)
        if position >= len(text):
            assert slow_count([known], tuple(seen[-matched:])) or matched == 0


def slow_continuation(
    text: list[int], length: int, factor: float, min_prob: float
) -> tuple[tuple[int, ...], float]:
    """The best-scored continuation of what ``text`` ended like before, by counting alone."""
    best: tuple[tuple[int, ...], float] = (), 0.0
    tried: list[list[int]] = []
    for matched in range(len(text) - 1, 0, -1):
        match = tuple(text[-matched:])
        ends = [
            i + matched
            for i in range(len(text) - matched + 1)
            if tuple(text[i : i + matched]) == match
        ]
        # Shorter matches that end at the same places say nothing new; the whole text ends once.
        if len(ends) == 1 or ends in tried or len(tried) == MAX_CANDIDATES:
            continue
        tried.append(ends)
        chain: tuple[int, ...] = ()
        score, prob, total = 0.0, 1.0, len(ends) - 1
        while total > 0 and len(chain) < min(length, int(factor * matched + 1e-6)):
            counts = {token: slow_count([text], (*match, *chain, token)) for token in set(text)}
            token = min(counts, key=lambda one: (-counts[one], one))
            prob *= min(counts[token] / total, 1.0)
            if counts[token] == 0 or prob < min_prob:
                break
            chain, score, total = (*chain, token), score + prob, counts[token]
        if score > best[1]:
            best = chain, score
    return best


@given(TEXTS, st.integers(1, 6), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.3, 0.9]))
def test_a_continuation_is_the_best_scored_one(
    text: list[int], length: int, factor: float, min_prob: float
) -> None:
    automaton = SuffixAutomaton()
    place = automaton.longest_earlier(automaton.append(ROOT, text))
    found = automaton.continuation(
        place, (), length, factor=factor, min_prob=min_prob, is_own_end=True
    )
    tokens, score = slow_continuation(text, length, factor, min_prob)
    assert tuple(found.tokens.tolist()) == tokens
    assert found.score == pytest.approx(score)


def test_room_grows_with_the_texts_and_is_never_overrun() -> None:
    automaton = SuffixAutomaton()
    numbers = np.random.default_rng(5)
    for _ in range(40):
        automaton.append(ROOT, numbers.integers(0, 2, size=50).tolist())
        automaton.append(ROOT, [1, *[0] * 49])
        states, edges = automaton._used.tolist()
        num_tokens = automaton._num_tokens
        assert states <= 2 * num_tokens + 1
        assert edges <= 3 * num_tokens
    # Nothing is written beyond the tables, whoever counts wrongly.
    with pytest.raises(IndexError):
        loops.append(
            automaton._states[:, :4].copy(), automaton._edges, automaton._slots,
            np.array([4, 0]), ROOT, np.array([7]),
        )  # fmt: skip


def suffix_drafter(min_prob: float, answers: list[list[int]]) -> SuffixDrafter:
    drafter = SuffixDrafter(
        DraftingConfig(suffix_factor=1.0, min_prob=min_prob, max_history_tokens=1000, max_scopes=2)
    )
    for answer in answers:
        drafter._histories.of("s").add(answer)
    return drafter


ANSWERS = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]]


@pytest.mark.parametrize(("min_prob", "expected"), [(0.1, (3, 4)), (0.7, (3,))])
def test_the_hand_example_of_suffix_decoding(min_prob: float, expected: tuple[int, ...]) -> None:
    drafter = suffix_drafter(min_prob, ANSWERS)
    assert draft(drafter, [8, 9, 1, 2], scope="s") == expected
    assert draft(drafter, [8, 9, 1, 2], scope="other", key="b") == ()
    assert draft(drafter, [8, 9, 1, 2], scope=None, key="c") == ()


def test_evicting_an_answer_changes_the_share_of_the_others() -> None:
    history = AnswerHistory(1000)
    automaton = history.automaton
    for answer in ANSWERS:
        history.add(answer)
    state, _ = automaton.advance(ROOT, 0, [2, 3])
    (token, _, count), _ = automaton.followers(state)
    assert (token, count, automaton.count(state)) == (4, 2, 3)
    automaton.remove([1, 2, 3, 5])
    ((token, _, count),) = automaton.followers(state)
    assert (token, count, automaton.count(state)) == (4, 2, 2)


def test_answers_are_shared_within_a_scope_when_they_have_ended() -> None:
    drafter = suffix_drafter(0.1, [])
    first = [7, 1, 2, 3, 4, 5]
    assert draft(drafter, [7, 1, 2], scope="s", num_prompt=1) == ()
    drafter.observe([outcome(first, (), 0, (), num_fed=3, scope="s", num_prompt=1)])
    assert draft(drafter, [9, 1, 2], scope="s", key="b", num_prompt=3) == ()
    drafter.forget("a")
    assert draft(drafter, [9, 1, 2], scope="s", key="c", num_prompt=3) == (3, 4)
    assert draft(drafter, [9, 1, 2], scope="t", key="d", num_prompt=3) == ()
    assert set(drafter._states) == {"b", "c", "d"}


def test_a_requests_own_text_wins_a_tie() -> None:
    drafter = suffix_drafter(0.1, [[1, 2, 5]])
    assert draft(drafter, [1, 2, 6, 1, 2], gamma=1, scope="s") == (6,)


def test_the_history_of_answers_is_bounded_and_survives_being_rebuilt() -> None:
    drafter = suffix_drafter(0.1, [])
    history = drafter._histories.of("s")
    history._max_tokens = 50
    assert draft(drafter, [9, 8], scope="s", key="early") == ()
    for number in range(60):
        history.add([number % 5, 6, 7, 8, *range(number % 3)])
        assert len(history) <= 50
    assert len(history.automaton) < 400
    assert draft(drafter, [9, 8, 6, 7], gamma=1, scope="s", key="early") == (8,)
    history.add(list(range(1000)))
    assert len(history) == 50


# --- scopes, and contexts beyond what is committed


def test_scopes_are_bounded_and_separate() -> None:
    scoped = Scoped(list[int], max_scopes=2)
    scoped.of("a").append(1)
    assert scoped.of("a") == [1]
    assert scoped.of("b") == []
    assert scoped.of(None) is not scoped.of(None)
    scoped.of("a")
    scoped.of("c")
    assert len(scoped) == 2
    assert scoped.of("a") == [1]
    assert scoped.of("b") == []


def test_a_tenant_of_many_salts_loses_its_own_scopes_first() -> None:
    scoped = Scoped(list[int], max_scopes=3)
    scoped.of("tenant:a").append(1)
    for salt in range(9):
        scoped.of(f"tenant:b/{salt}").append(salt)
    assert scoped.of("tenant:a") == [1]
    assert scoped.of("tenant:b/8") == [8]
    assert len(scoped) == 3


def drafters(tmp_path: Path) -> list[object]:
    return [
        DatastoreDrafter(
            DraftingConfig(lookup_min_ngram=2, datastore_max_match=8),
            store_of(tmp_path, [0, 1, 2, 3, 4, 5, 6]),
        ),
        SuffixDrafter(
            DraftingConfig(suffix_factor=4.0, min_prob=0.1, max_history_tokens=99, max_scopes=1)
        ),
        reference(),
    ]


def test_guesses_continue_what_is_drafted_but_not_committed(tmp_path: Path) -> None:
    history = [0, 1, 2, 3, 4, 5, 6, 9, 1, 2]
    for drafter in drafters(tmp_path):
        options = {"reference_tokens": (1, 2, 3, 4, 5)}
        assert drafter.guess(row(history, **options), (), 2) == (3, 4), drafter
        assert drafter.guess(row(history, **options), (3,), 1) == (4,), drafter
        assert drafter.guess(row([*history, 3], **options), (), 1) == (4,), drafter
        drafter.forget("a")
        assert not drafter._states


def test_a_chain_ends_with_its_first_end_token(tmp_path: Path) -> None:
    history = [0, 1, 2, 3, 4, 5, 6, 9, 1, 2]
    for drafter in drafters(tmp_path):
        found = draft(drafter, history, end_tokens=(4,), reference_tokens=(1, 2, 3, 4, 5))
        assert found == (3, 4), drafter
