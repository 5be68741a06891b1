"""Lists as kernels take them, padded to powers of two, and what is left to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.lists import (
    NGRAMS,
    SIGMA,
    describe_lists,
    padded_length,
    why_not,
)
from outrider.engines.accelerators.device.sampling.mixed import MixedSampler
from outrider.engines.accelerators.device.sampling.rows import Shape, describe, describe_judgement
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.base import EngineError
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import CounterNoise, NoiseSource

from tests.engines.accelerators.device.device_laws import MAX_GAMMA
from tests.engines.rows import row_for
from tests.engines.sampling.masks.test_laws import V as MASKED_V
from tests.engines.sampling.masks.test_laws import only

V = 8
Loaded = Callable[[int], tuple[NoiseSource, DeviceSampler]]


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
    ("params", "reason"),
    [
        (SamplingParams(no_repeat_ngram_size=3), NGRAMS),
        (SamplingParams(top_n_sigma=1.5), SIGMA),
    ],
)
def test_what_is_the_hosts_is_refused_by_name(params: SamplingParams, reason: str) -> None:
    assert why_not(params) == reason
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=V)
    with pytest.raises(EngineError, match=reason.partition(":")[0]):
        describe([row_for(params=params)], shape)


@pytest.mark.parametrize("changes", [{"no_repeat_ngram_size": 2}, {"top_n_sigma": 1.0}])
def test_rows_whose_laws_the_kernels_do_not_have_are_the_hosts(
    loaded: Loaded, changes: dict[str, float]
) -> None:
    """Of two rows in one batch, each gets the very answer of its own sampler."""
    _, device = loaded(V)
    host = CpuSampler(max_batch=2, max_gamma=MAX_GAMMA, vocab_size=V)
    mixed = MixedSampler(device, host)
    laws = [SamplingParams(top_k=2), SamplingParams(top_k=2, **changes)]
    assert [bool(device.why_not(params)) for params in laws] == [False, True]
    # By rank the tokens come in the other order.
    logits = np.tile(np.arange(V, dtype=np.float32) / 2, (2, 1, 1))
    differ = 0
    for seed in range(40):
        rows = [row_for(index=i, slot=i, params=params, seed=seed) for i, params in enumerate(laws)]
        found = mixed.judge(logits, rows)
        assert found[0] == device.judge(logits, rows[:1])[0]
        assert found[1] == host.judge(logits, rows[1:])[0]
        differ += found[0] != host.judge(logits, rows[:1])[0]
    assert differ, "the two samplers draw by different orders, so some seed must tell them apart"


def test_drafts_judged_as_blocks_are_refused_by_name():
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=2)
    row = replace(row_for((0,)), is_sampled_draft=True, verifies_block=True)
    feeds = describe([row], shape)
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


def test_a_devices_kernels_leave_masked_rows_to_the_host():
    mixed = MixedSampler(Named("device"), Named("host"))
    rows = [row_for(), row_for(masks=only(1)[None])]
    assert (
        mixed.judge(None, rows)
        == mixed.propose(None, rows, vocab_size=MASKED_V)
        == ["device", "host"]
    )
    shape = Shape(num_rows=1, num_positions=2, depth=2, vocab_size=MASKED_V)
    with pytest.raises(EngineError, match="token masks"):
        describe([rows[1]], shape)
