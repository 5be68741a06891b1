"""The device sampler's graphs on the CPU: their laws against the oracle, their answers beside others.

Laws are enumerated. Answers are compared token for token, at fixed seeds, with a sequential sampler
over the oracle's float64 laws: both have the same noise, and their borders lie within 1e-6 of each
other, so a draw would have to fall into that gap to tell them apart. ``CpuSampler`` draws truncated
and long rows in another order, so with it greedy and ``seed_stable`` answers are compared.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnxruntime import OrtValue

from engines import sampler_tensors as names
from engines.base import BundleError, EngineError
from engines.cpu_sampler import CpuSampler
from engines.laws import ExactnessMode, SamplingLaw
from engines.noise import CounterNoise
from engines.onnx_sampler import OnnxSampler
from engines.onnx_session import open_session
from engines.sampler_rows import Shape, describe
from engines.sampler_tensors import Variant
from export.sampler_graphs import sampler_graphs, write_sampler_graphs
from export.sampler_graphs.adjust import adjusted, declare_rows
from export.sampler_graphs.builder import FLOAT, INT64, Graph
from runtime.core.sampling import adjusted_probs
from runtime.core.verification import emitted_law, point_mass
from tests.core.laws import (
    F1_DRAFT,
    F1_TARGET,
    F4A_RUNS,
    distance,
    f4a_draft,
    f4a_target,
    random_row_of,
)
from tests.engines.device_laws import (
    MAX_TRIALS,
    TableNoise,
    logits_of,
    round_law,
    row_for,
)
from tests.engines.reference_sampler import ReferenceSampler

MAX_ERROR = 1e-6
MAX_GAMMA = 4
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GREEDY = SamplingLaw(temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Graph folders by (V, V of the draft), written when first asked for."""
    root = tmp_path_factory.mktemp("graphs")

    def folder(vocab_size, draft_vocab_size=None):
        path = root / f"{vocab_size}_{draft_vocab_size}"
        if not path.exists():
            write_sampler_graphs(
                path,
                vocab_size=vocab_size,
                draft_vocab_size=draft_vocab_size or vocab_size,
                max_gamma=MAX_GAMMA,
            )
        return path

    return folder


class Switch:
    """A ``NoiseSource`` whose source may be exchanged, so that tests share loaded graphs."""

    source = CounterNoise()

    def uniforms(self, *args, **kwargs):
        return self.source.uniforms(*args, **kwargs)

    def exponentials(self, *args, **kwargs):
        return self.source.exponentials(*args, **kwargs)


@pytest.fixture(scope="module")
def loaded(folders):
    """Samplers by vocabulary, graphs loaded once, and their noise."""
    made = {}

    def sampler(vocab_size):
        if vocab_size not in made:
            noise = Switch()
            made[vocab_size] = (
                noise,
                OnnxSampler(
                    folders(vocab_size),
                    max_batch=MAX_TRIALS,
                    max_gamma=MAX_GAMMA,
                    vocab_size=vocab_size,
                    noise=noise,
                ),
            )
        return made[vocab_size]

    return sampler


@pytest.fixture
def law_of(loaded):
    """``round_law`` of the sampler over four tokens."""

    def law(draft_row, target_row, gamma, given=None, **changes):
        switch, sampler = loaded(4)
        switch.source = noise = TableNoise()
        try:
            return round_law(sampler, noise, draft_row, target_row, gamma, given, **changes)
        finally:
            switch.source = CounterNoise()

    return law


def f1_draft(_):
    return F1_DRAFT


def f1_target(_):
    return F1_TARGET


def widened(row_of):
    """A law over two tokens as one over four."""
    return lambda prefix: np.concatenate([row_of(prefix), [0.0, 0.0]])


def test_the_sampled_round_has_the_oracles_law(law_of):  # T1
    assert distance(law_of(f1_draft, f1_target, 1), emitted_law(f1_draft, f1_target, 1)) < MAX_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_random_pairs_have_the_oracles_law(law_of, seed):
    draft, target = random_row_of(seed, 4), random_row_of(seed + 50, 4, num_zeros=1)
    assert distance(law_of(draft, target, 1), emitted_law(draft, target, 1)) < MAX_ERROR


def test_the_run_law_of_the_markov_pair(law_of):  # T6b
    assert distance(law_of(widened(f4a_draft), widened(f4a_target), 2), F4A_RUNS) < MAX_ERROR


def test_plain_decoding_has_the_targets_law(law_of):
    law = law_of(f1_draft, f1_target, 0)
    assert distance(law, {(t,): p for t, p in enumerate(F1_TARGET)}) < MAX_ERROR


def test_a_truncated_round_has_the_truncated_targets_law(law_of):  # T24
    def kept(row_of):
        return lambda prefix: (
            (row := np.where(row_of(prefix) >= 0.25, row_of(prefix), 0)) / sum(row)
        )

    actual = law_of(f1_draft, f1_target, 1, law=SamplingLaw(top_k=2))
    assert distance(actual, emitted_law(kept(f1_draft), kept(f1_target), 1)) < MAX_ERROR


@pytest.mark.parametrize("lenience", [1.0, 0.8, 0.5])  # T13
def test_the_lenient_round_has_the_oracles_law(law_of, lenience):
    actual = law_of(f1_draft, f1_target, 1, mode=LENIENT, lenience=lenience)
    assert distance(actual, emitted_law(f1_draft, f1_target, 1, lenience=lenience)) < MAX_ERROR


@pytest.mark.parametrize("lenience", [None, 0.5])  # T18
@pytest.mark.parametrize("token", range(4))
def test_a_point_mass_draft_has_the_oracles_law(law_of, token, lenience):
    changes = {} if lenience is None else {"mode": LENIENT, "lenience": lenience}
    actual = law_of(None, f1_target, 1, (token,), **changes)
    expected = emitted_law(
        lambda _: point_mass(token, 4), f1_target, 1, lenience=1.0 if lenience is None else lenience
    )
    assert distance(actual, expected) < MAX_ERROR


@pytest.fixture(scope="module")
def adjust(tmp_path_factory):
    """Laws of a row's next tokens, [R, V], as the full graphs compute them."""
    sessions = {}

    def session(vocab_size):
        graph = Graph("adjust")
        logits = graph.input(names.LOGITS, FLOAT, ["batch", "positions", vocab_size])
        rows = declare_rows(graph, Variant.FULL)
        columns = graph.ids(rows.draft_tokens.length(1)).unsqueeze(0).unsqueeze(2)
        law = adjusted(logits, columns, rows, vocab_size=vocab_size, variant=Variant.FULL)
        graph.output("probs", law.probs, ["batch", "positions", vocab_size])
        graph.output("greatest", law.order.argmax(vocab_size), ["batch", "positions", 1])
        path = tmp_path_factory.mktemp("adjust") / "adjust.onnx"
        path.write_bytes(graph.model().SerializeToString())
        return open_session(path)

    def laws(logits, row):
        num_positions, vocab_size = logits.shape
        if vocab_size not in sessions:
            sessions[vocab_size] = session(vocab_size)
        shape = Shape(num_rows=1, num_positions=num_positions, depth=9, vocab_size=vocab_size)
        feeds = describe([row], shape, Variant.FULL)
        probs, greatest = sessions[vocab_size].run(
            ["probs", "greatest"], {**feeds, names.LOGITS: logits[None]}
        )
        if row.law.is_greedy:
            return np.eye(vocab_size)[greatest[0, :, 0]]
        return probs[0]

    return laws


HISTORY = np.array([3, 1, 4, 1, 5, 2, 6], dtype=np.int64)
DRAFT = (5, 3, 1)
LAWS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k one": {"top_k": 1},
    "top_k of everything": {"top_k": 9},
    "top_k beyond everything": {"top_k": 100},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-9},
    "top_p of one": {"top_p": 1.0},
    "min_p": {"min_p": 0.2},
    "all three": {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": ((2, 4.0), (6, -100.0), (2, -1.0))},
    "allowed": {"allowed_token_ids": (7, 1, 3)},
    "bad words": {"bad_words": ((4,), (6, 2), (6, 5, 0), (5, 3, 7), (1, 1))},
    "min_tokens": {"min_tokens": 5, "end_token_ids": (0, 8)},
    "everything": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": ((1, 1.5), (5, -0.5)),
        "allowed_token_ids": (0, 1, 2, 3, 5, 6, 8),
        "bad_words": ((3,), (5, 6)),
        "min_tokens": 6,
        "end_token_ids": (2,),
    },
}


def expected_laws(logits, law):
    return np.array(
        [
            adjusted_probs(row, law, np.concatenate([HISTORY, DRAFT[:i]]).astype(np.int64), 4)
            for i, row in enumerate(logits)
        ]
    )


@pytest.mark.parametrize("kind", ["random", "tied", "masked"])
@pytest.mark.parametrize("name", LAWS)
def test_every_position_has_the_oracles_law(adjust, name, kind):
    law = SamplingLaw(**LAWS[name])
    generator = np.random.default_rng([len(name), len(kind)])
    logits = generator.normal(scale=2.0, size=(4, 9)).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits)
    if kind == "masked":
        logits[:, [0, 4]] = -np.inf
        logits[1, 2] = -3e38
    row = row_for(DRAFT, law=law, history=HISTORY, num_prompt=4)
    assert np.abs(adjust(logits, row) - expected_laws(logits, law)).max() < MAX_ERROR


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-3, 1e5, 1e37])
def test_thresholds_are_found_at_every_magnitude_of_a_float(adjust, scale):
    steps = np.array([3.0, -2.0, 1.0, 0.0, -1.0, 2.0, -3.0, 0.0, 1.0])
    logits = (steps * scale).astype(np.float32)[None]
    for top_k in range(1, 9):
        law = SamplingLaw(top_k=top_k, temperature=max(scale, 1.0))
        expected = set(np.argsort(-logits[0], kind="stable")[:top_k].tolist())
        assert set(np.flatnonzero(adjust(logits, row_for(law=law))[0]).tolist()) == expected


def test_exactly_k_are_kept_where_neighbouring_floats_decide(adjust):
    logits = np.full((1, 9), 1.0, dtype=np.float32)
    logits[0, 5] = np.nextafter(np.float32(1.0), np.float32(2.0))
    assert np.flatnonzero(adjust(logits, row_for(law=SamplingLaw(top_k=1)))[0]).tolist() == [5]
    kept = adjust(logits, row_for(law=SamplingLaw(top_k=3)))[0]
    assert np.flatnonzero(kept).tolist() == [0, 1, 5]


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.5, 4), (0.75, 6), (0.125, 1), (0.126, 2)])
def test_the_mass_before_decides_at_the_border_itself(adjust, top_p, num_kept):  # T10
    logits = np.zeros((1, 9), dtype=np.float32)
    logits[0, 8] = -np.inf
    kept = adjust(logits, row_for(law=SamplingLaw(top_p=top_p)))[0]
    assert np.flatnonzero(kept).tolist() == list(range(num_kept))


def mixed_rows(generator, vocab_size, history):
    """Four rows with laws of every kind."""
    rows = []
    for index in range(4):
        pick = generator.choice
        law = SamplingLaw(
            temperature=float(pick([0.0, 0.7, 1.0, 1.5])),
            top_k=int(pick([0, 3, vocab_size])),
            top_p=float(pick([1.0, 0.6, 0.9])),
            min_p=float(pick([0.0, 0.1])),
            repetition_penalty=float(pick([1.0, 1.3, 0.8])),
            presence_penalty=float(pick([0.0, 0.5])),
            frequency_penalty=float(pick([0.0, 0.3])),
            logit_bias=((1, 2.0), (3, -1.0)) if generator.random() < 0.3 else (),
            allowed_token_ids=(0, 1, 2, 5) if generator.random() < 0.2 else (),
            bad_words=((2,), (int(history[-1]), 1), (1, 1, 3)) if generator.random() < 0.3 else (),
            min_tokens=int(pick([0, 6, 7])),
            end_token_ids=(0,),
        )
        rows.append(
            row_for(
                index=index,
                slot=index,
                law=law,
                mode=list(ExactnessMode)[generator.integers(3)],
                lenience=float(pick([1.0, 0.6])),
                seed=int(generator.integers(2**63)),
                history=history,
                num_prompt=7,
                num_logprobs=3 if generator.random() < 0.3 else None,
            )
        )
    return rows


def drafted_by(sampler, rows, logits, vocab_size):
    drafts = [() for _ in rows]
    for step in logits:
        asked = [replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts, strict=True)]
        tokens = sampler.propose(step, asked, vocab_size=vocab_size)
        drafts = [(*draft, token) for draft, token in zip(drafts, tokens, strict=True)]
    return drafts


def same(one, other):
    """Whether two verdicts agree, overlaps up to rounding."""
    return (one.num_accepted, one.next_token, one.num_fallbacks) == (
        other.num_accepted,
        other.next_token,
        other.num_fallbacks,
    ) and one.overlaps == pytest.approx(other.overlaps, abs=MAX_ERROR)


@pytest.mark.parametrize("seed", range(20))
def test_mixed_batches_are_answered_as_the_oracle_answers_them(loaded, seed):
    generator = np.random.default_rng(seed)
    vocab_size, gamma = 8, seed % 5
    _, device = loaded(vocab_size)
    reference = ReferenceSampler()
    rows = mixed_rows(generator, vocab_size, generator.integers(0, vocab_size, 12))
    draft_logits = generator.normal(scale=2, size=(gamma, 4, 2, vocab_size)).astype(np.float32)
    target_logits = generator.normal(scale=2, size=(4, gamma + 1, vocab_size)).astype(np.float32)
    drafts = drafted_by(device, rows, draft_logits, vocab_size)
    assert drafts == drafted_by(reference, rows, draft_logits, vocab_size)
    judged = [
        replace(
            row,
            draft_tokens=draft,
            is_sampled_draft=gamma > 0
            and seed % 3 > 0
            and not row.law.is_greedy
            and row.mode is not SEED_STABLE,
        )
        for row, draft in zip(rows, drafts, strict=True)
    ]
    verdicts = device.judge(target_logits, judged)
    for verdict, expected in zip(verdicts, reference.judge(target_logits, judged), strict=True):
        assert same(verdict, expected)
    # Alone, a row may be served by another graph; its answer has the same bits.
    for verdict, row in zip(verdicts, judged, strict=True):
        assert device.judge(target_logits, [row]) == [verdict]
    assert device.judge(target_logits, judged[::-1]) == verdicts[::-1]


@pytest.mark.parametrize("seed", range(8))
def test_greedy_and_shared_noise_give_the_tokens_of_the_cpu_sampler(loaded, seed):
    generator = np.random.default_rng(seed)
    _, device = loaded(8)
    host = CpuSampler(max_batch=4, max_gamma=MAX_GAMMA, vocab_size=8)
    laws = [GREEDY, SamplingLaw(), SamplingLaw(top_k=3), SamplingLaw(top_p=0.7, temperature=1.5)]
    history = generator.integers(0, 8, 12)
    rows = [
        row_for(
            index=i,
            slot=i,
            law=law,
            mode=SEED_STABLE,
            seed=seed,
            history=history,
            num_logprobs=2,
            num_choices=3,
        )
        for i, law in enumerate(laws)
    ]
    draft_logits = generator.normal(scale=2, size=(2, 4, 2, 8)).astype(np.float32)
    drafts = drafted_by(device, rows, draft_logits, 8)
    assert drafts == drafted_by(host, rows, draft_logits, 8)
    judged = [replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts, strict=True)]
    logits = draft_logits[:, :, 0].swapaxes(0, 1) + 0.5 * generator.normal(size=(4, 2, 8))
    logits = np.concatenate([logits, logits[:, :1]], axis=1).astype(np.float32)
    expected = host.judge(logits, judged)
    for verdict, wanted in zip(device.judge(logits, judged), expected, strict=True):
        assert same(verdict, wanted)
        assert verdict.choices == wanted.choices
        assert len(verdict.choices) == 3
        for found, known in zip(verdict.logprobs, wanted.logprobs, strict=True):
            assert found.logprob == pytest.approx(known.logprob, abs=1e-5)
            assert [token for token, _ in found.top] == [token for token, _ in known.top]
            assert [p for _, p in found.top] == pytest.approx([p for _, p in known.top], abs=1e-5)


def test_ragged_drafts_share_a_batch(loaded):
    _, device = loaded(8)
    reference = ReferenceSampler()
    logits = np.random.default_rng(3).normal(size=(4, 4, 8)).astype(np.float32)
    rows = [
        row_for(range(gamma), index=gamma, slot=gamma, seed=gamma, law=SamplingLaw(temperature=t))
        for gamma, t in enumerate([1.0, 0.0, 0.5, 2.0])
    ]
    for verdict, expected in zip(
        device.judge(logits, rows), reference.judge(logits, rows), strict=True
    ):
        assert same(verdict, expected)


def test_kept_laws_belong_to_the_slot(loaded):
    """Two slots draft from row 0, one after the other, before either is judged."""
    _, device = loaded(4)
    rows = [row_for(slot=slot, seed=slot) for slot in (2, 5)]
    judged = []
    for row, law in zip(rows, (F1_DRAFT, F1_DRAFT[::-1]), strict=True):
        (token,) = device.propose(logits_of(law)[None], [row], vocab_size=4)
        judged.append(replace(row, draft_tokens=(token,), is_sampled_draft=True))
    logits = logits_of(F1_TARGET, F1_TARGET)[None]
    overlaps = [device.judge(logits, [row])[0].overlaps for row in judged]
    assert overlaps[0] == pytest.approx((0.8,), abs=MAX_ERROR)
    assert overlaps[1] == pytest.approx((0.7,), abs=MAX_ERROR)


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(top_k=3, top_p=0.8), GREEDY])
def test_a_draft_that_is_the_target_is_always_kept(loaded, mode, law):  # T37
    _, device = loaded(4)
    logits = np.random.default_rng(9).normal(size=(1, 5, 4)).astype(np.float32)
    for seed in range(8):
        row = row_for(law=law, mode=mode, seed=seed)
        (draft,) = drafted_by(device, [row], [logits[:, i : i + 1] for i in range(4)], 4)
        is_sampled = not law.is_greedy and mode is not SEED_STABLE
        row = replace(row, draft_tokens=draft, is_sampled_draft=is_sampled)
        (verdict,) = device.judge(logits, [row])
        assert (verdict.num_accepted, verdict.num_fallbacks) == (4, 0)


BROKEN = [[np.nan, 0.0, 0.0, 0.0], [np.inf, 0.0, 0.0, 0.0], [-np.inf] * 4]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(top_k=1), GREEDY])
@pytest.mark.parametrize("mode", list(ExactnessMode))
def test_a_broken_row_ends_its_own_request_only(loaded, broken, law, mode):  # T36
    _, device = loaded(4)
    sound = [0.0, 50.0, 0.0, 0.0]
    logits = np.array([[sound], [broken], [sound]], dtype=np.float32)
    rows = [row_for(index=i, slot=i, law=law, mode=mode, num_logprobs=1) for i in range(3)]
    verdicts = device.judge(logits, rows)
    assert [verdict.next_token for verdict in verdicts] == [1, None, 1]
    assert [len(verdict.logprobs) for verdict in verdicts] == [1, 0, 1]
    assert device.propose(logits, rows, vocab_size=4) == [1, 0, 1]


def test_a_broken_row_behind_a_rejection_is_not_looked_at(loaded):  # T6
    _, device = loaded(4)
    logits = np.array([[[50.0, 0.0, 0.0, 0.0], BROKEN[0]]], dtype=np.float32)
    (verdict,) = device.judge(logits, [row_for((1,))])
    assert (verdict.num_accepted, verdict.next_token) == (0, 0)
    (verdict,) = device.judge(logits, [row_for((0,))])
    assert (verdict.num_accepted, verdict.next_token) == (0, None)


@pytest.mark.parametrize("draft_vocab_size", [5, 11])
def test_a_draft_of_another_vocabulary_is_cut_or_filled(folders, draft_vocab_size):  # T35
    folder = folders(8, draft_vocab_size)
    device = OnnxSampler(folder, max_batch=1, max_gamma=MAX_GAMMA, vocab_size=8)
    reference = ReferenceSampler()
    generator = np.random.default_rng(4)
    target = generator.normal(size=(1, 2, 8)).astype(np.float32)
    draft = generator.normal(size=(1, 1, draft_vocab_size)).astype(np.float32)
    for seed in range(20):
        row = row_for(seed=seed)
        tokens = [s.propose(draft, [row], vocab_size=8) for s in (device, reference)]
        assert tokens[0] == tokens[1]
        judged = [replace(row, draft_tokens=tuple(tokens[0]), is_sampled_draft=True)]
        assert same(device.judge(target, judged)[0], reference.judge(target, judged)[0])


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("law", [SamplingLaw(), GREEDY])
def test_a_draft_token_outside_the_vocabulary_is_rejected(loaded, mode, law):  # T35
    _, device = loaded(4)
    logits = logits_of(F1_TARGET, F1_TARGET)[None]
    (verdict,) = device.judge(logits, [row_for((4,), mode=mode, law=law, lenience=0.5)])
    assert verdict.num_accepted == 0
    assert verdict.next_token in range(4)


def test_what_the_graphs_cannot_hold_is_refused_by_name(loaded, folders):
    _, device = loaded(4)
    with pytest.raises(EngineError, match="vocab_size 5"):
        device.propose(np.zeros((1, 1, 4), dtype=np.float32), [row_for()], vocab_size=5)
    with pytest.raises(EngineError, match="at most 4"):
        device.judge(np.zeros((1, 6, 4), dtype=np.float32), [row_for((0, 1, 2, 3, 0))])
    with pytest.raises(EngineError, match="no such sampler graph"):
        missing = OnnxSampler(Path("nowhere"), max_batch=1, max_gamma=1, vocab_size=4)
        missing.judge(np.zeros((1, 1, 4), dtype=np.float32), [row_for()])
    with pytest.raises(BundleError, match="at most 1048576"):
        sampler_graphs(vocab_size=(1 << 20) + 1, draft_vocab_size=None, max_gamma=1)


class MarkovModel:
    """Logits that depend on the last token alone, looked up on the device."""

    def __init__(self, table, path):
        graph = Graph("markov")
        tokens = graph.input("tokens", INT64, ["batch", "positions"])
        rows = graph.op("Gather", graph.constant(table, FLOAT), tokens, axis=0)
        graph.output("logits", rows, ["batch", "positions", table.shape[1]])
        path.write_bytes(graph.model().SerializeToString())
        self.session = open_session(path)
        self.table = table

    def logits_of(self, tokens):
        """Device value in, device value out."""
        binding = self.session.io_binding()
        binding.bind_ortvalue_input("tokens", tokens)
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0]


LAST_TOKEN = 3


@pytest.mark.parametrize(
    ("law", "mode"),
    [
        (SamplingLaw(), MAX_ACCEPT),
        (SamplingLaw(top_k=4, top_p=0.9, repetition_penalty=1.3), MAX_ACCEPT),
        (SamplingLaw(temperature=0.7), SEED_STABLE),
        (GREEDY, MAX_ACCEPT),
    ],
)
def test_a_round_runs_on_the_device_from_the_first_draft_to_the_verdict(
    loaded, tmp_path, law, mode
):
    _, device = loaded(8)
    generator = np.random.default_rng(8)
    draft, target = (generator.normal(scale=2, size=(8, 8)).astype(np.float32) for _ in range(2))
    model = MarkovModel(draft, tmp_path / "draft.onnx")
    history = np.array([5, 1, LAST_TOKEN], dtype=np.int64)
    gamma = 3
    rows = [
        row_for(index=i, slot=i + 1, law=law, mode=mode, seed=i, history=history) for i in range(6)
    ]
    rows = [replace(r, is_sampled_draft=law is not GREEDY and mode is MAX_ACCEPT) for r in rows]
    gammas = np.full(len(rows), gamma)

    round_ = device.begin(rows, gamma=gamma)
    tokens = OrtValue.ortvalue_from_numpy(np.full((len(rows), 1), LAST_TOKEN, dtype=np.int64))
    fed = [tokens]
    for depth in range(gamma):
        tokens = round_.propose(model.logits_of(tokens), np.full(len(rows), depth))
        fed.append(tokens)
    # The target, too, is fed what the draft model was, without reading it.
    logits = np.stack([target[value.numpy()[:, 0]] for value in fed], axis=1)
    verdicts = round_.verdicts(round_.judge(OrtValue.ortvalue_from_numpy(logits), gammas), gammas)

    reference = ReferenceSampler()
    for row, verdict in zip(rows, verdicts, strict=True):
        drafted = ()
        for _ in range(gamma):
            last = (LAST_TOKEN, *drafted)[-1]
            asked = replace(row, index=0, draft_tokens=drafted)
            drafted += tuple(reference.propose(draft[last][None, None], [asked], vocab_size=8))
        target_logits = target[[LAST_TOKEN, *drafted]][None]
        judged = replace(row, index=0, draft_tokens=drafted)
        assert same(verdict, reference.judge(target_logits, [judged])[0])


def test_a_round_on_the_device_wants_rows_that_lie_as_their_slots(loaded):
    _, device = loaded(4)
    with pytest.raises(EngineError, match="as their slots do"):
        device.begin([row_for(index=0, slot=1), row_for(index=1, slot=0)], gamma=1)
    with pytest.raises(EngineError, match="5 draft tokens: at most 4"):
        device.begin([row_for()], gamma=5)


# What TensorRT's parser refuses, or caps, or what would branch.
FORBIDDEN = {
    "TopK",
    "Sort",
    "NonZero",
    "Unique",
    "Compress",
    "If",
    "Loop",
    "Scan",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "BitwiseNot",
    "Multinomial",
    "RandomUniform",
    "ArgMax",
    "ArgMin",
}


def test_no_graph_uses_what_tensorrt_lacks_or_caps():
    allowed_types = {1, 6, 7, 9}  # float, int32, int64, bool
    graphs = sampler_graphs(vocab_size=50, draft_vocab_size=40, max_gamma=3)
    assert len(graphs) == 2 * len(Variant) + 1
    for name, model in graphs.items():
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
        assert not {node.op_type for node in model.graph.node} & FORBIDDEN, name
        assert {tensor.data_type for tensor in model.graph.initializer} <= allowed_types
        casts = [n.attribute[0].i for n in model.graph.node if n.op_type == "Cast"]
        assert set(casts) <= allowed_types
        for node in model.graph.node:
            if node.op_type.startswith("Scatter"):
                assert "reduction" not in {attribute.name for attribute in node.attribute}
        for tensor in (*model.graph.input, *model.graph.output):
            assert tensor.type.tensor_type.HasField("shape"), tensor.name
        assert model.ByteSize() < 200_000
