"""Texts of models with recurrent layers or rings are kept with states; what goes on from one is as if fed whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from outrider.engines.base import Engine, FloatArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import ExactnessMode
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.prefix_cache.tree import TOKEN_BYTES, PrefixTree
from outrider.runtime.serving.factory import _with_prefix_cache

from tests.engines.handmade_states import states_entry, write_states_bundle
from tests.engines.onnx.handmade_rings import WINDOW, write_rings_bundle
from tests.runtime.markov import MAX_GAMMA, Harness

CHUNK = 16
ROOM = 1 << 22
TEXT = np.random.default_rng(3).integers(0, 96, 200).tolist()
OTHER = np.random.default_rng(4).integers(0, 96, 200).tolist()


@pytest.fixture(scope="module", params=["states", "rings"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """A target and a draft; the draft with rings keeps nothing by token."""
    root = tmp_path_factory.mktemp("states")
    if request.param == "states":
        entries = (states_entry(MAX_GAMMA), states_entry(MAX_GAMMA, 3, has_scan=False))
        folders = [
            write_states_bundle(root / str(index), entry) for index, entry in enumerate(entries)
        ]
    else:
        columns = WINDOW + CHUNK + MAX_GAMMA - 1
        folders = [
            write_rings_bundle(
                root / f"{len(layers)}", columns=columns, layers=layers, max_extend=CHUNK
            )
            for layers in ((0,), (0, 1))
        ]
    engines = tuple(open_engine(load_bundle(folder), "target") for folder in folders)
    yield engines
    for engine in engines:
        engine.close()


class Served:
    """A worker over the pair that counts what its target is fed."""

    def __init__(
        self,
        pair: tuple[Engine, Engine],
        num_bytes: int = ROOM,
        patch: pytest.MonkeyPatch | None = None,
    ) -> None:
        target, draft = pair
        self.fed: list[int] = []
        if patch is not None:
            extend = target.extend

            def counted(spans: Sequence[Span]) -> FloatArray:
                self.fed += [len(span.tokens) for span in spans if span.tokens]
                return extend(spans)

            patch.setattr(target, "extend", counted)
        self.harness = Harness(
            target=target,
            draft=draft,
            max_batch=3,
            prefix_cache_bytes=num_bytes,
            prefill_chunk=CHUNK,
        )

    def ask(self, name: str, prompt: Sequence[int], **options: object) -> list[int]:
        options = {"cache_scope": "us", "max_tokens": 12, "gamma": 4, "drafter": "model"} | options
        self.harness.submit(name, prompt, **options)
        self.harness.run()
        return self.harness.tokens(name)

    def num_cached(self, name: str) -> int:
        return self.harness.finished(name).num_cached


LAWS = {
    "greedy": {},
    "seed_stable": {"temperature": 1.0, "mode": ExactnessMode.SEED_STABLE},
    "sampled": {"temperature": 1.0},
    "lookup": {"drafter": "lookup"},
}


@pytest.mark.parametrize("law", LAWS)
def test_answers_are_the_same_wherever_a_prompt_parts(
    pair: tuple[Engine, Engine], law: str
) -> None:
    keeping, plain, num_hits = Served(pair), Served(pair, 0), 0
    for number, length in enumerate((20, 33, 48, 64, 65, 90, 130, 131, 160)):
        for rest in (0, 1, 7, 40):
            prompt = [*TEXT[:length], *OTHER[:rest]]
            name, options = f"{length} {rest}", {"seed": number} | LAWS[law]
            assert keeping.ask(name, prompt, **options) == plain.ask(name, prompt, **options)
            num_hits += keeping.num_cached(name) > 0
            assert plain.num_cached(name) == 0
    assert num_hits >= 15


def test_a_conversation_goes_on_from_its_last_answer(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(pair, patch=monkeypatch)
    prompt = TEXT[:50]
    for turn in range(4):
        answer = served.ask(f"{turn}", prompt)
        num_found = served.num_cached(f"{turn}")
        # All of the turn before but the tokens that were open at its end.
        assert (
            num_found == 0 if turn == 0 else len(prompt) - 5 - 1 - 5 <= num_found < len(prompt) - 5
        )
        prompt = [*prompt, *answer, *OTHER[turn * 5 : turn * 5 + 5]]


def test_the_same_prompt_goes_on_from_its_last_chunk_but_one(pair: tuple[Engine, Engine]) -> None:
    served = Served(pair)
    for name in "ab":
        served.ask(name, TEXT[:50], max_tokens=1, is_enabled=False)
    assert [served.num_cached(name) for name in "ab"] == [0, 48]


def test_the_third_text_of_a_beginning_finds_where_the_first_two_part(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a system of 75 tokens: no chunk ends there but the second's."""
    served = Served(pair, patch=monkeypatch)
    for index, name in enumerate("abc"):
        served.ask(
            name, [*TEXT[:75], *OTHER[30 * index : 30 * index + 20]], max_tokens=1, is_enabled=False
        )
    assert [served.num_cached(name) for name in "abc"] == [0, 0, 75]
    assert served.fed == [16, 16, 16, 16, 16, 15, 16, 16, 16, 16, 11, 16, 4, 16, 4]


def test_whoever_takes_little_room_keeps_what_fits(pair: tuple[Engine, Engine]) -> None:
    """A budget of a few states: texts are evicted all the time, and answers stay."""
    of_token, of_state = pair[0].token_bytes + TOKEN_BYTES, pair[0].state_bytes
    served, plain = Served(pair, 3 * of_state + 150 * of_token), Served(pair, 0)
    for number in range(12):
        start = number % 4 * 20
        prompt = TEXT[start : start + 60 + number]
        assert served.ask(f"{number}", prompt) == plain.ask(f"{number}", prompt)
        counts = served.harness.worker.snapshot().prefixes
        assert counts.num_bytes <= 3 * of_state + 150 * of_token
    assert counts.num_evicted > 0


def test_a_state_that_cannot_be_read_or_written_is_done_without(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Served(pair, 0).ask("plain", TEXT[:60])
    for method in ("read_state", "write_state"):
        served = Served(pair)
        with monkeypatch.context() as patch:
            patch.setattr(pair[0], method, _fail)
            assert [served.ask(name, TEXT[:60]) for name in "ab"] == [expected] * 2
            assert served.num_cached("b") == 0


def test_a_budget_below_one_state_is_told(
    pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    largest = max(engine.state_bytes for engine in pair)
    sampler = CpuSampler(max_batch=1, max_gamma=1, vocab_size=96)
    opened = Pair(target=pair[0], draft=pair[1], sampler=sampler, rounds=None, place="")
    for num_bytes in (largest, largest - 1):
        assert not caplog.messages
        config = ServerConfig(prefix_cache_bytes=num_bytes)
        with caplog.at_level("WARNING"):
            assert _with_prefix_cache(config, opened) == config
    assert "are not kept, --prefix-cache-bytes is less" in caplog.text


def _fail(*_: object) -> None:
    raise MemoryError("planned")


def read_none(start: int, end: int) -> FloatArray:
    return np.zeros((1, end - start, 1), np.float32)


def test_states_of_inner_texts_go_before_leaves() -> None:
    """Of a conversation the last state is what the next turn needs."""
    ids, state = np.arange(12), np.zeros(25, np.float32)
    tree = PrefixTree(3 * state.nbytes + 12 * (4 + TOKEN_BYTES))
    for length in (2, 4, 6, 8, 10):
        tree.insert("", ids[:length], read_none, 4, state.copy)
    found = [tree.find_state("", ids[:length])[0] for length in (2, 4, 6, 8, 10)]
    assert [sum(piece.shape[-2] for piece in pieces) for pieces in found] == [0, 0, 6, 8, 10]
    assert tree.num_evicted == 0


def test_a_text_is_found_up_to_a_state_and_counted_beyond() -> None:
    tree, state = PrefixTree(1 << 20), np.ones(3, np.float32)
    tree.insert("", np.arange(8), read_none, 4, state.copy)
    tree.insert("", np.array([0, 1, 2, 3, 4, 9]), read_none, 4, state.copy)
    pieces, found, num_cached = tree.find_state("", np.array([0, 1, 2, 3, 4, 5]))
    assert (pieces, found, num_cached) == ([], None, 6)
    pieces, found, num_cached = tree.find_state("", np.array([0, 1, 2, 3, 4, 9, 9]))
    assert ([piece.shape[-2] for piece in pieces], num_cached) == ([5, 1], 6)
    np.testing.assert_array_equal(found, state)
