"""Drafters read the source as far as it may be quoted, and never across what parts it from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.sequence import SEPARATOR
from outrider.runtime.drafters.base import DrafterParts, DraftRow
from outrider.runtime.drafters.phrases.lookahead import LookaheadDrafter
from outrider.runtime.drafters.registry import Drafters, build_drafters
from outrider.runtime.drafters.text.suffix_array import write_datastore

from tests.runtime.drafters.rows import outcome, row
from tests.runtime.markov import Harness, counting_logits, limits

OF_TEXT = ("lookup", "reference", "datastore", "suffix", "phrases")
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def sourced(source: Sequence[int], answer: Sequence[int], **options: object) -> DraftRow:
    made = row(answer, num_prompt=1, **options)
    text = [*source, SEPARATOR, *answer]
    return replace(made, text=np.array(text, dtype=np.int64), source=tuple(source))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    folder: Path = tmp_path_factory.mktemp("corpus") / "store"
    write_datastore([[1, 2, 3, 4, 5] * 4], folder, vocab_size=10)
    bounds = replace(limits(10), max_tree_nodes=16)
    config = DraftingConfig(
        datastore=str(folder), lookup_min_ngram=1, min_prob=0.01, suffix_factor=8.0, window=2
    )
    parts = DrafterParts(
        draft=ScriptedEngine(counting_logits, bounds),
        sampler=CpuSampler(max_batch=5, max_gamma=8, vocab_size=10),
        vocab_size=10,
        chunk=16,
        config=config,
    )
    return build_drafters(parts)


@given(source=TOKENS, answer=TOKENS, max_nodes=st.sampled_from([0, 12]))
@pytest.mark.parametrize("name", [*OF_TEXT, "lookahead", "ouroboros", "model/suffix"])
def test_what_parts_source_and_answer_is_never_proposed(
    drafters: Drafters, name: str, source: list[int], answer: list[int], max_nodes: int
) -> None:
    asked = sourced(source, answer, reference_tokens=tuple(source))
    (found,) = drafters[name].propose([replace(asked, max_nodes=max_nodes)], [0])
    drafters.forget(asked.key)
    assert all(0 <= token < 10 for token in found.tokens)


def draft(drafters: Drafters, name: str, asked: DraftRow) -> tuple[int, ...]:
    (found,) = drafters[name].propose([asked], [0])
    drafters.forget(asked.key)
    return found.tokens


@pytest.mark.parametrize("name", ["lookup", "suffix", "phrases"])
def test_the_source_is_continued(drafters: Drafters, name: str) -> None:
    asked = sourced([4, 7, 1, 9, 3, 2], [0, 7], gamma=3)
    assert draft(drafters, name, asked)[:3] == (1, 9, 3)


@pytest.mark.parametrize("name", ["lookup", "suffix", "phrases"])
def test_nothing_follows_the_end_of_the_source(drafters: Drafters, name: str) -> None:
    """The answer's first token comes behind what parts the two, not behind the source's last."""
    assert 8 not in draft(drafters, name, sourced([4, 7, 1], [8, 1], gamma=4))


def test_what_is_copied_from_a_source_ends_with_it(drafters: Drafters) -> None:
    assert draft(drafters, "lookup", sourced([5, 6, 7], [0, 5], gamma=8)) == (6, 7)


@given(source=TOKENS, answer=TOKENS)
def test_lookup_finds_in_both_what_it_finds_in_each(
    drafters: Drafters, source: list[int], answer: list[int]
) -> None:
    """The longest end of the answer that occurs in the answer or the source, and what follows it there."""
    found = draft(drafters, "lookup", sourced(source, answer, gamma=8))

    def best(text: list[int], longest: int) -> tuple[int, tuple[int, ...]]:
        for size in range(min(longest, len(answer), len(text)), 0, -1):
            for end in range(len(text) - 1, size - 1, -1):
                if text[end - size : end] == answer[-size:]:
                    return size, tuple(text[end : end + 8])
        return 0, ()

    longest = DraftingConfig().lookup_max_ngram
    own, quoted = best(answer, longest), best(source, longest)
    assert found == (own[1] if own[0] >= quoted[0] else quoted[1])


def test_suffix_histories_hold_answers_and_no_sources() -> None:
    single = build_drafters(
        DrafterParts(
            draft=None,
            sampler=CpuSampler(max_batch=5, max_gamma=8, vocab_size=10),
            vocab_size=10,
            chunk=4,
        )
    )
    first = sourced([1, 2, 3, 4], [0, 5, 6, 7], key="a", scope="s")
    single["suffix"].propose([first], [0])
    single.forget("a")
    (found,) = single["suffix"].propose([row([9, 2], key="b", scope="s", num_prompt=1)], [0])
    assert found.tokens == ()
    (found,) = single["suffix"].propose([row([9, 5], key="c", scope="s", num_prompt=1)], [0])
    assert found.tokens[:1] == (6,)


def test_a_window_begins_with_tokens_alone_and_learns_behind_the_root() -> None:
    drafter = LookaheadDrafter(DraftingConfig(window=3, phrase_length=2), max_gamma=8)
    asked = replace(sourced([1, 2], [3], gamma=8), max_nodes=20)
    (found,) = drafter.propose([asked], [0])
    assert found.tokens and min(found.tokens) >= 0
    judged = outcome([3, 4], found.tokens, 0, [(9,)] * (len(found.tokens) + 1), num_fed=4)
    told = replace(
        judged,
        row=replace(judged.row, text=np.array([1, 2, SEPARATOR, 3, 4])),
        parents=found.parents,
    )
    drafter.observe([told])
    # The window hung behind the answer's 3, which is the fourth of the text.
    assert any(key == 3 for key in drafter.state_of(told.row).pool._phrases)


def test_an_answer_that_is_all_quoted_is_continued(drafters: Drafters) -> None:
    """The whole of the text so far stands in the source."""
    assert draft(drafters, "suffix", sourced([4, 7, 1, 9, 3, 2], [7, 1], gamma=3)) == (9, 3, 2)
    assert draft(drafters, "suffix", sourced([4, 7, 1, 9], [4], gamma=3)) == (7, 1, 9)


def test_a_salt_parts_earlier_answers() -> None:
    """Drafters that share histories are told of a scope that only requests with the same salt have."""
    harness = Harness("F4")
    drafter, scopes = harness.worker._parts.drafters["suffix"], list[object]()
    propose = drafter.propose

    def noted(rows: Sequence[DraftRow], gammas: Sequence[int]) -> object:
        scopes.extend(row.scope for row in rows)
        return propose(rows, gammas)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", noted)
        for name, options in enumerate(
            ({}, {"salt": "a"}, {"salt": "a", "tenant": "y"}, {"is_known": False, "salt": "a"})
        ):
            options = {"tenant": "x", **options}
            harness.submit(str(name), drafter="suffix", gamma=2, max_tokens=8, **options)
            harness.run()
    assert list(dict.fromkeys(scopes)) == ["tenant:x", "tenant:x/a", "tenant:y/a", None]
