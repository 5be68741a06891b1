"""A draft model that reads the end of a long prompt drafts from that, and changes no answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core import drafting
from outrider.runtime.core.drafting import LEAST_READ, MOST_READ, num_left_out
from outrider.runtime.drafters.model import prompt_end
from outrider.runtime.drafters.model.prompt_end import PromptEndEngine
from outrider.runtime.loop.step_context import ServedEngines

from tests.mutants import assert_caught
from tests.runtime.gamma.test_bounded_loss import Prices, known_costs
from tests.runtime.markov import Harness, counting_logits, erring_logits, limits

GENERATOR = np.random.default_rng(5)
PROMPT = GENERATOR.integers(10, size=60).tolist()
CHEAP = known_costs(Prices(0.02, 0.01))
MAX_ACCEPT, STABLE = ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE


def of_whole_text(prefix: tuple[int, ...]) -> FloatArray:
    """Logits that any other text would change."""
    digest = hashlib.sha256(bytes(prefix)).digest()
    return np.frombuffer(digest, dtype=np.uint8)[:10].astype(np.float32)


class Held(ScriptedEngine):
    """Keeps the most that it was fed of a text, by slot, and counts all of it."""

    num_fed = 0

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.num_fed += sum(len(span.tokens) for span in spans)
        return super().extend(spans)


def check_texts_without_a_beginning() -> None:
    """Any order of calls: logits are those of the text behind what was left out, wherever its slot has come from."""
    rng = np.random.default_rng(1)
    slots = ScriptedEngine(of_whole_text, limits(10, max_batch=3))
    engine = PromptEndEngine(slots)
    texts: list[list[int]] = [[], [], []]
    left_out = [0, 0, 0]
    for _ in range(400):
        slot, other = rng.choice(3, size=2, replace=False).tolist()
        match rng.integers(6):
            case 0:
                texts[slot] = rng.integers(10, size=rng.integers(1, 40)).tolist()
                left_out[slot] = len(texts[slot])
                engine.leave_out(slot, left_out[slot])
            case 1 if len(texts[slot]) > left_out[slot]:
                length = int(rng.integers(0, len(texts[slot]) + 1))
                engine.move_slot(slot, other, length)
                texts[other] = texts[slot][:length]
                left_out[other] = min(left_out[slot], length)
            case 2:
                lengths = [len(text) for text in texts]
                lengths[slot] = int(rng.integers(left_out[slot], len(texts[slot]) + 1))
                engine.trim(lengths)
                texts[slot] = texts[slot][: lengths[slot]]
                assert slots.tokens_of(slot) == tuple(texts[slot][left_out[slot] :])
            case 3 if left_out[slot]:
                with pytest.raises(
                    EngineError, match=f"first {left_out[slot]} tokens were left out"
                ):
                    engine.read_slot(slot, 0, len(texts[slot]))
            case 3 if texts[slot]:
                engine.write_slot(other, 0, engine.read_slot(slot, 0, len(texts[slot])))
                texts[other], left_out[other] = [*texts[slot]], 0
            case _:
                start = int(rng.integers(left_out[slot], len(texts[slot]) + 1))
                if rng.integers(4) == 0:
                    start = int(rng.integers(0, start + 1))
                    left_out[slot] = min(left_out[slot], start)
                added = rng.integers(10, size=4).tolist()
                spans = [
                    Span(slot=one, start=len(texts[one]), tokens=(), num_logits=0)
                    for one in range(3)
                ]
                spans[slot] = Span(slot=slot, start=start, tokens=tuple(added), num_logits=1)
                logits = engine.extend(spans)
                texts[slot] = [*texts[slot][:start], *added]
                seen = tuple(texts[slot][left_out[slot] :])
                assert logits[slot, 0].tolist() == of_whole_text(seen).tolist()


def test_a_text_without_its_beginning_is_what_follows() -> None:
    check_texts_without_a_beginning()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.left_out[destination] = self.left_out[source]\n", "pass\n"),
        ("            self._begin(span.slot, span.start)\n", "            pass\n"),
        ("self._begin(destination, length)", "pass"),
        ("self._held(span.slot, span.start)", "span.start"),
        ("else self._held(slot, length)", "else length"),
        ("        self._begin(slot, start)\n", ""),
    ],
)
def test_a_place_that_is_not_moved_is_caught(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    assert_caught(
        monkeypatch,
        prompt_end,
        old,
        new,
        check_texts_without_a_beginning,
        (AssertionError, EngineError),
    )


def test_no_more_is_read_than_may_be_drafted() -> None:
    assert num_left_out(LEAST_READ, 1) == 0
    assert num_left_out(1000, 1) == 1000 - LEAST_READ
    assert num_left_out(1000, 200) == 800
    assert num_left_out(1000, 1000) == 1000 - MOST_READ
    assert num_left_out(200, 1000) == 0


def harness(**settings: object) -> Harness:
    bounds = limits(10)
    engines = {"target": Held(counting_logits, bounds), "draft": Held(erring_logits, bounds)}
    one = Harness("F3", costs=CHEAP, **engines, **settings)
    _, draft = one.worker._rows._engines
    assert isinstance(draft, PromptEndEngine)

    def check(engine: ScriptedEngine, slot: int, known: tuple[int, ...], computed: int) -> None:
        first = draft.left_out[slot] if engine is one.draft and computed else 0
        assert engine.tokens_of(slot)[: computed - first] == known[first:computed]

    one._check_cache = check
    return one


@pytest.mark.parametrize(("temperature", "mode"), [(0.0, MAX_ACCEPT), (1.0, STABLE)])
def test_answers_are_those_of_plain_decoding(
    temperature: float, mode: ExactnessMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "LEAST_READ", 8)
    one = harness(max_running=3)
    options = {"temperature": temperature, "mode": mode}
    for drafter in ("model", "suffix+model", "model/lookup"):
        for number in range(6):
            name, prompt = f"{drafter}-{number}", PROMPT[: 60 - 9 * number]
            one.submit(name, prompt, max_tokens=5 + 5 * number, drafter=drafter, **options)
        one.run()
        for number in range(6):
            name, prompt = f"{drafter}-{number}", PROMPT[: 60 - 9 * number]
            one.submit(
                f"plain-{name}", prompt, max_tokens=5 + 5 * number, is_enabled=False, **options
            )
        one.run()
        for number in range(6):
            name = f"{drafter}-{number}"
            assert one.tokens(name) == one.tokens(f"plain-{name}")
            assert one.finished(name).report.num_drafted > 0


def test_a_draft_engine_that_fails_reads_the_end_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "LEAST_READ", 8)
    one = harness(max_running=3)
    assert isinstance(one.draft, Held)
    one.draft.fail_at(0, 3, 7)
    prompts = {f"{number}": PROMPT[: 60 - 7 * number] for number in range(5)}
    for name, prompt in prompts.items():
        one.submit(name, prompt, max_tokens=20, drafter="suffix+model")
    one.run()
    for name, prompt in prompts.items():
        one.submit(f"plain-{name}", prompt, max_tokens=20, is_enabled=False)
    one.run()
    assert all(one.tokens(name) == one.tokens(f"plain-{name}") for name in prompts)


def test_a_short_prefix_that_was_kept_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "LEAST_READ", 8)
    one = harness(prefix_cache_bytes=1 << 20)
    one.submit("short", PROMPT[:20], max_tokens=4, drafter="model", gamma=2, cache_scope="us")
    one.run()
    assert isinstance(one.draft, Held)
    before = one.draft.num_fed
    one.submit("long", PROMPT, max_tokens=8, drafter="model", cache_scope="us")
    one.run()
    assert one.finished("long").num_cached >= 16
    assert one.finished("long").report.num_drafted > 0
    # The end of the prompt, and what was drafted.
    assert one.draft.num_fed - before < 30


@pytest.mark.parametrize("way", [{}, {"gamma": 3}, {"num_samples": 2}])
def test_a_prompt_is_read_whole_where_drafts_decide_an_answer_or_a_group_shares_it(
    way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "LEAST_READ", 8)
    one = harness()
    if "num_samples" in way:
        one.submit_group("one", PROMPT, way["num_samples"], max_tokens=20, drafter="model")
    else:
        one.submit("one", PROMPT, max_tokens=20, drafter="model", **way)
    one.run()
    assert isinstance(one.draft, Held)
    assert (one.draft.num_fed >= len(PROMPT)) is bool(way)
    assert one.draft.num_fed > 8


def test_a_text_without_its_beginning_is_not_kept_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafting, "LEAST_READ", 8)
    one = harness(prefix_cache_bytes=1 << 20)
    for name in ("first", "second"):
        one.submit(name, PROMPT, max_tokens=20, drafter="model", cache_scope="us")
        one.run()
    assert one.finished("second").num_cached > 0
    assert one.tokens("first") == one.tokens("second")
    assert not caplog.text


@pytest.mark.parametrize("max_source", [0, 4])
def test_behind_a_source_all_is_read(max_source: int) -> None:
    bounds = replace(limits(10), max_source=max_source)
    engines = ServedEngines(
        target=ScriptedEngine(counting_logits, bounds),
        draft=ScriptedEngine(erring_logits, bounds),
        sampler=harness().worker._parts.sampler,
        max_gamma=4,
    )
    has_ends = isinstance(engines.with_prompt_ends().draft, PromptEndEngine)
    assert has_ends is (max_source == 0)
