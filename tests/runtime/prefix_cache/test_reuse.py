"""Requests that begin as earlier ones did are not fed that again, and answer as if they had been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core import request as request_module
from outrider.runtime.core.errors import Cancelled
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.prefix_cache import reuse as prefixes
from outrider.runtime.prefix_cache.reuse import FEWEST, num_usable

from tests.mutants import assert_caught
from tests.runtime.grammar.letters import constraints, regex
from tests.runtime.markov import PAIRS, Harness, limits, spec
from tests.runtime.pair import PairHarness

ROOM = 1 << 20
GENERATOR = np.random.default_rng(3)
TEXT = GENERATOR.integers(4, size=60).tolist()
OTHER = GENERATOR.integers(4, size=60).tolist()
STABLE, MAX_ACCEPT = ExactnessMode.SEED_STABLE, ExactnessMode.MAX_ACCEPT
LENIENT = ExactnessMode.LENIENT


class Fed(ScriptedEngine):
    """Counts the tokens that it is fed, and fails copies when told to."""

    num_fed = 0
    fails_reads = fails_writes = False

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.num_fed += sum(len(span.tokens) for span in spans)
        return super().extend(spans)

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        if self.fails_reads:
            raise EngineError("no memory for a copy")
        return super().read_slot(slot, start, end)

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        if self.fails_writes:
            super().write_slot(slot, start, values[:1])
            raise EngineError("a copy was cut short")
        super().write_slot(slot, start, values)


def harness(num_bytes: int = ROOM, **settings: object) -> Harness:
    _, target, draft = PAIRS["F4"]
    bounds = limits(4)
    engines = {"target": Fed(target, bounds), "draft": Fed(draft, bounds)}
    return Harness("F4", **engines, prefix_cache_bytes=num_bytes, **settings)


def ask(
    one: Harness, name: str, prompt: Sequence[int], *, scope: str = "us", **options: object
) -> list[int]:
    """Tokens of a request alone; the caches of all rows are checked after every step."""
    one.submit(name, prompt, cache_scope=scope, **options)
    one.run()
    one.check_is_idle()
    return one.tokens(name)


def num_cached(one: Harness, name: str) -> int:
    return one.finished(name).num_cached


LAWS = {
    "greedy": {"gamma": 3, "drafter": "model"},
    "plain": {"is_enabled": False, "temperature": 1.0},
    "seed_stable": {"gamma": 3, "drafter": "model", "temperature": 1.0, "mode": STABLE},
    "max_accept": {"gamma": 3, "drafter": "model", "temperature": 1.0},
    "lookup": {"gamma": 3, "drafter": "lookup", "temperature": 1.0},
    "lenient": {
        "gamma": 3,
        "drafter": "model",
        "temperature": 1.0,
        "mode": LENIENT,
        "lenience": 0.5,
    },
    "lenient greedy": {"gamma": 3, "drafter": "model", "mode": LENIENT, "lenience": 0.3},
}


@pytest.mark.parametrize("law", LAWS)
def test_answers_are_the_same_wherever_a_prompt_parts(law: str) -> None:
    """Prompts of all lengths around a chunk of 4, over texts of all lengths; each its own seed."""
    plain, keeping = harness(0, max_batch=1), harness(max_batch=1)
    hits = 0
    for length in range(17, 60, 3):
        ask(keeping, f"base {length}", TEXT[:length], scope=str(length), max_tokens=1)
        for total in (length, length + 1, length + 3, min(length + 9, 60)):
            prompt = [*TEXT[:length], *OTHER[length:total]]
            options = {"seed": total, "max_tokens": 20, "scope": str(length), **LAWS[law]}
            name = f"{length} {total}"
            assert ask(keeping, name, prompt, **options) == ask(plain, name, prompt, **options)
            hits += num_cached(keeping, name) > 0
            assert num_cached(plain, name) == 0
    assert hits >= 48


def test_a_prefix_is_not_fed_again() -> None:
    one = harness()
    ask(one, "first", TEXT[:40], max_tokens=1)
    one.target.num_fed = 0
    ask(one, "second", [*TEXT[:40], *OTHER[:8]], max_tokens=1)
    assert num_cached(one, "second") == 40
    assert one.target.num_fed == 8
    one.target.num_fed = 0
    ask(one, "again", TEXT[:40], max_tokens=1)
    assert (num_cached(one, "again"), one.target.num_fed) == (39, 1)


def test_a_conversation_is_never_fed_twice() -> None:
    """Target and draft compute every token once, but the last of an answer, which was not computed yet."""
    one = harness(prefill_chunk=16)
    text, cached = list(TEXT[:20]), [0]
    for turn in range(4):
        answer = ask(one, str(turn), text, max_tokens=5, gamma=3, drafter="model")
        cached.append(len(text) + len(answer) - 1)
        assert num_cached(one, str(turn)) == cached[turn]
        text += [*answer, *OTHER[turn : turn + 3]]
    drafts = one.worker.snapshot().num_drafted
    # The text but the last token of the last answer and what follows it, and drafts that were rejected.
    assert one.target.num_fed <= len(text) - 4 + drafts
    assert one.draft.num_fed <= len(text) - 4 + drafts


def test_of_prompts_that_arrive_together_one_is_fed_and_the_others_find_it() -> None:
    one = harness()
    for name in range(4):
        prompt = [*TEXT[:40], name, 1]
        one.submit(str(name), prompt, max_tokens=3, cache_scope="us", is_enabled=False)
    one.run()
    assert [num_cached(one, str(name)) for name in range(4)] == [0, 40, 40, 40]
    assert one.target.num_fed == 40 + 4 * (2 + 2)


@pytest.mark.parametrize("chunk", [4, 16])
def test_completions_of_one_prompt_are_the_same_behind_a_hit(chunk: int) -> None:
    plain, keeping = harness(0, prefill_chunk=chunk), harness(prefill_chunk=chunk)
    for length in range(20, 36):
        told = []
        for one in (plain, keeping):
            name, laws = f"g{length}", LAWS["max_accept"]
            ask(one, f"first {length}", TEXT[:length], max_tokens=1)
            one.submit_group(name, TEXT[:length], 3, max_tokens=9, cache_scope="us", **laws)
            one.run()
            one.check_is_idle()
            names = [other for other in one.events if other.startswith(name)]
            assert len(names) == 3
            told.append([one.tokens(other) for other in names])
            found = {num_cached(one, other) for other in names}
        assert told[0] == told[1]
        assert len(found) == 1
        assert length - 1 - chunk <= found.pop() <= length - 2


def test_scopes_share_nothing() -> None:
    one = harness()
    ask(one, "ours", TEXT[:40])
    ask(one, "theirs", TEXT[:40], scope="them")
    ask(one, "nobody's", TEXT[:40], scope="")
    ask(one, "nobody's again", TEXT[:40], scope="")
    assert not any(num_cached(one, name) for name in ("theirs", "nobody's", "nobody's again"))
    ask(one, "ours again", TEXT[:40])
    assert num_cached(one, "ours again") == 39


def test_few_tokens_are_not_worth_a_copy() -> None:
    one = harness()
    ask(one, "first", TEXT[:40])
    ask(one, "short", [*TEXT[: FEWEST - 1], (TEXT[FEWEST - 1] + 1) % 4], max_tokens=1)
    assert num_cached(one, "short") == 0
    ask(one, "long", [*TEXT[:FEWEST], (TEXT[FEWEST] + 1) % 4], max_tokens=1)
    assert num_cached(one, "long") == FEWEST


def test_who_wants_logprobs_of_the_prompt_is_fed_all_of_it() -> None:
    one = harness()
    ask(one, "first", TEXT[:40])
    ask(one, "scored", TEXT[:40], num_prompt_logprobs=1)
    assert num_cached(one, "scored") == 0
    assert one.worker.snapshot().prefixes.num_queried == 40


def test_what_a_cancelled_request_computed_is_kept() -> None:
    one = harness()
    one.submit("gone", TEXT[:30], max_tokens=40, cache_scope="us", is_enabled=False)
    for _ in range(16):
        one.worker.run_step()
    told = one.tokens("gone")
    one.worker.cancel("internal-gone", Cancelled("client"))
    one.run()
    one.check_is_idle()
    assert len(told) > 3
    ask(one, "again", [*TEXT[:30], *told, 1, 2], max_tokens=1)
    assert num_cached(one, "again") == 30 + len(told) - 1


def test_a_prompt_that_is_cancelled_while_it_is_fed_is_kept_as_far_as_it_was() -> None:
    one = harness()
    one.submit("gone", TEXT[:40], cache_scope="us")
    for _ in range(6):
        one.worker.run_step()
    one.worker.cancel("internal-gone", Cancelled("client"))
    one.run()
    ask(one, "again", TEXT[:40], max_tokens=1)
    assert num_cached(one, "again") == 24


@pytest.mark.parametrize("failing", ["fails_reads", "fails_writes"])
@pytest.mark.parametrize("engine", ["target", "draft"])
def test_copies_that_fail_change_no_answer(failing: str, engine: str) -> None:
    one, plain = harness(), harness(0)
    options = {"gamma": 3, "drafter": "model", "max_tokens": 5}
    if failing == "fails_writes":
        ask(one, "first", TEXT[:40], **options)
    setattr(getattr(one, engine), failing, True)
    for name in ("again", "once more"):
        assert ask(one, name, TEXT[:40], **options) == ask(plain, name, TEXT[:40], **options)
    assert one.finished("once more").num_cached == (0 if engine == "target" else 39)
    setattr(getattr(one, engine), failing, False)
    for name in ("kept", "found"):
        assert ask(one, name, TEXT[:40], **options) == plain.tokens("again")
    assert num_cached(one, "found") == 39


def test_a_step_that_fails_behind_a_hit_feeds_the_prompt_again() -> None:
    one, plain = harness(), harness(0)
    prompt = [*TEXT[:40], *OTHER[:9]]
    expected = ask(plain, "plain", prompt, max_tokens=5)
    ask(one, "first", TEXT[:40])
    one.target.fail_at(one.target.num_extends)
    assert ask(one, "second", prompt, max_tokens=5) == expected
    assert ask(one, "third", prompt, max_tokens=5) == expected
    assert num_cached(one, "third") == 48


def test_memory_stays_within_the_budget() -> None:
    most = 1000
    one = harness(most)
    for index in range(40):
        prompt = GENERATOR.integers(4, size=int(GENERATOR.integers(17, 60))).tolist()
        ask(one, str(index), prompt, max_tokens=3, gamma=2, drafter="model")
        assert 0 < one.worker.snapshot().prefixes.num_bytes <= most
    assert one.worker.snapshot().prefixes.num_evicted > 10


def test_counts_are_told() -> None:
    one = harness()
    ask(one, "first", TEXT[:40], max_tokens=1)
    ask(one, "second", TEXT[:40], max_tokens=1)
    counts = one.worker.snapshot().prefixes
    assert (counts.num_queried, counts.num_found) == (80, 39)
    assert counts.num_bytes == 40 * (4 + 8)


def test_a_draft_that_decides_the_answer_begins_as_if_nothing_were_kept() -> None:
    one = harness()
    ask(one, "first", TEXT[:40], gamma=3, drafter="model")
    one.draft.num_fed = 0
    ask(one, "drawn", TEXT[:40], gamma=3, drafter="model", temperature=1.0, max_tokens=12)
    assert one.draft.num_fed >= 40
    one.draft.num_fed = 0
    ask(one, "greedy", TEXT[:40], gamma=3, drafter="model", max_tokens=12)
    assert one.draft.num_fed < 40


class Marking(ScriptedEngine):
    """Marks what it computes behind a side branch: there a real engine's cache may have other bits."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.num_exact = self.limits.max_context

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        start = self._trees[slot].start
        # In a chain's order of sums: a node that follows the one before it, from the root on.
        in_order = [node == place for place, node in enumerate(path)]
        if not all(in_order):
            self.num_exact = min(self.num_exact, start + in_order.index(False))
        super().keep_path(slot, path)


def check_kept_of_trees() -> None:
    """What is found again of a text that was verified as trees is what the engine computed as chains do."""
    _, target, draft = PAIRS["F4"]
    bounds = replace(limits(4), max_tree_nodes=9)
    engine = Marking(target, bounds)
    one = Harness("F4", target=engine, draft=ScriptedEngine(draft, bounds), prefix_cache_bytes=ROOM)
    num_cut = 0
    for seed in range(8):
        engine.num_exact = bounds.max_context
        options = {"drafter": "tree", "gamma": 3, "temperature": 1.0, "seed": seed}
        scope = str(seed)
        one.submit(scope, TEXT[:20], max_tokens=24, cache_scope=scope, **options)
        one.run()
        text = [*TEXT[:20], *one.tokens(scope)]
        num_exact = min(engine.num_exact, len(text) - 1)
        num_cut += num_exact < len(text) - 1
        ask(one, f"again {seed}", text, scope=scope, max_tokens=1)
        assert num_cached(one, f"again {seed}") == num_exact
    assert num_cut > 3


def test_of_a_text_with_trees_what_chains_wrote_is_kept() -> None:
    check_kept_of_trees()


@pytest.mark.parametrize(
    "new",
    ["self.sequence.num_known + num_leading + 1", "self.sequence.num_known + num_leading - 1"],
    ids=["one too many", "one too few"],
)
def test_a_leading_chain_of_another_length_is_caught(
    monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    old = "self.sequence.num_known + num_leading"
    assert_caught(monkeypatch, request_module, old, new, check_kept_of_trees)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 16])
def test_a_prompt_keeps_its_way_to_the_first_token(chunk: int) -> None:
    def is_left(missing: int) -> bool:
        """Whether a token is left behind the chunks (``runtime.core.scheduler.plan_prefill``)."""
        while missing > 1:
            missing -= min(missing, chunk)
        return missing == 1

    for num_prompt in range(2, 60):
        for length in range(num_prompt):
            usable = num_usable(length, num_prompt, chunk)
            assert length - chunk <= usable <= length
            if usable > 0:
                assert is_left(num_prompt - usable) == is_left(num_prompt)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        if needs_way or request.group.followers:", "        if False:"),
        (
            "and request.speculation.gamma > 0 and not needs_way",
            "and request.speculation.gamma > 0",
        ),
        ("tokens[: request.sequence.num_known - 1]", "tokens[: request.sequence.num_known - 2]"),
        ("scope = (index, request.spec.cache_scope)", "scope = (0, 'us')"),
        ("is not ExactnessMode.SEED_STABLE", "is ExactnessMode.MAX_ACCEPT"),
        ("not is_lenient and", ""),
    ],
    ids=["no way", "early drafts", "one too few", "one scope", "lenient", "lenient greedy"],
)
def test_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    def killer() -> None:
        test_a_prefix_is_not_fed_again()
        test_scopes_share_nothing()
        test_a_draft_that_decides_the_answer_begins_as_if_nothing_were_kept()
        for law in ("max_accept", "lenient", "lenient greedy"):
            test_answers_are_the_same_wherever_a_prompt_parts(law)

    assert_caught(monkeypatch, prefixes, old, new, killer)


@pytest.fixture(scope="module")
def over_bundle(tiny_bundle: Path) -> Callable[[int], PairHarness]:
    bundle = load_bundle(tiny_bundle)
    pair = open_pair(bundle, sampler="host", max_batch=2)
    return lambda num_bytes: PairHarness.over(
        pair, bundle, max_running=2, prefill_chunk=8, prefix_cache_bytes=num_bytes
    )


def test_answers_of_a_bundle_are_the_same_at_every_split_point(
    over_bundle: Callable[[int], PairHarness],
) -> None:
    """Log-probabilities too, bit for bit: greedy with drafts, and drawn with drafts of a fixed gamma."""
    first, second = (GENERATOR.integers(512, size=40).tolist() for _ in range(2))
    params = {"greedy": SamplingParams(temperature=0.0), "drawn": SamplingParams()}

    def request(name: str, prompt: Sequence[int], law: str) -> RequestSpec:
        options = {"params": params[law], "gamma": 2, "num_logprobs": 1, "cache_scope": "us"}
        return replace(spec(name, prompt, max_tokens=4, **options), internal_id=name)

    def answers(one: PairHarness) -> list[object]:
        told: list[object] = []
        for split in range(FEWEST, 40, 3):
            for law in params:
                name = f"{law} {split}"
                one.answers([request(name, [*first[:split], *second[split:]], law)])
                tokens = [token for event in one.events[name][:-1] for token in event.tokens]
                told.append([(token.token, token.logprobs) for token in tokens])
        return told

    keeping = over_bundle(ROOM)
    keeping.answers([request("base", first, "greedy")])
    found = answers(keeping)
    assert found == answers(over_bundle(0))
    splits = [keeping.finished(f"greedy {split}").num_cached for split in range(FEWEST, 40, 3)]
    assert splits == [*range(FEWEST, 40, 3)]


def test_what_is_kept_of_a_draft_model_lies_under_its_own_tokens() -> None:
    """Behind forced tokens too, with a draft model that likes least what the target likes best."""
    _, target, _ = PAIRS["F6"]
    bounds = limits(6)
    one = Harness(
        "F6",
        target=ScriptedEngine(target, bounds),
        draft=ScriptedEngine(lambda prefix: -target(prefix), bounds),
        constraints=constraints(),
        prefix_cache_bytes=ROOM,
        prefill_chunk=16,
    )
    cache = one.worker._rows.prefixes
    assert cache is not None
    lengths = []
    for max_tokens in range(8, 24):
        scope = str(max_tokens)
        one.submit(
            scope, TEXT[:20], cache_scope=scope, drafter="model", gamma=4, max_tokens=max_tokens,
            end_tokens=(5,), grammar=regex("(abc(a|b)|cab(b|c)){5}"),
        )  # fmt: skip
        while one.worker.run_step():  # no other audit than the one below
            pass
        text = [*TEXT[:20], *one.tokens(scope)]
        kept = [int(t) for piece in cache._tree.find((1, scope), text) for t in piece.ravel()]
        assert kept == text[: len(kept)]
        lengths.append(len(kept))
    assert max(lengths) > 25
