"""Constrained answers: the target's law under the masks, exactly, whoever drafts and whoever runs beside.

What a constraint forces is known without being judged, and is the token that the masked law would have given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ConstraintConflict, RequestError, UnsupportedOption
from outrider.runtime.core.events import FinishReason, Progressed, Provenance
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.text.suffix_array import write_datastore
from outrider.runtime.grammar.constraint import GrammarConstraints
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TokenizersCodec

from tests.engines.sampling import chosen_noise
from tests.runtime.drafters.test_equality import NAMES
from tests.runtime.drafters.test_laws import Trailing
from tests.runtime.grammar.letters import END, TEXTS, V, bits, constraints, regex, tokenizer
from tests.runtime.markov import PAIRS, Harness, LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
GRAMMARS = ("(abc(a|b)){1,5}", "((a|b)c+){1,4}", "abcabcabc(a|b)abc", "(a|c)+")
ENDED = SamplingParams(temperature=0.0, end_token_ids=(END,))


def params_of(temperature: float, **others: object) -> SamplingParams:
    return SamplingParams(temperature=temperature, end_token_ids=(END,), **others)


def forms_harness(**options: object) -> Harness:
    return Harness("F6", constraints=constraints(), decoder=TokenizersCodec(tokenizer()), **options)


# The law of answers, by enumeration.

LETTERS, STOP = ("a", "b", "c"), 3
"""Without tokens of two letters: two choices, and what is forced between them."""
FORM = "(b|c)a(a|b)"
TABLE = np.array([[2, 3, 4, 1], [1, 2, 4, 3], [3, 1, 2, 4], [1, 1, 1, 1]], dtype=np.float64)
TABLE /= TABLE.sum(axis=1, keepdims=True)
DRAFT_TABLE = 0.5 * TABLE + 0.5 * TABLE[:, [1, 0, 3, 2]]
NUM_TOKENS = 3
SMALL = GrammarConstraints(tokenizer(LETTERS), 4, (STOP,))
# Drafter, nodes of trees, whole blocks, and the tokens that may be forced: without any, all are judged.
LAW_CASES = [
    ("none", 0, False, 8),
    ("none", 0, False, 0),
    ("model", 0, False, 8),
    ("model", 0, False, 0),
    ("model", 0, True, 0),
    ("model/lookup", 0, False, 8),
    ("suffix", 16, False, 8),
    ("bigram", 0, False, 8),
    ("bigram", 0, True, 0),
]


def logits_of(table: np.ndarray):
    logits = np.log(table).astype(np.float32)
    return lambda prefix: logits[prefix[-1]]


def masked_law() -> dict[tuple[int, ...], float]:
    """The law of answers to ``PROMPT``: the target's rows, masked and renormalised, token by token."""
    found: dict[tuple[int, ...], float] = {}

    def walk(answer: tuple[int, ...], mass: float) -> None:
        if len(answer) == NUM_TOKENS or STOP in answer:
            found[answer] = found.get(answer, 0.0) + mass
            return
        one = SMALL.constraint(regex(FORM))
        one.commit(answer)
        allowed = sorted(bits(one.masks(())[0], 4))
        row = TABLE[(*PROMPT, *answer)[-1]]
        for token in allowed:
            walk((*answer, token), mass * row[token] / row[allowed].sum())

    walk((), 1.0)
    return found


def answer(case, sampler: CpuSampler, seed: int = 7) -> tuple[int, tuple[int, ...]]:
    """Return how many tokens were drafted for an answer, and the answer."""
    drafter, max_nodes, verifies_block, max_forced = case
    bounds = replace(limits(4), max_tree_nodes=max_nodes, max_batch=1)
    worker = Worker(
        ServedEngines(
            target=ScriptedEngine(logits_of(TABLE), bounds),
            draft=ScriptedEngine(logits_of(DRAFT_TABLE), bounds),
            sampler=sampler,
            max_gamma=8,
        ),
        # One token is left behind the chunk, so that the first of the answer may be drafted too.
        config=ServerConfig(prefill_chunk=len(PROMPT) - 1, drafting=DRAFTING),
        decoder=LetterDecoder(),
        constraints=SMALL,
    )
    worker._factory = replace(worker._factory, max_forced=max_forced)
    events: list[object] = []
    speculation = SpeculationParams(
        drafter=drafter, gamma=2, mode=ExactnessMode.MAX_ACCEPT, verifies_block=verifies_block
    )
    params = SamplingParams(end_token_ids=(STOP,))
    request = spec(
        "a", PROMPT, max_tokens=NUM_TOKENS, params=params, speculation=speculation, seed=seed
    )
    worker.submit(replace(request, grammar=regex(FORM)), events.append)
    while worker.run_step():
        pass
    told = [event for event in events if isinstance(event, Progressed)]
    num_drafted = sum(len(event.trace.draft_tokens) for event in told)
    return num_drafted, tuple(token.token for event in told for token in event.tokens)


DRAFTING = DraftingConfig(
    lookup_min_ngram=1, min_prob=0.02, suffix_factor=4.0, min_node_prob=0.01, tree_nodes=6
)


@pytest.mark.usefixtures("corpora_opened_once")
@pytest.mark.parametrize("case", LAW_CASES, ids=lambda case: "-".join(map(str, case)))
def test_answers_have_the_masked_law(case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_datastore([[1, 0, 0, 2, 0, 1, 3, 2, 2, 1]], tmp_path / "store", vocab_size=4)
    drafting = replace(DRAFTING, datastore=str(tmp_path / "store"))
    monkeypatch.setitem(globals(), "DRAFTING", drafting)
    # Few cuts, in the order of tokens: a coarse grid finds them all.
    monkeypatch.setattr(chosen_noise, "GRID", [0.0, *(np.arange(8) + 0.5) / 8, 1.0 - 2.0**-53])
    monkeypatch.setattr(chosen_noise, "NUM_BISECTIONS", 15)
    num_drafted = 0

    def run(noise):
        nonlocal num_drafted
        drafted, tokens = answer(case, Trailing(noise, 4))
        num_drafted += drafted
        return tokens

    found = chosen_noise.law_of(run)
    assert (num_drafted > 0) == (case[0] != "none"), "a drafter that never drafts proves nothing"
    assert distance(found, masked_law()) < 1e-4


def test_sampled_trees_have_the_masked_law() -> None:
    """By many seeds: a tree's draws are too many to enumerate here (``tests/engines/sampling`` does for the judge)."""
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = 0
    sampler = CpuSampler(max_batch=1, max_gamma=8, vocab_size=4)
    for seed in range(NUM_SEEDS):
        drafted, tokens = answer(("tree", 16, False, 8 * (seed % 2)), sampler, seed)
        num_drafted += drafted
        counts[tokens] += 1
    expected = masked_law()
    assert counts.keys() == expected.keys()
    assert num_drafted >= NUM_SEEDS
    for tokens, mass in expected.items():
        error = (mass * (1.0 - mass) / NUM_SEEDS) ** 0.5
        assert abs(counts[tokens] / NUM_SEEDS - mass) < 4.0 * error


NUM_SEEDS = 200


# Answers token for token.


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> DraftingConfig:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, V, 60).tolist(), [3, 2, 0, 3, 2, 1] * 4]
    write_datastore(texts, folder, vocab_size=V)
    return DraftingConfig(
        datastore=str(folder), min_prob=0.02, suffix_factor=4.0, trees_may_round_differently=True
    )


GREEDY = (0.0, ExactnessMode.MAX_ACCEPT)
SHARED_NOISE = (1.0, ExactnessMode.SEED_STABLE)


@cache
def plain(way: tuple[float, ExactnessMode], text: str, seed: int) -> list[int]:
    """An answer alone, without drafts, every token judged."""
    harness = forms_harness()
    harness.worker._factory = replace(harness.worker._factory, max_forced=0)
    harness.submit(
        "only", PROMPT, seed=seed, max_tokens=14, params=params_of(way[0]), mode=way[1],
        is_enabled=False, grammar=regex(text),
    )  # fmt: skip
    harness.run()
    assert harness.finished("only").report.num_forced == 0
    return harness.tokens("only")


def submit_all(harness: Harness, way: tuple[float, ExactnessMode], drafter: str, gamma: int) -> int:
    """Submit a request of each grammar, and one without a constraint; return how many."""
    for index, text in enumerate([*GRAMMARS, ""]):
        harness.submit(
            f"{gamma}-{index}", PROMPT, seed=index, max_tokens=14, params=params_of(way[0]),
            grammar=regex(text) if text else None,
            speculation=SpeculationParams(
                drafter=drafter, gamma=gamma, mode=way[1], is_enabled=gamma > 0,
                reference_tokens=(3, 2, 0, 3, 2, 1, 2),
            ),
        )  # fmt: skip
    return len(GRAMMARS) + 1


NO_DATASTORE = DraftingConfig(min_prob=0.02, trees_may_round_differently=True)


def check_answers(
    drafter: str,
    way: tuple[float, ExactnessMode],
    drafting: DraftingConfig,
    *,
    max_tree_nodes: int = 16,
    is_contrary: bool = False,
) -> Harness:
    """Requests of all grammars together get the very tokens that each has alone and judged.

    A contrary draft model likes least what the target likes best.
    """
    vocab_size, target_logits, draft_logits = PAIRS["F6"]
    if is_contrary:
        draft_logits = lambda prefix: -target_logits(prefix)  # noqa: E731
    bounds = replace(limits(vocab_size), max_tree_nodes=max_tree_nodes)
    harness = forms_harness(
        target=ScriptedEngine(target_logits, bounds),
        draft=ScriptedEngine(draft_logits, bounds),
        drafting=drafting,
    )
    for gamma in (0, 1, 4):
        submit_all(harness, way, drafter, gamma)
        harness.run()
        for index, text in enumerate(GRAMMARS):
            assert harness.tokens(f"{gamma}-{index}") == plain(way, text, index), (gamma, text)
    harness.check_is_idle()
    return harness


@pytest.mark.parametrize("way", [GREEDY, SHARED_NOISE], ids=["greedy", "shared noise"])
@pytest.mark.parametrize("drafter", NAMES)
def test_no_drafter_and_no_neighbour_changes_a_token(
    drafter: str, way: tuple[float, ExactnessMode], drafting: DraftingConfig
) -> None:
    check_answers(drafter, way, drafting)


def test_a_draft_that_follows_the_form_is_not_cut() -> None:
    """18 tokens are drafted, 12 where the drafter's masks stand still: the rest of these drafts does not fit."""
    harness = check_answers("model", GREEDY, NO_DATASTORE)
    reports = [harness.finished(f"4-{index}").report for index in range(len(GRAMMARS))]
    assert sum(report.num_drafted for report in reports) > 15


def test_trees_stand_behind_what_was_forced() -> None:
    """And both together are no larger than the engine takes."""
    for drafter in ("lookahead", "suffix", "tree"):
        harness = check_answers(drafter, GREEDY, NO_DATASTORE, max_tree_nodes=8)
        reports = [harness.finished(f"4-{index}").report for index in range(len(GRAMMARS))]
        assert sum(report.num_forced for report in reports) > 5
        assert sum(report.num_drafted for report in reports) > 10


@pytest.mark.parametrize("drafter", ["model", "model/lookup", "tree", "ouroboros", "suffix+model"])
def test_no_rejected_draft_stays_in_the_drafts_cache_under_forced_tokens(drafter: str) -> None:
    """``check_invariants`` reads both caches after every step."""
    harness = check_answers(drafter, GREEDY, NO_DATASTORE, is_contrary=True)
    reports = [harness.finished(f"4-{index}").report for index in range(len(GRAMMARS))]
    assert sum(report.num_forced for report in reports) > 5
    assert any(report.num_accepted < report.num_drafted for report in reports)


@pytest.mark.parametrize("failing", range(12))
def test_a_failed_pass_changes_no_token(failing: int) -> None:
    """Rows are fed again with what was forced behind their last judged token, and judged by the same masks."""
    harness = forms_harness()
    harness.target.fail_at(failing)
    submit_all(harness, GREEDY, "model", 3)
    harness.run()
    for index, text in enumerate(GRAMMARS):
        assert harness.tokens(f"3-{index}") == plain(GREEDY, text, index), text


def test_texts_have_the_form() -> None:
    import re

    harness = forms_harness()
    submit_all(harness, SHARED_NOISE, "model", 3)
    harness.run()
    for index, text in enumerate(GRAMMARS):
        finished = harness.finished(f"3-{index}")
        if finished.reason is FinishReason.STOP_TOKEN:
            assert re.fullmatch(text, harness.text(f"3-{index}"))


# What is forced.


def one(text: str, **options: object) -> Harness:
    """Serve one request with a constraint, without drafts."""
    harness = forms_harness()
    given = {"max_tokens": 30, "params": ENDED, "is_enabled": False, **options}
    harness.submit("one", PROMPT, grammar=regex(text), **given)
    harness.run()
    return harness


def emitted(harness: Harness) -> list[tuple[str, Provenance]]:
    return [
        (token.token, token.provenance)
        for event in harness.events["one"]
        if isinstance(event, Progressed)
        for token in event.tokens
    ]


def test_a_forced_run_takes_one_pass_and_is_told_apart() -> None:
    """The first token comes with the prompt; all behind it are forced, the end too."""
    harness = one("abcabcabc")
    assert [provenance for _, provenance in emitted(harness)] == [
        Provenance.BONUS,
        *[Provenance.FORCED] * 6,
    ]
    finished = harness.finished("one")
    assert harness.text("one") == "abcabcabc"
    assert (finished.reason, finished.stop, finished.num_output) == (
        FinishReason.STOP_TOKEN,
        END,
        7,
    )
    report = finished.report
    assert (report.num_steps, report.num_emitted, report.num_forced) == (0, 0, 6)


def test_passes_read_forced_tokens_along() -> None:
    """Two choices of one token each, with nine tokens forced around them: three passes, the prompt's among them."""
    harness = one("(a|c)bcbcbc(a|c)bcbc")
    traces = [e.trace for e in harness.events["one"] if isinstance(e, Progressed)]
    # "b" behind "a" would be one token with it: the tokenizer's own split is the constraint's.
    assert len(traces) <= 3
    assert harness.finished("one").report.num_forced >= 5
    assert sum(len(trace.forced) for trace in traces) == harness.finished("one").report.num_forced
    assert harness.text("one")[1:7] == "bcbcbc"


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_ends_a_forced_run(max_tokens: int) -> None:
    harness = one("abcabcabc", max_tokens=max_tokens)
    assert harness.tokens("one") == [3, 2, 3, 2, 3, 2, END][:max_tokens]
    reason = FinishReason.STOP_TOKEN if max_tokens == 7 else FinishReason.LENGTH
    assert harness.finished("one").reason is reason


@pytest.mark.parametrize(("stop", "text"), [("ca", "ab"), ("abca", ""), ("cab", "ab"), ("b", "a")])
def test_a_stop_string_ends_a_forced_run(stop: str, text: str) -> None:
    """What stands behind it was never said."""
    harness = one("abcabcabc", stop_strings=(stop,))
    finished = harness.finished("one")
    assert (finished.reason, finished.stop) == (FinishReason.STOP_STRING, stop)
    assert harness.text("one") == text
    num_tokens = len(harness.tokens("one"))
    assert finished.num_output == num_tokens
    spelled = "".join(TEXTS[token] for token in harness.tokens("one"))
    assert stop in spelled
    assert stop not in spelled[: -len(TEXTS[harness.tokens("one")[-1]])]
    assert finished.report.num_forced == num_tokens - 1


def test_a_stop_token_ends_a_forced_run() -> None:
    params = replace(ENDED, end_token_ids=(END, 2))
    harness = one("abcabcabc", params=params)
    assert harness.tokens("one") == [3, 2]
    assert harness.finished("one").stop == 2


def test_the_form_wins_over_min_tokens() -> None:
    harness = one("abc", params=replace(ENDED, min_tokens=9))
    assert harness.tokens("one") == [3, 2, END]
    # Judged as forced.
    assert one("a|b", params=replace(ENDED, min_tokens=9)).finished("one").num_output == 2


def test_min_tokens_holds_where_the_form_goes_on() -> None:
    harness = one("a+", params=replace(ENDED, min_tokens=5))
    assert harness.tokens("one")[:5] == [0] * 5


def test_log_probabilities_are_told_of_every_token() -> None:
    """They come out of a pass over each token, so that nothing is forced without being judged."""
    harness = one("abcabcabc", num_logprobs=1)
    told = [t for e in harness.events["one"] if isinstance(e, Progressed) for t in e.tokens]
    assert [token.token for token in told] == [3, 2, 3, 2, 3, 2, END]
    assert all(token.logprobs is not None for token in told)
    assert harness.finished("one").report.num_forced == 0


@pytest.mark.parametrize(
    "against",
    [{"bad_words": ((3, 2),)}, {"bad_words": ((3,),)}, {"allowed_token_ids": (2, END)}],
    ids=str,
)
def test_what_a_form_forces_against_the_request_is_a_conflict(against: dict[str, object]) -> None:
    harness = one("abcabc", params=replace(ENDED, **against))
    assert isinstance(harness.error("one"), ConstraintConflict)
    harness.check_is_idle()


def test_a_ban_of_other_texts_is_no_conflict() -> None:
    """A token is forced unless it may be banned: then it is judged, which finds out whether it is."""
    params = replace(ENDED, bad_words=((0, 2),), allowed_token_ids=(2, 3, END))
    assert one("abcabc", params=params).tokens("one") == [3, 2, 3, 2, END]


def test_a_conflict_harms_no_neighbour() -> None:
    harness = forms_harness()
    harness.submit("bad", PROMPT, grammar=regex("abcabc"), params=replace(ENDED, bad_words=((3,),)))
    harness.submit("good", PROMPT, grammar=regex(GRAMMARS[0]), max_tokens=14, params=ENDED, seed=0)
    harness.run()
    assert isinstance(harness.error("bad"), ConstraintConflict)
    assert harness.tokens("good") == plain(GREEDY, GRAMMARS[0], 0)


def test_a_worker_without_forms_refuses_them_by_name() -> None:
    harness = Harness("F6")
    with pytest.raises(UnsupportedOption, match="regex"):
        harness.submit("one", PROMPT, grammar=regex("a"))


def test_a_bad_grammar_is_refused_when_it_is_submitted() -> None:
    with pytest.raises(RequestError, match="regex: unclosed group"):
        forms_harness().submit("one", PROMPT, grammar=regex("a(b"))


def test_a_span_has_room_for_what_is_forced_and_drafted() -> None:
    """Long runs are forced piece by piece; engines of these tests take spans of 16 tokens."""
    text = "abc" * 12
    harness = forms_harness()
    harness.submit("one", PROMPT, grammar=regex(text), max_tokens=60, params=ENDED, gamma=8)
    harness.run()
    assert harness.text("one") == text
    assert harness.finished("one").report.num_forced > 12
