"""Which test holds what: the catalogue of properties that make answers exact, each by the names of its tests.

The numbers are those that docstrings and commits use. A name that is no test any more fails here, so that no property
loses its test unseen.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ORACLE, SAMPLER, TREE = (
    "runtime/oracle/test_verification",
    "engines/sampling/test_cpu_sampler",
    "runtime/oracle/test_tree",
)
OFFERS = "engines/sampling/test_candidates"
BIASES, STEP, SAMPLING = (
    "runtime/oracle/test_biased_schemes",
    "runtime/loop/test_step",
    "runtime/oracle/test_sampling",
)

CATALOGUE: dict[str, dict[str, tuple[str, ...]]] = {
    "T1 one position enumerated": {
        ORACLE: ("test_the_four_token_pair_gives_the_target",),
        SAMPLER: ("test_the_four_token_pair_has_the_oracles_law",),
    },
    "T2 acceptance per token": {ORACLE: ("test_each_draft_token_is_kept_with_its_ratio",)},
    "T3 the coin at the ratio": {
        ORACLE: ("test_the_coin_at_the_ratio_itself_rejects",),
        SAMPLER: ("test_the_coin_at_the_ratio_itself_rejects",),
        "engines/accelerators/device/test_sampler_laws": ("test_the_coin_at_the_ratio_itself_rejects",),
    },
    "T4 a coin of zero": {
        ORACLE: ("test_a_coin_of_zero_does_not_keep_an_impossible_token",),
        SAMPLER: ("test_a_coin_of_zero_does_not_keep_an_impossible_token",),
    },
    "T5 all accepted": {
        ORACLE: ("test_a_fully_accepted_draft_is_followed_by_the_bonus_row",),
        SAMPLER: ("test_a_fully_accepted_draft_is_followed_by_the_bonus_row",),
    },
    "T6 rejected at once, and the worked pair": {
        ORACLE: (
            "test_a_rejection_at_the_first_token_uses_no_later_row",
            "test_the_run_law_of_the_markov_pair",
        ),
        SAMPLER: ("test_the_run_law_of_the_markov_pair",),
    },
    "T7 number of emitted tokens": {ORACLE: ("test_the_law_of_the_number_of_emitted_tokens",)},
    "T8 operations and speed": {"runtime/oracle/test_analysis": ("test_table_1_reproduces_entirely",)},
    "T9 ties of the argmax": {
        ORACLE: ("test_greedy_keeps_the_lowest_id_of_a_tie_only",),
        SAMPLING: ("test_greedy_gives_all_mass_to_the_lowest_id_of_a_tie",),
    },
    "T10 order of adjustment": {
        SAMPLING: (
            "test_temperature_comes_before_top_p",
            "test_top_p_keeps_one_token_where_the_mass_before_the_next_equals_it",
        )
    },
    "T11 best gammas": {"runtime/oracle/test_analysis": ("test_the_best_gamma_and_its_factor",)},
    "T12 nothing to gain": {
        "runtime/gamma/test_choose": (
            "test_one_row_gets_the_gamma_of_the_formula",
            "test_a_draft_that_gains_nothing_is_not_used",
        )
    },
    "T13 lenience": {
        ORACLE: ("test_lenient_laws_of_the_four_token_pair",),
        SAMPLER: (
            "test_the_lenient_round_has_the_oracles_law",
            "test_lenience_of_one_is_bit_identical_to_max_accept",
        ),
    },
    "T14 greedy lenience": {
        ORACLE: ("test_lenient_greedy_keeps_tokens_near_the_greatest",),
        SAMPLER: ("test_lenient_greedy_keeps_tokens_near_the_greatest",),
    },
    "T15 alpha by counts": {
        "runtime/core/test_stats": ("test_alpha_hat_counts_the_trials_that_were_reached",)
    },
    "T16 whole blocks": {
        "runtime/oracle/test_block": (
            "test_the_emitted_tokens_have_the_targets_law",
            "test_the_worked_pair_keeps_the_known_number_of_tokens",
        )
    },
    "T17 shared races": {
        ORACLE: (
            "test_the_race_emits_the_targets_winner",
            "test_two_races_agree_with_the_known_probability",
        )
    },
    "T18 point masses": {
        ORACLE: ("test_a_point_mass_draft_is_kept_with_the_targets_probability",),
        SAMPLER: ("test_a_point_mass_draft_is_matched",),
    },
    "T19 several candidates": {
        TREE: (
            "test_acceptance_of_the_four_token_pair",
            "test_acceptance_of_a_peaked_draft",
            "test_a_round_over_a_sampled_tree_has_the_targets_law",
        ),
        OFFERS: ("test_no_candidates_of_a_node_are_kept_more_often", "test_the_four_token_pair_gives_the_target"),
        BIASES: ("test_no_scheme_for_independent_candidates_keeps_more_than_the_bound",),
    },
    "T20 repeated candidates": {
        TREE: ("test_a_repeated_candidate_is_tested_again",),
        OFFERS: ("test_the_four_token_pair_gives_the_target",),
        BIASES: ("test_repeats_tested_again_give_the_target_of_the_same_inputs",),
    },
    "T21 a draw per phrase": {
        TREE: ("test_published_biases_are_not_here",),
        BIASES: ("test_a_draw_per_phrase_favours_what_phrases_begin_with",),
        "runtime/drafters/phrases/test_phrases": ("test_sampled_answers_are_the_same_whatever_the_pool_holds",),
    },
    "T22 drawn again after a mismatch": {
        ORACLE: ("test_drawing_again_after_a_mismatch_would_be_seen",),
        BIASES: ("test_a_biased_scheme_has_the_law_that_is_said_of_it",),
    },
    "T23 unsure drafts dropped": {
        ORACLE: ("test_dropping_unsure_draft_tokens_would_be_seen",),
        BIASES: ("test_a_biased_scheme_has_the_law_that_is_said_of_it",),
    },
    "T24 filtered drafts": {
        ORACLE: ("test_judging_a_filtered_draft_with_its_raw_row_would_be_seen",),
        BIASES: (
            "test_drafts_judged_by_the_law_they_had_give_the_target_of_the_same_inputs",
            "test_a_penalty_on_the_last_position_alone_would_change_the_answer",
        ),
    },
    "T25 pointers of a ragged batch": {STEP: ("test_pointers_follow_the_worked_example",)},
    "T26 penalties see the draft": {
        STEP: ("test_repetition_penalty_sees_the_drafted_prefix",),
        SAMPLER: ("test_penalties_see_the_tokens_drafted_before",),
    },
    "T27 stops inside a run": {
        STEP: ("test_a_run_is_cut_where_plain_decoding_stops",),
        "runtime/core/test_request": (
            "test_a_stop_token_cuts_the_run",
            "test_a_stop_string_may_span_two_steps",
            "test_max_tokens_cuts_a_run_of_four",
        ),
    },
    "T28 greedy equality": {
        STEP: ("test_speculation_never_changes_a_token",),
        "runtime/drafters/test_equality": ("test_no_drafter_changes_a_token",),
        "runtime/drafters/test_equality_on_a_bundle": ("test_no_drafter_changes_a_token_of_a_real_model",),
        "runtime/drafters/phrases/test_phrases": ("test_greedy_answers_are_the_same_with_any_pool",),
        "runtime/drafters/phrases/test_lookahead": ("test_no_window_changes_a_token",),
        "runtime/loop/test_tree_step": ("test_trees_never_change_a_token",),
    },
    "T29 pathwise equality": {
        STEP: (
            "test_speculation_never_changes_a_token",
            "test_a_seed_gives_the_same_answer_in_any_batch",
        ),
        SAMPLER: (
            "test_seed_stable_tokens_are_those_of_plain_decoding",
            "test_matched_point_masses_give_the_tokens_of_plain_decoding",
        ),
        "runtime/drafters/test_equality": (
            "test_no_drafter_changes_a_token",
            "test_point_masses_change_no_sampled_token",
        ),
        "runtime/drafters/test_equality_on_a_bundle": ("test_no_drafter_changes_a_token_of_a_real_model",),
        "runtime/drafters/model/test_cascade": ("test_a_cascade_drafts_the_draft_models_own_chain",),
    },
    "T30 audit of the caches": {
        "runtime/loop/test_cache_audit": (
            "test_both_caches_are_those_of_the_committed_tokens_after_every_step",
            "test_the_audit_sees_a_pointer_that_is_off_by_one",
        ),
        "engines/onnx/test_trees": (
            "test_cache_after_every_step_is_that_of_the_kept_tokens",
        ),
    },
    "T31 caches that cannot be rolled back": {
        "export/test_checkpoint": (
            "test_what_cannot_be_exported_is_refused_with_its_reason",
        )
    },
    "T32 what was rejected goes nowhere": {
        STEP: ("test_what_was_rejected_or_cut_reaches_no_figure",),
        SAMPLER: ("test_rejected_draft_tokens_leave_nothing_behind",),
        "runtime/drafters/phrases/test_phrases": (
            "test_rejected_drafts_reach_the_pool_by_option_only",
            "test_what_ouroboros_tried_and_the_target_corrected_reaches_the_pool_by_option_only",
        ),
    },
    "T33 what a node sees": {
        "engines/tree_contract": ("test_only_descendants_see_a_token",),
        "runtime/drafters/phrases/test_lookahead": ("test_places_and_sight_of_a_wide_window",),
    },
    "T34 beam search": {
        "runtime/loop/beams/test_beam": ("test_the_search_is_the_independent_ones",),
        "runtime/loop/beams/test_step": ("test_the_answer_is_the_plain_searchs",),
        "runtime/oracle/test_beam_drafts": ("test_a_draft_changes_nothing",),
    },
    "T35 other vocabularies": {
        STEP: (
            "test_a_draft_of_a_smaller_vocabulary_is_used_while_it_can_be_fed",
            "test_a_draft_of_a_larger_vocabulary_proposes_no_unknown_id",
        ),
        SAMPLER: ("test_a_draft_token_outside_the_vocabulary_is_rejected",),
    },
    "T36 rows that are not finite": {
        STEP: ("test_logits_that_are_not_finite_fail_their_request_alone",),
        SAMPLER: ("test_a_broken_row_ends_its_own_request_only",),
    },
    "T37 the target as its own draft": {
        SAMPLER: ("test_a_draft_that_is_the_target_is_always_kept",),
        "runtime/offline/test_alpha": ("test_a_model_drafted_by_itself_has_alpha_one",),
    },
    "T38 its argmax as its draft": {
        ORACLE: ("test_match_mode_with_equal_models_agrees_less_than_always",),
        SAMPLER: ("test_match_mode_with_equal_models_keeps_the_argmax_with_its_own_probability",),
    },
    "T39 the draft never falls behind": {
        STEP: ("test_the_draft_cache_never_falls_behind_in_a_long_run",)
    },
    "T40 drafters by hand": {
        "runtime/drafters/text/test_lookup": ("test_hand_examples",),
        "runtime/drafters/test_chains": (
            "test_the_hand_example_of_retrieval",
            "test_the_hand_example_of_suffix_decoding",
            "test_evicting_an_answer_changes_the_share_of_the_others",
        ),
        "runtime/drafters/test_branches": ("test_the_hand_example_of_retrieval_as_a_tree",),
        "runtime/drafters/phrases/test_phrases": ("test_the_hand_examples_of_matching_segments",),
        "runtime/drafters/phrases/test_lookahead": ("test_the_hand_example_of_a_window",),
    },
    "what is kept changes no answer": {
        "runtime/prefix_cache/test_reuse": (
            "test_answers_are_the_same_wherever_a_prompt_parts",
            "test_answers_of_a_bundle_are_the_same_at_every_split_point",
            "test_of_a_text_with_trees_what_chains_wrote_is_kept",
            "test_copies_that_fail_change_no_answer",
        ),
    },
    "prompts are scored by the model alone": {
        "runtime/loop/scores/test_scores": (
            "test_every_token_has_the_models_own_log_probability",
            "test_of_a_real_model_they_are_pytorchs",
            "test_neighbours_are_fed_the_chunks_that_they_have_without_it",
        ),
    },
    "token masks": {
        "engines/sampling/masks/test_laws": (
            "test_a_masked_chain_has_the_law_of_the_masked_target",
            "test_a_masked_block_has_the_law_of_the_masked_target",
            "test_a_masked_tree_has_the_law_of_the_masked_target",
            "test_masked_point_masses_have_their_law",
            "test_a_masked_lenient_round_has_the_oracles_law",
            "test_answers_under_masks_are_those_of_plain_decoding_whatever_is_drafted",
            "test_a_mask_acts_as_logits_banned_before_anything_else",
            "test_the_mask_of_a_trees_node_acts_as_logits_banned_there",
            "test_a_conflict_has_the_chance_of_plain_decoding",
        ),
        SAMPLING: ("test_fast_rows_agree_with_the_oracle_for_any_law",),
    },
    "failures change no token": {
        "runtime/loop/test_isolation": (
            "test_the_guilty_request_ends_alone_and_no_other_token_changes",
            "test_a_failure_that_does_not_come_again_ends_nobody",
            "test_a_guilty_search_ends_alone",
        ),
        "runtime/serving/test_engine_process": (
            "test_a_killed_engine_ends_the_stream_that_began_and_serves_the_rest_again",
        ),
    },
    "sources on a device": {
        "engines/source_contract": ("test_sources_read_together_answer_as_alone",),
        "engines/accelerators/onnx/test_device_sources": ("test_nan_left_by_a_longer_source_is_never_read",),
        "engines/accelerators/onnx/test_device_source_mutations": ("test_a_mistake_is_caught",),
        "engines/accelerators/device/test_emulated_sources": ("test_answers_are_those_of_the_cpu",),
        "export/accelerators/test_device_encode": (
            "test_they_lose_in_16_bits_at_most_twice_what_pytorch_does",
            "test_lengths_of_sources_are_read_as_they_are_given",
        ),
        "scripts/gpu/test_placement": ("test_no_tensor_crosses_to_the_host",),
    },
    "completions of one prompt are those of their own seeds": {
        "runtime/loop/samples/test_requests": (
            "test_each_is_the_answer_of_its_own_seed_asked_alone",
            "test_a_prompt_is_copied_to_the_draft_no_sooner_than_it_would_be_fed",
            "test_both_models_read_the_prompt_once",
        ),
        "engines/accelerators/loop/test_ahead": (
            "test_completions_of_one_prompt_are_those_of_their_own_seeds",
        ),
    },
    "chats are rendered as by Transformers, and people's words steer nothing": {
        "runtime/serving/chat/test_golden": (
            "test_texts_and_ids_are_those_of_transformers",
            "test_what_people_write_makes_no_control_token",
        ),
        "export/test_chat_golden": ("test_what_is_stored_is_what_transformers_renders",),
    },
    "answers with a form have the masked law, and what is forced is what it would have given": {
        "runtime/grammar/test_answers": (
            "test_answers_have_the_masked_law",
            "test_sampled_trees_have_the_masked_law",
            "test_no_drafter_and_no_neighbour_changes_a_token",
            "test_a_failed_pass_changes_no_token",
            "test_what_a_form_forces_against_the_request_is_a_conflict",
        ),
        "runtime/grammar/test_constraint": (
            "test_masks_are_those_of_a_fresh_form_after_any_drafts",
            "test_forced_tokens_are_all_that_the_masks_allow",
        ),
    },
    "the law of served answers, by drafter": {
        "runtime/drafters/test_laws": ("test_answers_have_the_targets_law",)
    },
}  # fmt: skip


@cache
def names_in(module: str) -> frozenset[str]:
    """Names of the tests in a file, those in classes included."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("entry", CATALOGUE)
def test_a_property_has_its_tests(entry: str) -> None:
    for module, names in CATALOGUE[entry].items():
        assert not set(names) - names_in(module), module


def test_no_number_is_missing() -> None:
    numbers = [entry.split()[0] for entry in CATALOGUE if entry.startswith("T")]
    assert numbers == [f"T{number}" for number in range(1, 41)]
