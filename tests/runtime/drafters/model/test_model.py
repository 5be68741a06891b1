"""The draft model's cache holds committed tokens only, and catches up when it must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import EngineLimits, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.drafters.base import DrafterParts, DraftRow, Need
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.none import NoDrafter
from outrider.runtime.drafters.registry import REGISTRY, build_drafters

from tests.runtime.markov import counting_logits, limits

VOCAB_SIZE = 10


class Recorder(ScriptedEngine):
    """Keeps the spans it was given."""

    def __init__(self, *, max_context: int = 40) -> None:
        def logits(prefix: tuple[int, ...]) -> np.ndarray:
            return np.eye(VOCAB_SIZE, dtype=np.float32)[(prefix[-1] + 1) % VOCAB_SIZE] * 9.0

        bounds = EngineLimits(
            max_batch=3, max_context=max_context, max_extend=8, vocab_size=VOCAB_SIZE
        )
        super().__init__(logits, bounds)
        self.fed: list[list[tuple[int, ...]]] = []

    def extend(self, spans: list[Span]) -> np.ndarray:
        self.fed.append([span.tokens for span in spans])
        return super().extend(spans)


def sampler() -> CpuSampler:
    return CpuSampler(max_batch=3, max_gamma=6, vocab_size=VOCAB_SIZE)


def row(
    slot: int,
    history: list[int],
    *,
    gamma: int = 3,
    num_computed: int = 0,
    temperature: float = 0.0,
    mode: ExactnessMode = ExactnessMode.MAX_ACCEPT,
    end_tokens: tuple[int, ...] = (),
    is_adaptive: bool = False,
) -> DraftRow:
    return DraftRow(
        is_adaptive=is_adaptive,
        sampling=SamplingRow(
            index=slot,
            slot=slot,
            params=SamplingParams(temperature=temperature, end_token_ids=end_tokens),
            mode=mode,
            lenience=1.0,
            seed=3,
            history=np.array(history, dtype=np.int64),
            num_prompt=1,
        ),
        text=np.array(history, dtype=np.int64),
        gamma=gamma,
        num_computed=num_computed,
    )


def drafter(engine: Recorder, chunk: int = 4) -> ModelDrafter:
    return ModelDrafter(
        DrafterParts(draft=engine, sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=chunk)
    )


def test_a_row_alone_is_fed_all_it_misses_by_the_call_that_drafts() -> None:
    engine = Recorder()
    (found,) = drafter(engine).propose([row(0, [1, 2, 3, 4], gamma=2)], [0])
    assert (found.tokens, found.num_computed) == ((5, 6), 5)
    assert engine.fed == [[(1, 2, 3, 4)], [(5,)]]


def test_rows_draft_in_lockstep_and_drop_out() -> None:
    engine = Recorder()
    rows = [row(0, [1], gamma=3), row(1, [5], gamma=0), row(2, [7, 8], gamma=1)]
    first, last = drafter(engine).propose(rows, [0, 2])
    assert (first.tokens, first.num_computed) == ((2, 3, 4), 3)
    assert (last.tokens, last.num_computed) == ((9,), 2)
    assert engine.fed == [[(1,), (), (7, 8)], [(2,)], [(3,)]]


def test_a_row_stops_drafting_after_an_end_token() -> None:
    (draft,) = drafter(Recorder()).propose([row(0, [1], gamma=6, end_tokens=(3,))], [0])
    assert draft.tokens == (2, 3)


def test_a_long_history_is_fed_alone_in_chunks_before_it_drafts() -> None:
    engine = Recorder()
    history = [1, 2, 3, 4, 5, 6, 7]
    model = drafter(engine)
    (draft,) = model.propose([row(0, history)], [0])
    assert (draft.tokens, draft.num_computed) == ((), 4)
    (draft,) = model.propose([row(0, history, num_computed=4)], [0])
    assert (draft.tokens, draft.num_computed) == ((8, 9, 0), 9)
    assert engine.fed == [[(1, 2, 3, 4)], [(5, 6, 7)], [(8,)], [(9,)]]
    assert engine.tokens_of(0) == (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_lagging_rows_whose_gamma_is_chosen_share_one_chunk_per_step() -> None:
    engine = Recorder()
    histories = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1]]
    rows = [row(slot, text, is_adaptive=True) for slot, text in enumerate(histories)]
    drafts = drafter(engine).propose(rows, [0, 1, 2])
    assert [len(draft.tokens) for draft in drafts] == [0, 3, 3]
    assert [draft.num_computed for draft in drafts] == [1, 6, 3]
    assert engine.fed[:2] == [[(1, 2, 3)], [(1,)]]
    # A row of a fixed gamma waits for nobody.
    engine, rows[0] = Recorder(), row(0, histories[0])
    drafts = drafter(engine).propose(rows, [0, 1, 2])
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 3]
    assert engine.fed[:2] == [[(1, 2, 3)], [(1, 2, 3, 4)]]


def test_sources_share_the_chunk_with_texts() -> None:
    """Of three sources of three tokens, a chunk of four begun with one has room for the next, and no more."""
    bounds = replace(limits(VOCAB_SIZE), max_source=8)
    engine = ScriptedEngine(lambda source, text: counting_logits(text), bounds)
    rows = [
        replace(row(slot, [1], is_adaptive=True), source=(1, 2, 3), num_computed=-1)
        for slot in range(3)
    ]
    drafts = drafter(engine).propose(rows, [0, 1, 2])
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 0]
    assert [engine.source_of(slot) for slot in range(3)] == [(1, 2, 3), (1, 2, 3), ()]


def test_all_lagging_rows_catch_up_where_the_chunk_allows() -> None:
    engine = Recorder()
    rows = [row(slot, [1, 2, 3, 4][: 3 + slot % 2]) for slot in range(3)]
    drafts = drafter(engine, chunk=8).propose(rows, [0, 1, 2])
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 3]
    # Neighbours in one call, as far as the chunk holds them all as wide as the widest.
    assert engine.fed[:2] == [[(1, 2), (1, 2, 3)], [(1, 2)]]


def test_a_draft_ends_where_the_draft_models_context_does() -> None:
    history = [1, 2, 3, 4]
    for max_context, num_drafted in ((3, 0), (4, 1), (5, 2)):
        (draft,) = drafter(Recorder(max_context=max_context), chunk=8).propose(
            [row(0, history)], [0]
        )
        assert len(draft.tokens) == num_drafted


@pytest.mark.parametrize(
    ("temperature", "mode", "is_sampled"),
    [
        (0.0, ExactnessMode.MAX_ACCEPT, False),
        (1.0, ExactnessMode.MAX_ACCEPT, True),
        (1.0, ExactnessMode.LENIENT, True),
        (1.0, ExactnessMode.SEED_STABLE, False),
    ],
)
def test_drafts_say_whether_their_law_was_kept(
    temperature: float, mode: ExactnessMode, is_sampled: bool
) -> None:
    (draft,) = drafter(Recorder()).propose([row(0, [1], temperature=temperature, mode=mode)], [0])
    assert draft.is_sampled is is_sampled


@pytest.mark.parametrize("has_draft", [True, False])
def test_the_registry_offers_what_the_parts_allow(has_draft: bool) -> None:
    drafters = build_drafters(
        DrafterParts(
            draft=Recorder() if has_draft else None,
            sampler=sampler(),
            vocab_size=VOCAB_SIZE,
            chunk=4,
        )
    )
    # Nor does this draft model take trees.
    unmet = {Need.CORPUS, Need.DRAFT_TREES} | (set() if has_draft else {Need.DRAFT_MODEL})
    assert set(drafters) == {
        n for n, kind in REGISTRY.items() if not kind.capabilities.needs & unmet
    }
    assert ("model" in drafters) is has_draft


def test_caps_are_kept_where_parts_are_missing() -> None:
    drafters = build_drafters(
        DrafterParts(draft=Recorder(), sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=4)
    )
    assert drafters.usable("psychic:2+lookup:5+model:3") == "lookup:5+model:3"
    assert drafters.without("lookup:5+model:3", {"lookup"}) == "model:3"
    assert drafters.without("lookup:5", {"lookup"}) is None
    assert drafters.without_model("lookup:5+model:3+suffix") == "lookup:5+suffix"
    assert drafters.members("lookup:5+model:3") == drafters.members("lookup+model")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("model:8", "model"),
        ("model:999", "model"),
        ("model:7", "model:7"),
        ("none+model", "model"),
        ("lookup:9+none+model/lookup:8", "lookup+model/lookup"),
        ("none:3", "none"),
        ("psychic+none", "none"),
        ("psychic", None),
        ("model:0", None),
    ],
)
def test_names_that_draft_alike_have_one_canonical_name(spelling: str, name: str | None) -> None:
    drafters = build_drafters(
        DrafterParts(
            draft=Recorder(), sampler=sampler(), vocab_size=VOCAB_SIZE, chunk=4, max_gamma=8
        )
    )
    assert drafters.usable(spelling) == name


def test_no_drafter_drafts_nothing() -> None:
    (draft,) = NoDrafter().propose([row(0, [1])], [0])
    assert draft.tokens == ()
