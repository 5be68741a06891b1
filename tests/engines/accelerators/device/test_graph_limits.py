"""Lists of laws as graphs and plans take them: padded to powers of two, and the host's where too long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.lists import (
    LIST_LIMITS,
    NGRAMS,
    SIGMA,
    describe_lists,
    padded_length,
    why_not,
)
from outrider.engines.accelerators.device.sampling.mixed import MixedSampler
from outrider.engines.accelerators.device.sampling.rows import (
    Shape,
    Variant,
    describe,
    describe_judgement,
)
from outrider.engines.accelerators.onnx.sampler import open_onnx_sampler
from outrider.engines.base import EngineError
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import CounterNoise
from outrider.runtime.core.checks.limits import RequestLimits

from tests.engines.rows import row_for
from tests.engines.sampling.masks.test_laws import V as MASKED_V
from tests.engines.sampling.masks.test_laws import only

MAX_GAMMA, V = 4, 8


@pytest.mark.parametrize(
    ("length", "padded"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)]
)
def test_a_list_is_as_long_as_a_power_of_two(length: int, padded: int) -> None:
    assert padded_length(length) == padded


def test_steps_of_a_growing_answer_seldom_change_shape() -> None:
    params = SamplingParams(repetition_penalty=1.2, bad_words=((1, 2, 3, 4),))
    widths = set()
    for length in range(1, 65):
        row = row_for(params=params, history=np.arange(length))
        lists = describe_lists([row], 1, vocab_size=100)
        assert (lists[names.SEEN_IDS][0, :length] == range(length)).all()
        assert (lists[names.SEEN_IDS][0, length:] == 100).all()
        assert lists[names.BAD_PREFIXES].shape == (1, 1, 4)
        assert lists[names.BAD_PREFIXES][0, 0].tolist() == [names.NO_TOKEN, 1, 2, 3]
        widths.add(lists[names.SEEN_IDS].shape[1])
    assert widths == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(
    ("params", "axis"),
    [
        (SamplingParams(logit_bias=tuple((i, 1.0) for i in range(513))), "num_biases"),
        (SamplingParams(allowed_token_ids=tuple(range(16385))), "num_allowed"),
        (SamplingParams(bad_words=tuple((i,) for i in range(129))), "num_bad"),
        (SamplingParams(bad_words=(tuple(range(34)),)), "prefix"),
        (SamplingParams(min_tokens=1, end_token_ids=tuple(range(129))), "num_ends"),
    ],
)
def test_a_list_that_no_plan_takes_is_named(params: SamplingParams, axis: str) -> None:
    reason = f"{axis}: the sampler's plans take at most {LIST_LIMITS[axis]}"
    assert why_not(params, LIST_LIMITS) == reason
    assert why_not(params, {}) == ""


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(no_repeat_ngram_size=3), NGRAMS),
        (SamplingParams(top_n_sigma=1.5), SIGMA),
    ],
)
def test_what_is_the_hosts_whatever_the_limits(params: SamplingParams, reason: str) -> None:
    assert why_not(params, {}) == reason
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=V)
    with pytest.raises(EngineError, match=reason.partition(":")[0]):
        describe([row_for(params=params)], shape, Variant.FULL, has_lists=True)


def test_what_a_request_may_ask_for_fits_the_plans() -> None:
    limits = RequestLimits()
    params = SamplingParams(
        logit_bias=tuple((i, 1.0) for i in range(limits.max_logit_bias)),
        allowed_token_ids=tuple(range(limits.max_allowed_token_ids)),
        bad_words=tuple((i,) for i in range(limits.max_bad_words)),
        min_tokens=1,
        end_token_ids=tuple(range(limits.max_stop_token_ids + 8)),
    )
    assert why_not(params, LIST_LIMITS) == ""


def test_rows_whose_laws_the_graphs_do_not_take_are_the_hosts(folders) -> None:
    """Of two rows in one batch, each gets the very answer of its own sampler."""
    sizes = {"max_batch": 2, "max_gamma": MAX_GAMMA, "vocab_size": V}
    graphs, host = open_onnx_sampler(folders(V), **sizes), CpuSampler(**sizes)
    graphs._graphs = replace(graphs._graphs, list_limits={"num_allowed": 2})
    mixed = MixedSampler(graphs, host)
    laws = [SamplingParams(allowed_token_ids=ids, top_k=2) for ids in ((1, 2), (1, 2, 3))]
    assert [bool(graphs.why_not(params)) for params in laws] == [False, True]
    logits = np.random.default_rng(0).normal(size=(2, 1, V)).astype(np.float32)
    differ = 0
    for seed in range(40):
        rows = [row_for(index=i, slot=i, params=params, seed=seed) for i, params in enumerate(laws)]
        found = mixed.judge(logits, rows)
        assert found[0] == graphs.judge(logits, rows[:1])[0]
        assert found[1] == host.judge(logits, rows[1:])[0]
        differ += found[1] != graphs.judge(logits, rows[1:])[0]
    assert differ, "the two samplers draw by different orders, so some seed must tell them apart"
    graphs.close()


def test_drafts_judged_as_blocks_are_refused_by_name():
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=2)
    row = replace(row_for((0,)), is_sampled_draft=True, verifies_block=True)
    feeds = describe([row], shape, Variant.PLAIN, has_lists=False)
    with pytest.raises(EngineError, match="blocks"):
        describe_judgement(feeds, [row], shape, CounterNoise(), np.array([1]))


class Named:
    """A sampler that answers with its name."""

    def __init__(self, name):
        self.name = name

    def why_not(self, params):
        return ""

    def propose(self, logits, rows, *, vocab_size):
        return [self.name] * len(rows)

    def judge(self, logits, rows):
        return [self.name] * len(rows)


def test_a_devices_graphs_leave_masked_rows_to_the_host():
    mixed = MixedSampler(Named("graphs"), Named("host"))
    rows = [row_for(), row_for(masks=only(1)[None])]
    assert (
        mixed.judge(None, rows)
        == mixed.propose(None, rows, vocab_size=MASKED_V)
        == ["graphs", "host"]
    )
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=MASKED_V)
    with pytest.raises(EngineError, match="token masks"):
        describe([rows[1]], shape, Variant.GREEDY, has_lists=False)
