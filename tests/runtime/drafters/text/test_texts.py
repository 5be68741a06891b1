"""Drafters that continue many texts in one call: what they propose is what slow searches find, text by text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from outrider.engines.base import IntArray
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.drafting import HistoryScope
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.drafters.text import automaton_loops as loops
from outrider.runtime.drafters.text.automaton import ROOT
from outrider.runtime.drafters.text.lookup import LookupDrafter
from outrider.runtime.drafters.text.suffix import SuffixDrafter
from outrider.runtime.drafters.text.suffix_texts import AnswerHistory

from tests.runtime.drafters.rows import row
from tests.runtime.drafters.test_chains import Automaton, slow_continuation
from tests.runtime.drafters.text.test_lookup import slow_find
from tests.runtime.markov import Harness

ROOM = 4000
END = 5


@dataclass
class OneText:
    spec: RequestSpec
    num_prompt: int
    num_known: int
    tokens: IntArray = field(default_factory=lambda: np.zeros(ROOM, dtype=np.int64))

    @property
    def known(self) -> list[int]:
        return self.tokens[: self.num_known].tolist()

    def commit(self, tokens: list[int]) -> None:
        self.tokens[self.num_known : self.num_known + len(tokens)] = tokens
        self.num_known += len(tokens)


def text(name: str, prompt: list[int], *, tenant: str = "t") -> OneText:
    spec = RequestSpec(
        internal_id=name,
        request_id=name,
        prompt_tokens=tuple(prompt),
        params=SamplingParams(temperature=0.0, end_token_ids=(END,)),
        seed=0,
        max_tokens=ROOM,
        speculation=SpeculationParams(),
        tenant=tenant,
    )
    one = OneText(spec, len(prompt), 0)
    one.commit(prompt)
    return one


def cut(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


class SlowRequest:
    """Suffix decoding of one request, token after token, as it was before texts were continued together."""

    def __init__(self, history: AnswerHistory, num_prompt: int) -> None:
        self.history, self.num_prompt = history, num_prompt
        self.own, self.tokens, self.whole = Automaton(), [], ROOT
        self.place, self.cleared = (ROOT, 0), history.automaton.used[loops.CLEARED]

    def see(self, tokens: list[int]) -> None:
        new = tokens[len(self.tokens) :]
        self.tokens += new
        self.whole = self.own.append(self.whole, new)
        if self.cleared != self.history.automaton.used[loops.CLEARED]:
            self.cleared = self.history.automaton.used[loops.CLEARED]
            self.place, new = (ROOT, 0), self.tokens[-loops.REMATCH :]
        self.place = self.history.automaton.advance(*self.place, new)

    def best(self, length: int, *, factor: float, min_prob: float) -> tuple[tuple[int, ...], bool]:
        found = []
        for automaton, place in (
            (self.own, self.own.suffix(self.whole)),
            (self.history.automaton, self.history.automaton.advance(*self.place, [])),
        ):
            chains, figures = np.zeros((2, length), dtype=np.int64), np.zeros(4)
            num = loops.continue_text(
                automaton._states, automaton._edges, *place, factor, length, min_prob,
                automaton is self.own, chains, figures,
            )  # fmt: skip
            found.append((tuple(chains[0, :num].tolist()), figures[loops.SCORE]))
        (own, own_score), (shared, score) = found
        return (shared, True) if score > own_score else (own, False)


class SlowDrafter:
    def __init__(self, max_tokens: int) -> None:
        self.histories: dict[str, AnswerHistory] = {}
        self.requests: dict[str, SlowRequest] = {}
        self.max_tokens = max_tokens

    def of(self, one: OneText) -> SlowRequest:
        if one.spec.internal_id not in self.requests:
            history = self.histories.get(one.spec.tenant)
            if history is None:
                history = self.histories[one.spec.tenant] = AnswerHistory(self.max_tokens)
                history.automaton = Automaton()
            self.requests[one.spec.internal_id] = SlowRequest(history, one.num_prompt)
        found = self.requests[one.spec.internal_id]
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
    drafter = SuffixDrafter(factor=factor, min_prob=min_prob, max_tokens=max_tokens, max_scopes=4)
    slow, live, num_drafted, num_shared = SlowDrafter(max_tokens), [], 0, 0
    for step in range(300):
        if len(live) < 10 and numbers.random() < 0.3:
            # A prompt longer than an automaton has room for at first, at times.
            prompt = numbers.integers(0, 6, numbers.choice([1, 20, 300])).tolist()
            live.append(text(f"{step}", prompt, tenant="ab"[numbers.integers(2)]))
        asked = [one for one in live if numbers.random() < 0.8]
        if asked:
            lengths = numbers.integers(1, 12, len(asked)).tolist()
            found = drafter.continue_texts(asked, lengths, HistoryScope.TENANT)
            for one, length, tokens in zip(asked, lengths, found, strict=True):
                expected, is_shared = slow.of(one).best(length, factor=factor, min_prob=min_prob)
                assert tokens == cut(expected), (step, one.spec.internal_id)
                num_drafted += len(tokens)
                num_shared += is_shared
        for one in live:
            one.commit(numbers.integers(0, 6, numbers.integers(1, 5)).tolist())
        drafter.note_texts(asked)
        for one in asked:
            slow.of(one)
        for one in [one for one in live if numbers.random() < 0.05]:
            live.remove(one)
            drafter.forget(one.spec.internal_id)
            slow.forget(one.spec.internal_id)
    assert num_drafted > 100
    assert num_shared > 10
    for history in slow.histories.values():
        assert (history.automaton.used[loops.CLEARED] > 1) == (max_tokens == 60)
    for one in live:
        drafter.forget(one.spec.internal_id)
    assert not drafter._states
    assert not any(drafter._texts._states)


def test_a_text_alone_is_continued_by_counting() -> None:
    drafter = SuffixDrafter(factor=1.0, min_prob=0.1, max_tokens=100, max_scopes=1)
    numbers = np.random.default_rng(1)
    texts = [text(f"{i}", numbers.integers(0, 3, 20).tolist()) for i in range(9)]
    for _ in range(4):
        found = drafter.continue_texts(texts, [6] * 9, HistoryScope.REQUEST)
        assert found == [slow_continuation(one.known, 6, 1.0, 0.1)[0] for one in texts]
        assert any(found)
        for one in texts:
            one.commit(numbers.integers(0, 3, 2).tolist())


def test_lookup_finds_in_many_texts_what_a_plain_search_finds() -> None:
    numbers = np.random.default_rng(2)
    drafter = LookupDrafter(min_ngram=2, max_ngram=4)
    texts = [text(f"{i}", numbers.integers(0, 7, 1 + 9 * i).tolist()) for i in range(9)]
    lengths = list(range(1, 10))
    for _ in range(30):
        found = drafter.continue_texts(texts, lengths, HistoryScope.TENANT)
        for one, length, tokens in zip(texts, lengths, found, strict=True):
            assert tokens == cut(slow_find(one.known, length, 2, 4))
            one.commit(numbers.integers(0, 7, numbers.integers(1, 4)).tolist())
    assert sum(map(bool, found)) > 4


@pytest.mark.parametrize("scope", HistoryScope)
def test_what_others_asked_is_proposed_within_the_scope_alone(scope: HistoryScope) -> None:
    drafter = SuffixDrafter(factor=1.0, min_prob=0.1, max_tokens=100, max_scopes=4)
    first = text("first", [9], tenant="a")
    drafter.continue_texts([first], [4], scope)
    first.commit([1, 2, 3, 4])
    drafter.note_texts([first])
    drafter.forget("first")
    found = [
        drafter.continue_texts([text(tenant, [8, 1, 2], tenant=tenant)], [4], scope)[0]
        for tenant in ("a", "b")
    ]
    own, others = scope is not HistoryScope.REQUEST, scope is HistoryScope.SERVER
    assert found == [(3, 4) if own else (), (3, 4) if others else ()]


def test_a_request_may_change_between_rows_and_texts() -> None:
    """As one does whose chain of fallbacks lost its model."""
    known = [0, 1, 2, 3, 4, 9, 1, 2]
    drafter = SuffixDrafter(factor=4.0, min_prob=0.1, max_tokens=99, max_scopes=1)
    assert drafter.guess(row(known[:6], key="a"), (), 2) == ()
    one = text("a", known)
    assert drafter.continue_texts([one], [2], HistoryScope.TENANT) == [(3, 4)]
    assert drafter.guess(row([*known, 3], key="a"), (), 1) == (4,)
    one.commit([3])
    assert drafter.continue_texts([one], [1], HistoryScope.TENANT) == [(4,)]


@pytest.mark.parametrize("kind", [LookupDrafter, SuffixDrafter])
@pytest.mark.parametrize("method", ["continue_texts", "note_texts"])
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
    is_off = method == "continue_texts"
    assert (harness.finished("a").report.off_reason == "DEGRADED") == is_off
    assert harness.finished("b").report.off_reason is None
    harness.check_is_idle()
