"""The tests of block verification can fail: each mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.sampling import block_judge, cpu_sampler
from outrider.runtime.oracle import block

import tests.engines.sampling.test_block_judge as sampler_tests
import tests.runtime.oracle.test_block as oracle_tests
from tests.mutants import assert_caught

ERRORS = (AssertionError, IndexError, RuntimeWarning)

ORACLE_MUTANTS = {
    "<= for <": ("uniforms < block_thresholds", "uniforms <= block_thresholds", "zero_coin"),
    "weights not capped at 1": ("min(1.0, ratio)", "ratio", "exact"),
    "weights of single tokens": ("ratio = weights[index] * wanted", "ratio = wanted", "exact"),
    "residual of the unweighted target": (
        "residual = _excess(weight, target",
        "residual = _excess(1.0, target",
        "exact",
    ),
    "residual not normalised": ("residual / mass\n", "residual\n", "exact"),
    "threshold is the weight": (
        "1.0 if weight == 1.0 else mass / (mass + 1.0 - weight)",
        "weight",
        "exact",
    ),
    "last threshold like the others": (
        "for index in range(1, len(draft_tokens)):",
        "for index in range(1, len(draft_tokens) + 1):",
        "exact",
    ),
    "threshold of the row before": (
        "mass = _excess(weight, target_probs[index], draft_probs[index]).sum()",
        "mass = _excess(weight, target_probs[index - 1], draft_probs[index - 1]).sum()",
        "exact",
    ),
    "the first rejection ends the run": (
        "return int(kept[-1]) + 1 if len(kept) else 0",
        "return int(np.cumprod(np.isin(np.arange(len(uniforms)), kept)).sum())",
        "exact",
    ),
    "bonus from the residual": (
        "if num_accepted == len(draft_tokens):\n        return target\n",
        "if num_accepted == len(draft_tokens):\n        draft_probs = np.vstack([draft_probs, draft_probs])\n",
        "exact",
    ),
}
ORACLE_KILLERS = {
    "zero_coin": (oracle_tests.test_a_token_the_target_cannot_emit_ends_the_run_even_at_coin_0),
    "exact": lambda: oracle_tests.test_the_emitted_tokens_have_the_targets_law("random", 3),
}

SAMPLER_MUTANTS = {
    "<= for < at the last run": (block_judge, "coin < weight", "coin <= weight", "edge"),
    "weights not capped at 1": (
        block_judge,
        "min(1.0, wanted / proposed)",
        "wanted / proposed",
        "three",
    ),
    "weights of single tokens": (
        block_judge,
        "self.last * target.weight(token)",
        "target.weight(token)",
        "three",
    ),
    "excess of the unweighted target": (
        block_judge,
        "proposal, weights.last, draft.scratch",
        "proposal, 1.0, draft.scratch",
        "three",
    ),
    "excess of the first token counted": (block_judge, "if index > 0:", "if index >= 0:", "three"),
    "residual of the unweighted target": (
        block_judge,
        ", weight=weights.of_runs[num_accepted]",
        "",
        "ternary",
    ),
    "residual of the wrong run": (
        block_judge,
        "weight=weights.of_runs[num_accepted]",
        "weight=weights.of_runs[max(num_accepted - 1, 0)]",
        "ternary",
    ),
    "target row left from the walk": (
        block_judge,
        "target = draft.target_at(num_accepted)",
        "target = draft.target_at(len(draft.tokens) - 1)",
        "three",
    ),
    "bonus from the residual": (
        block_judge,
        "if num_accepted == len(draft.tokens):",
        "if num_accepted > len(draft.tokens):",
        "three",
    ),
    "one coin for all runs": (
        block_judge,
        "draft.uniform(Purpose.ACCEPT, length - 1)",
        "draft.uniform(Purpose.ACCEPT, 0)",
        "addresses",
    ),
    "tiny weights kept": (
        block_judge,
        "weight if weight > _SMALLEST_WEIGHT else 0.0",
        "weight",
        "tiny",
    ),
    "token by token after all": (cpu_sampler, "if row.verifies_block and", "if not", "three"),
    "lenient rows as blocks": (
        cpu_sampler,
        "row.verifies_block and row.mode is ExactnessMode.MAX_ACCEPT",
        "row.verifies_block",
        "lenient",
    ),
}
SAMPLER_KILLERS = {
    "edge": sampler_tests.test_the_coin_at_the_threshold_itself_rejects,
    "ternary": lambda: sampler_tests.test_a_round_of_two_has_the_oracles_law("ternary"),
    "three": sampler_tests.test_a_round_of_three_has_the_oracles_law,
    "addresses": sampler_tests.test_coins_and_the_next_draw_have_their_own_addresses,
    "tiny": sampler_tests.test_a_run_too_unlikely_to_divide_by_is_rejected,
    "lenient": lambda: sampler_tests.test_other_modes_judge_token_by_token(sampler_tests.LENIENT),
}


@pytest.mark.parametrize("name", ORACLE_MUTANTS)
def test_a_mistake_in_the_oracle_is_caught(monkeypatch, name):
    old, new, killer = ORACLE_MUTANTS[name]
    assert_caught(monkeypatch, block, old, new, ORACLE_KILLERS[killer], ERRORS)


@pytest.mark.parametrize("name", SAMPLER_MUTANTS)
def test_a_mistake_in_the_sampler_is_caught(monkeypatch, name):
    module, old, new, killer = SAMPLER_MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, SAMPLER_KILLERS[killer], ERRORS)
