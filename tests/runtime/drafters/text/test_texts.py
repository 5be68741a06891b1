"""Lookup and suffix decoding over whole requests: what they propose is what slow searches find, text by text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DraftRow, Outcome
from outrider.runtime.drafters.text.automaton import ROOT, SuffixAutomaton
from outrider.runtime.drafters.text.history import AnswerHistory
from outrider.runtime.drafters.text.lookup import LookupDrafter
from outrider.runtime.drafters.text.suffix import REMATCH, SuffixDrafter

from tests.runtime.drafters.rows import row
from tests.runtime.drafters.test_chains import slow_continuation
from tests.runtime.drafters.text.test_lookup import slow_find
from tests.runtime.markov import Harness

END = 5


@dataclass
class OneText:
    name: str
    known: list[int]
    tenant: str | None = "t"
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.known)

    def commit(self, tokens: list[int]) -> None:
        self.known += tokens

    def row(self, gamma: int = 1) -> DraftRow:
        return row(
            self.known, gamma=gamma, key=self.name, scope=self.tenant,
            num_prompt=self.num_prompt, end_tokens=(END,),
        )  # fmt: skip


def continued(drafter, texts: list[OneText], lengths: list[int]) -> list[tuple[int, ...]]:
    rows = [one.row(length) for one, length in zip(texts, lengths, strict=True)]
    return [draft.tokens for draft in drafter.propose(rows, range(len(rows)))]


def observe(drafter, texts: list[OneText]) -> None:
    drafter.observe(
        [Outcome(row=one.row(), num_fed=0, draft_tokens=(), num_accepted=0) for one in texts]
    )


def cut(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


class SlowRequest:
    """Suffix decoding of one request, token after token, as it was before texts were continued together."""

    def __init__(self, history: AnswerHistory, num_prompt: int) -> None:
        self.history, self.num_prompt = history, num_prompt
        self.own, self.tokens, self.whole = SuffixAutomaton(), [], ROOT
        self.place, self.cleared = (ROOT, 0), history.automaton.num_cleared

    def see(self, tokens: list[int]) -> None:
        new = tokens[len(self.tokens) :]
        self.tokens += new
        self.whole = self.own.append(self.whole, new)
        if self.cleared != self.history.automaton.num_cleared:
            self.cleared = self.history.automaton.num_cleared
            self.place, new = (ROOT, 0), self.tokens[-REMATCH:]
        self.place = self.history.automaton.advance(*self.place, new)

    def best(self, length: int, *, factor: float, min_prob: float) -> tuple[tuple[int, ...], bool]:
        found = []
        for automaton, place in (
            (self.own, self.own.longest_earlier(self.whole)),
            (self.history.automaton, self.history.automaton.advance(*self.place, [])),
        ):
            tokens, score, *_ = automaton.continuation(
                place,
                (),
                length,
                factor=factor,
                min_prob=min_prob,
                is_own_end=automaton is self.own,
            )
            found.append((tuple(tokens.tolist()), score))
        (own, own_score), (shared, score) = found
        return (shared, True) if score > own_score else (own, False)


class SlowDrafter:
    def __init__(self, max_tokens: int) -> None:
        self.histories: dict[str, AnswerHistory] = {}
        self.requests: dict[str, SlowRequest] = {}
        self.max_tokens = max_tokens

    def of(self, one: OneText) -> SlowRequest:
        if one.name not in self.requests:
            history = self.histories.setdefault(one.tenant, AnswerHistory(self.max_tokens))
            self.requests[one.name] = SlowRequest(history, one.num_prompt)
        found = self.requests[one.name]
        found.see(one.known)
        return found

    def forget(self, name: str) -> None:
        one = self.requests.pop(name, None)
        if one is not None and len(one.tokens) > one.num_prompt:
            one.history.add(one.tokens[one.num_prompt :])


@pytest.mark.parametrize("seed", range(6))
def test_suffix_drafts_are_those_of_each_text_alone(seed: int) -> None:
    """Requests of two tenants come, are drafted for or not, and end; a short history is rebuilt now and then."""
    numbers = np.random.default_rng(seed)
    factor, min_prob, max_tokens = 2.0, 0.1, (60, 10_000)[seed % 2]
    drafter = SuffixDrafter(
        DraftingConfig(
            suffix_factor=factor, min_prob=min_prob, max_history_tokens=max_tokens, max_scopes=4
        )
    )
    slow, live, num_drafted, num_shared = SlowDrafter(max_tokens), [], 0, 0
    for step in range(300):
        if len(live) < 10 and numbers.random() < 0.3:
            # A prompt longer than an automaton has room for at first, at times.
            prompt = numbers.integers(0, 6, numbers.choice([1, 20, 300])).tolist()
            live.append(OneText(f"{step}", prompt, tenant="ab"[numbers.integers(2)]))
        asked = [one for one in live if numbers.random() < 0.8]
        if asked:
            lengths = numbers.integers(1, 12, len(asked)).tolist()
            found = continued(drafter, asked, lengths)
            for one, length, tokens in zip(asked, lengths, found, strict=True):
                expected, is_shared = slow.of(one).best(length, factor=factor, min_prob=min_prob)
                assert tokens == cut(expected), (step, one.name)
                num_drafted += len(tokens)
                num_shared += is_shared
        for one in live:
            one.commit(numbers.integers(0, 6, numbers.integers(1, 5)).tolist())
        observe(drafter, asked)
        for one in asked:
            slow.of(one)
        for one in [one for one in live if numbers.random() < 0.05]:
            live.remove(one)
            drafter.forget(one.name)
            slow.forget(one.name)
    assert num_drafted > 100
    assert num_shared > 10
    for history in slow.histories.values():
        assert (history.automaton.num_cleared > 0) == (max_tokens == 60)
    for one in live:
        drafter.forget(one.name)
    assert not drafter._states


def test_a_text_alone_is_continued_by_counting() -> None:
    drafter = SuffixDrafter(
        DraftingConfig(suffix_factor=1.0, min_prob=0.1, max_history_tokens=100, max_scopes=1)
    )
    numbers = np.random.default_rng(1)
    texts = [OneText(f"{i}", numbers.integers(0, 3, 20).tolist()) for i in range(9)]
    for _ in range(4):
        found = continued(drafter, texts, [6] * 9)
        assert found == [slow_continuation(one.known, 6, 1.0, 0.1)[0] for one in texts]
        assert any(found)
        for one in texts:
            one.commit(numbers.integers(0, 3, 2).tolist())


def test_lookup_finds_in_many_texts_what_a_plain_search_finds() -> None:
    numbers = np.random.default_rng(2)
    drafter = LookupDrafter(DraftingConfig(lookup_min_ngram=2, lookup_max_ngram=4))
    texts = [OneText(f"{i}", numbers.integers(0, 7, 1 + 9 * i).tolist()) for i in range(9)]
    lengths = list(range(1, 10))
    for _ in range(30):
        found = continued(drafter, texts, lengths)
        for one, length, tokens in zip(texts, lengths, found, strict=True):
            assert tokens == cut(slow_find(one.known, length, 2, 4))
            one.commit(numbers.integers(0, 7, numbers.integers(1, 4)).tolist())
    assert sum(map(bool, found)) > 4


def test_earlier_answers_are_proposed_within_the_scope_alone() -> None:
    for scope, expected in (("a", (3, 4)), ("b", ()), (None, ())):
        drafter = SuffixDrafter(
            DraftingConfig(suffix_factor=1.0, min_prob=0.1, max_history_tokens=100, max_scopes=4)
        )
        first = OneText("first", [9], tenant="a" if scope else None)
        continued(drafter, [first], [4])
        first.commit([1, 2, 3, 4])
        observe(drafter, [first])
        drafter.forget("first")
        assert continued(drafter, [OneText("second", [8, 1, 2], tenant=scope)], [4]) == [expected]


@pytest.mark.parametrize("kind", [LookupDrafter, SuffixDrafter])
@pytest.mark.parametrize("method", ["propose", "observe"])
def test_one_that_raises_costs_nobody_an_answer(
    kind: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError(arguments)

    monkeypatch.setattr(kind, method, fail)
    name = "lookup" if kind is LookupDrafter else "suffix"
    harness = Harness("F3")
    for label, drafter in (("a", name), ("b", "model"), ("c", name)):
        harness.submit(label, drafter=drafter, max_tokens=5)
    harness.run()
    for label in "abc":
        assert harness.tokens(label) == [4, 5, 6, 7, 8]
    is_off = method == "propose"
    assert (harness.finished("a").report.off_reason == "DEGRADED") == is_off
    assert harness.finished("b").report.off_reason is None
    harness.check_is_idle()
