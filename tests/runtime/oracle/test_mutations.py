"""The exactness tests can fail: each known mistake, put into the source, is caught by a named test."""

from __future__ import annotations

import pytest
from outrider.engines.sampling import adjust, cpu_sampler, token_probs
from outrider.runtime.oracle import verification

import tests.engines.sampling.test_cpu_sampler as sampler_tests
import tests.engines.sampling.test_mixed_batches as batch_tests
import tests.runtime.oracle.test_verification as oracle_tests
from tests.mutants import assert_caught

ORACLE_MUTANTS = {
    "<= for <": (
        "* proposed < wanted",
        "* proposed <= wanted",
        "the_coin_at_the_ratio_itself_rejects",
    ),
    "accept test in float16": (
        "uniforms * lenience * proposed < wanted",
        "(uniforms * lenience * proposed).astype(np.float16) < wanted.astype(np.float16)",
        "the_coin_at_the_ratio_itself_rejects",
    ),
    "residual not normalised": (
        "residual / mass\n",
        "residual\n",
        "the_four_token_pair_gives_the_target",
    ),
    "residual is the target": (
        "np.maximum(target - draft_probs[num_accepted], 0.0)",
        "target.copy()",
        "the_four_token_pair_gives_the_target",
    ),
    "bonus from the residual": (
        "    if num_accepted == len(draft_probs):\n        return target\n",
        "    draft_probs = np.vstack([draft_probs, draft_probs[-1:]])\n",
        "a_fully_accepted_draft_is_followed_by_the_bonus_row",
    ),
    "target row off by one": (
        "target_probs[num_accepted]\n",
        "target_probs[num_accepted - 1]\n",
        "the_run_law_of_the_markov_pair",
    ),
    "draft row off by one": (
        "draft_probs[num_accepted], 0.0",
        "draft_probs[num_accepted - 1], 0.0",
        "the_run_law_of_the_markov_pair",
    ),
    "a residual of a thousandth for rounding": (
        "mass <= SMALLEST_RESIDUAL",
        "mass <= 1e-3",
        "a_small_residual_is_drawn_from",
    ),
    "accepting past a rejection": (
        "proposed < wanted\n    return int(np.cumprod(survives).sum())",
        "proposed < wanted\n    return int(np.sum(survives))",
        "the_run_law_of_the_markov_pair",
    ),
}

SAMPLER_MUTANTS = {
    "<= for <": (
        token_probs,
        "    if is_kept:\n",
        "    if is_kept or coin * draft.weight(token) * target_total <= target.weight(token) * draft.total():\n",
        "the_coin_at_the_ratio_itself_rejects",
    ),
    "accept test in float16": (
        token_probs,
        "        coin,\n        lenience,",
        "        float(np.float16(coin)), lenience,",
        "the_coin_at_the_ratio_itself_rejects",
    ),
    "residual is the target": (
        token_probs,
        "return TokenProbs(left, target.ids, mass), False",
        "return TokenProbs(target.weights, target.ids), False",
        "the_four_token_pair_has_the_oracles_law",
    ),
    "residual skipped": (
        cpu_sampler,
        "judged.left.draw(",
        "target.draw(",
        "the_lenient_round_at_0_8",
    ),
    "bonus from the residual": (
        cpu_sampler,
        "target.draw(self._uniform(row, Purpose.BONUS",
        "judge_token(target, self._draft_probs(row, gamma - 1), 0, 2.0, 1.0, self._scratch)"
        ".left.draw(self._uniform(row, Purpose.BONUS",
        "the_run_law_of_the_markov_pair",
    ),
    "target row off by one": (
        cpu_sampler,
        "target = adjusted_token_probs(\n                logits_at(logits[index]",
        "target = adjusted_token_probs(\n                logits_at(logits[max(index - 1, 0)]",
        "the_run_law_of_the_markov_pair",
    ),
    "bonus row off by one": (
        cpu_sampler,
        "logits_at(logits[gamma]",
        "logits_at(logits[gamma - 1]",
        "the_run_law_of_the_markov_pair",
    ),
    "bonus row adjusted with one draft token too few": (
        cpu_sampler,
        "logits_at(logits[gamma], row, gamma)",
        "logits_at(logits[gamma], row, gamma - 1)",
        "mixed_batches_by_steps",
    ),
    "draft row off by one": (
        cpu_sampler,
        "draft = self._draft_probs(row, index)",
        "draft = self._draft_probs(row, max(index - 1, 0))",
        "the_run_law_of_the_markov_pair",
    ),
    "temperature on the target only": (
        cpu_sampler,
        "return probs.draw(self._uniform(row, Purpose.DRAFT",
        "return TokenProbs(np.exp(logits)).draw(self._uniform(row, Purpose.DRAFT",
        "a_temperature_applies_to_draft_and_target_alike",
    ),
    "top-k by id": (
        adjust,
        "ids = truncation.ranked_greatest(logits, params.top_k)",
        "ids = np.arange(params.top_k)",
        "a_truncated_round_has_the_truncated_targets_law",
    ),
    "coin reused for the residual": (
        cpu_sampler,
        "self._uniform(row, Purpose.RECOVER, start + index)",
        "coin",
        "the_four_token_pair_has_the_oracles_law",
    ),
    "penalties behind by one token": (
        adjust,
        "row.draft_tokens[:num_drafted]",
        "row.draft_tokens[: max(num_drafted - 1, 0)]",
        "penalties_see_two_drafted_tokens",
    ),
    "penalties ahead by one token": (
        adjust,
        "row.draft_tokens[:num_drafted]",
        "row.draft_tokens[: num_drafted + 1]",
        "penalties_see_two_drafted_tokens",
    ),
    "drawing again after a mismatch": (
        cpu_sampler,
        "return Verdict(num_accepted=index, next_token=drawn)",
        "return Verdict(num_accepted=index, next_token=probs.draw("
        "self._uniform(row, Purpose.BONUS, start + index)))",
        "drawing_again_after_a_mismatch_does_not_happen",
    ),
    "draft noise reused in a later round": (
        cpu_sampler,
        "position=position, round_start=len(row.history)",
        "position=position, round_start=None",
        "every_draw_has_its_own_purpose_and_round",
    ),
    "match noise keyed by the round": (
        cpu_sampler,
        "position=position, round_start=None",
        "position=position, round_start=len(row.history)",
        "matched_draws_are_keyed_by_position_alone",
    ),
}

# Tests that take parameters, with the case that shows the mistake.
CASES = {
    "mixed_batches_by_steps": batch_tests.check_host_by_steps,
    "the_lenient_round_at_0_8": lambda: sampler_tests.test_the_lenient_round_has_the_oracles_law(
        0.8
    ),
    "penalties_see_two_drafted_tokens": lambda: (
        sampler_tests.test_penalties_see_the_tokens_drafted_before(
            gamma=2, draft_source=lambda _: 0
        )
    ),
}


def named_test(tests, name):
    return CASES[name] if name in CASES else getattr(tests, f"test_{name}")


@pytest.mark.parametrize("name", ORACLE_MUTANTS)
def test_a_mistake_in_the_oracle_is_caught(monkeypatch, name):
    old, new, killer = ORACLE_MUTANTS[name]
    assert_caught(monkeypatch, verification, old, new, named_test(oracle_tests, killer))


@pytest.mark.parametrize("name", SAMPLER_MUTANTS)
def test_a_mistake_in_the_sampler_is_caught(monkeypatch, name):
    module, old, new, killer = SAMPLER_MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, named_test(sampler_tests, killer))
