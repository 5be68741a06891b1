"""The proof on a bundle can fail: rules that leave the target's law, and judges that leave the rule's."""

from functools import partial
from pathlib import Path

import pytest
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.sampling import adjust, block_judge, candidates, cpu_sampler, tree_judge
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.params import Prompt
from outrider.runtime.oracle.block import emitted_probs_block
from outrider.runtime.oracle.verification import emitted_probs
from outrider.runtime.verify.command import SEVERE
from outrider.runtime.verify.drafts import Drafter
from outrider.runtime.verify.rounds import RUN_GAMMA, Bench

from tests.mutants import put_in

NUM_ROWS = 4
LEVEL = 1e-6
RULES = {False: emitted_probs, True: emitted_probs_block}


@pytest.fixture(scope="module")
def bench(tiny_bundle: Path) -> Bench:
    bundle = load_bundle(tiny_bundle)
    target, draft = (open_engine(bundle, part, max_batch=NUM_ROWS) for part in ("target", "draft"))
    vocab_size = target.limits.vocab_size
    return Bench(
        target=target,
        draft=draft,
        sampler=CpuSampler(max_batch=NUM_ROWS, max_gamma=RUN_GAMMA, vocab_size=vocab_size),
        num_rows=NUM_ROWS,
        prompt=Prompt((215, 445, 492, 146, 58, 308, 341, 398)),
        num_samples=1000,
        seed=0,
    )


@pytest.fixture(scope="module")
def drafts(bench: Bench) -> dict[str, Drafter]:
    return dict(bench.drafts())


def p_values(bench: Bench, verifies_block: bool) -> list[float]:
    checks = bench.check_runs(
        "runs", RULES[verifies_block], RUN_GAMMA, verifies_block=verifies_block
    )
    return [check.p_value for check in checks]


@pytest.mark.parametrize("verifies_block", [False, True])
def test_both_rules_have_the_targets_law_and_the_sampler_theirs(bench, verifies_block):
    of_rule, of_sampler = p_values(bench, verifies_block)
    assert of_rule == 1.0 and of_sampler > 1e-3


def test_a_rule_that_leaves_the_targets_law_fails(bench):
    rule, _ = bench.check_runs(
        "runs", partial(emitted_probs, lenience=0.8), RUN_GAMMA, verifies_block=False
    )
    assert (rule.num_draws, rule.p_value) == (0, 0.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(1.0, wanted / proposed)", "wanted / proposed"),
        ("self.last * target.weight(token)", "target.weight(token)"),
        (", weight=weights.of_runs[num_accepted]", ""),
        ("draft.uniform(Purpose.ACCEPT, length - 1)", "draft.uniform(Purpose.ACCEPT, 0)"),
    ],
)
def test_a_block_judge_that_leaves_its_rule_fails(monkeypatch, bench, old, new):
    put_in(monkeypatch, block_judge, old, new)
    of_rule, of_sampler = p_values(bench, True)
    assert of_rule == 1.0 and of_sampler < LEVEL
    assert p_values(bench, False)[1] > 1e-3


def test_sequences_of_every_way_to_draft_have_the_targets_distribution(bench, drafts):
    assert len(drafts) == 5
    for name, draft in drafts.items():
        assert bench.check_sequences(name, SEVERE, draft)[0].p_value > 1e-3, name


@pytest.mark.parametrize(
    ("way", "module", "old", "new"),
    [
        # Penalties on bonus tokens, and behind accepted ones.
        (
            "drafts of the target", cpu_sampler,
            "logits_at(logits[gamma], row, gamma)", "logits_at(logits[gamma], row, gamma - 1)",
        ),
        (
            "drafts of the model", adjust,
            "row.draft_tokens[:num_drafted]", "row.draft_tokens[: max(num_drafted - 1, 0)]",
        ),
        (
            "point masses", cpu_sampler,
            "drawn != row.draft_tokens[index]", "index == 0 and drawn == row.draft_tokens[0]",
        ),
        ("tree of point masses", tree_judge, "for node in self.path]", "for node in self.path[1:]]"),
        ("tree of candidates", candidates, "left = without(probs, points, scratch)", "left = probs"),
    ],
)  # fmt: skip
def test_a_judge_that_leaves_the_target_fails(monkeypatch, bench, drafts, way, module, old, new):
    put_in(monkeypatch, module, old, new)
    assert bench.check_sequences(way, SEVERE, drafts[way])[0].p_value < LEVEL


def test_blocks_are_checked_token_by_token_over_the_whole_vocabulary(monkeypatch, bench):
    params = SamplingParams(temperature=2.0)  # at which this random pair agrees often
    found = bench.check_shares("block", params, verifies_block=True)
    assert len(found) == 3 and min(check.p_value for check in found) > 1e-3
    put_in(monkeypatch, block_judge, "self.last * target.weight(token)", "target.weight(token)")
    found = bench.check_shares("block", params, verifies_block=True)
    assert min(check.p_value for check in found) < LEVEL
