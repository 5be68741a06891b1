"""Rows to sample as the arrays that the sampler's kernels read: what, how, and with which noise.

Pure numpy. Which rule judges a row is decided here, as ``engines.sampling.cpu_sampler`` decides it, and so is
every random number: noise is a function of its address, so the host draws that of a whole round
before the round begins, and nothing has to come back for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.lists import describe_lists, why_not
from outrider.engines.accelerators.device.sampling.tensors import Count, Flag, Rule, Setting
from outrider.engines.base import EngineError, FloatArray, IntArray
from outrider.engines.sampling.base import ExactnessMode, SamplingRow
from outrider.engines.sampling.noise import NoiseSource, Purpose

Feeds = dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a call: rows B, positions R, kept positions D, vocabulary V."""

    num_rows: int
    num_positions: int
    depth: int
    vocab_size: int


def proposal_rule(row: SamplingRow) -> Rule:
    """Return the rule that chooses a draft token."""
    if row.params.is_greedy:
        return Rule.GREEDY
    return Rule.RACE if row.mode is ExactnessMode.SEED_STABLE else Rule.MATCH


def judgement_rule(row: SamplingRow, gamma: int) -> Rule:
    """Return the rule that judges a draft of ``gamma`` tokens and chooses the token after it."""
    if row.params.is_greedy:
        return Rule.GREEDY
    if row.mode is ExactnessMode.SEED_STABLE:
        return Rule.RACE
    is_judged = row.is_sampled_draft or _lenience(row) != 1.0
    return Rule.RATIO if gamma and is_judged else Rule.MATCH


def describe(rows: Sequence[SamplingRow], shape: Shape) -> Feeds:
    """Return what kernels read of their rows, except for what ``describe_proposal`` and ``describe_judgement`` add.

    Settings are there where a row needs more than its greatest raw logit, and lists where a row has any. Rows of the
    batch that are not among ``rows`` are greedy, draft nothing, and write what they keep to the last position of their
    slot, which no draft token has.

    Raises:
        EngineError: a row has masks, or a parameter that the kernels do not have.
    """
    counts = np.zeros((shape.num_rows, names.NUM_COUNTS), dtype=np.int64)
    counts[:, Count.RULE] = Rule.GREEDY
    counts[:, Count.TOP_K] = shape.vocab_size
    counts[:, Count.TOP_P] = names.TOP_P_OFF
    counts[:, Count.KEEP_AT] = shape.depth - 1
    tokens = np.full((shape.num_rows, shape.num_positions), names.NO_TOKEN, dtype=np.int64)
    feeds: Feeds = {names.COUNTS: counts, names.DRAFT_TOKENS: tokens}
    for row in rows:
        if row.masks is not None:
            raise EngineError("the sampler's kernels take no token masks")
        if reason := why_not(row.params):
            raise EngineError(reason)
        tokens[row.index, : len(row.draft_tokens)] = row.draft_tokens
        _count_cuts(counts[row.index], row, shape.vocab_size)
    has_lists = any(row.params.has_processors for row in rows)
    if has_lists or any(not row.params.is_greedy or _lenience(row) != 1.0 for row in rows):
        feeds[names.SETTINGS] = _settings(rows, shape)
    if has_lists:
        feeds.update(describe_lists(rows, shape.num_rows, vocab_size=shape.vocab_size))
    return feeds


def describe_proposal(
    feeds: Feeds, rows: Sequence[SamplingRow], shape: Shape, noise: NoiseSource, depths: IntArray
) -> Feeds:
    """Arrays of one proposal on top of ``describe``; ``depths`` [len(rows)] tokens come before."""
    counts = feeds[names.COUNTS].copy()
    draws = np.zeros((shape.num_rows, 1), dtype=np.int64)
    for row, depth in zip(rows, depths.tolist(), strict=True):
        counts[row.index, Count.RULE] = rule = proposal_rule(row)
        counts[row.index, Count.DEPTH] = depth
        if rule is Rule.MATCH:
            counts[row.index, Count.KEEP_AT] = depth
            position = len(row.history) + depth
            draws[row.index] = _mantissa(noise, row, Purpose.DRAFT, position, is_keyed=True)
    result: Feeds = feeds | {names.COUNTS: counts}
    if names.SETTINGS in feeds:
        result[names.DRAWS] = draws
    return result


def describe_judgement(
    feeds: Feeds, rows: Sequence[SamplingRow], shape: Shape, noise: NoiseSource, gammas: IntArray
) -> Feeds:
    """Arrays of a judgement on top of ``describe``; the rows drafted ``gammas`` [len(rows)]."""
    counts = feeds[names.COUNTS].copy()
    draws = np.zeros((shape.num_rows, shape.num_positions), dtype=np.int64)
    coins = np.zeros_like(draws)
    for row, gamma in zip(rows, gammas.tolist(), strict=True):
        counts[row.index, Count.RULE] = rule = judgement_rule(row, gamma)
        counts[row.index, Count.GAMMA] = gamma
        if rule is Rule.RATIO and row.verifies_block:
            raise EngineError("the sampler's kernels judge token by token, not whole blocks")
        if not row.is_sampled_draft:
            counts[row.index, Count.FLAGS] += Flag.POINT_MASS
        if rule in (Rule.MATCH, Rule.RATIO):
            coins[row.index, :gamma], draws[row.index, : gamma + 1] = _judging_noise(
                noise, row, rule, gamma
            )
    result: Feeds = feeds | {names.COUNTS: counts}
    if names.SETTINGS in feeds:
        result |= {names.DRAWS: draws, names.COINS: coins}
    return result


def race_addresses(
    rows: Sequence[SamplingRow], shape: Shape, spans: Sequence[range], width: int
) -> Feeds:
    """Return where kernels draw shared noise, at each row's ``spans``; 0 for rows that do not race.

    Nothing where no row races.
    """
    if not any(_has_race(row) for row in rows):
        return {}
    seeds = np.zeros((shape.num_rows, names.SEED_LIMBS), dtype=np.int64)
    positions = np.zeros((shape.num_rows, width), dtype=np.int64)
    for row, span in zip(rows, spans, strict=True):
        if _has_race(row):
            limbs = range(names.SEED_LIMBS)
            seeds[row.index] = [(row.seed >> (16 * limb)) & 0xFFFF for limb in limbs]
            positions[row.index, : len(span)] = [len(row.history) + depth for depth in span]
    return {names.SEEDS: seeds, names.POSITIONS: positions}


def _lenience(row: SamplingRow) -> float:
    return row.lenience if row.mode is ExactnessMode.LENIENT else 1.0


def _has_race(row: SamplingRow) -> bool:
    return row.mode is ExactnessMode.SEED_STABLE and not row.params.is_greedy


def _settings(rows: Sequence[SamplingRow], shape: Shape) -> FloatArray:
    settings = np.zeros((shape.num_rows, names.NUM_SETTINGS), dtype=np.float32)
    settings[:, Setting.TEMPERATURE] = 1.0
    settings[:, Setting.LENIENCE] = 1.0
    for row in rows:
        params, values = row.params, settings[row.index]
        if not params.is_greedy:
            values[Setting.TEMPERATURE] = max(params.temperature, _SMALLEST_TEMPERATURE)
            values[Setting.MIN_P] = params.min_p
        values[Setting.UP] = 1.0 / params.repetition_penalty - 1.0
        values[Setting.DOWN] = params.repetition_penalty - 1.0
        values[Setting.PRESENCE] = params.presence_penalty
        values[Setting.FREQUENCY] = params.frequency_penalty
        lenience = _lenience(row)
        values[Setting.LENIENCE] = lenience
        values[Setting.GREEDY_LENIENCE] = 0.0 if lenience == 1.0 else lenience
    return settings


def _count_cuts(counts: IntArray, row: SamplingRow, vocab_size: int) -> None:
    """Fill the columns that say what a row truncates and bans."""
    params = row.params
    if not params.is_greedy:
        if 0 < params.top_k < vocab_size:
            counts[Count.TOP_K] = params.top_k
        share = round(params.top_p * names.TOP_P_OFF)
        counts[Count.TOP_P] = min(max(share, 1), names.TOP_P_OFF)
    num_output = len(row.history) - row.num_prompt
    counts[Count.END_BANNED] = max(0, params.min_tokens - num_output)
    counts[Count.FLAGS] = Flag.ALLOWED if params.allowed_token_ids else Flag.NONE


def _judging_noise(
    noise: NoiseSource, row: SamplingRow, rule: Rule, gamma: int
) -> tuple[list[int], list[int]]:
    """Coins of the draft tokens, and for every position the number that draws its token."""
    start = len(row.history)
    positions = range(start, start + gamma)
    if rule is Rule.MATCH:
        matched = [
            _mantissa(noise, row, Purpose.MATCH, position, is_keyed=False)
            for position in (*positions, start + gamma)
        ]
        return [0] * gamma, matched
    coins = [_mantissa(noise, row, Purpose.ACCEPT, p, is_keyed=True) for p in positions]
    draws = [_mantissa(noise, row, Purpose.RECOVER, p, is_keyed=True) for p in positions]
    draws.append(_mantissa(noise, row, Purpose.BONUS, start + gamma, is_keyed=True))
    return coins, draws


def _mantissa(
    noise: NoiseSource, row: SamplingRow, purpose: Purpose, position: int, *, is_keyed: bool
) -> int:
    """One uniform number in units of 2 ** -53, keyed by the round or by the position alone."""
    drawn = noise.uniform(
        row.seed,
        purpose=purpose,
        position=position,
        round_start=len(row.history) if is_keyed else None,
    )
    return int(drawn * (1 << names.UNIFORM_BITS))
