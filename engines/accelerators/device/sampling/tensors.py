"""Names, shapes and codes of what a device sampler's kernels read and write.

Letters: B rows, R positions of a row (its draft tokens and one more), V the target's vocabulary,
D positions that the memory of kept draft rows has room for. Lists are padded: ids with V, counts and
values with 0. Nothing here knows an inference library.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, Final

import numpy as np

# Probabilities become integers in units of 2 ** -42, so that sums are exact, whatever their order:
# a vocabulary of up to 2 ** 20 entries fits 62 bits, and what is lost is below 3e-7 altogether.
FRACTION_BITS: Final = 42
MAX_VOCAB_SIZE: Final = 1 << 20
# top_p in units of 2 ** -30: 62 bits of total may be multiplied by it in two halves.
TOP_P_BITS: Final = 30
UNIFORM_BITS: Final = 53
# Most entries beside a token's own log-probability.
MAX_TOP_LOGPROBS: Final = 20
# What no token is: padding of draft tokens and of the words' prefixes.
NO_TOKEN: Final = -1
NO_HISTORY: Final = -2


class Stage(StrEnum):
    """Stages of a round: a draft token of each row, the judgement of all drafts, log-probabilities of the answer."""

    PROPOSE = "propose"
    JUDGE = "judge"
    TOPS = "tops"


class Rule(IntEnum):
    """Rule by which a row's token is chosen and its draft judged; the values of ``Count.RULE``."""

    MATCH = 0
    RATIO = 1
    RACE = 2
    GREEDY = 3


class Count(IntEnum):
    """Columns of ``counts`` [B, 8] int64.

    RULE: a ``Rule``. GAMMA: judge only, the row's draft tokens. DEPTH: propose only, draft tokens
    before this one. KEEP_AT: propose only, position in the kept rows that is written. TOP_K: V for
    off. TOP_P: in units of 2 ** -30; see ``TOP_P_OFF``. END_BANNED: positions, counted from the
    start of the draft, at which ending tokens are banned. FLAGS: sum of ``Flag``.
    """

    RULE = 0
    GAMMA = 1
    DEPTH = 2
    KEEP_AT = 3
    TOP_K = 4
    TOP_P = 5
    END_BANNED = 6
    FLAGS = 7


TOP_P_OFF: Final = 1 << TOP_P_BITS


class Flag(IntEnum):
    """Values of ``Count.FLAGS``.

    NONE. POINT_MASS: the draft was not sampled, so all its mass is on one token. ALLOWED: the list of
    allowed ids counts. POINT_MASS_ALLOWED: both.
    """

    NONE = 0
    POINT_MASS = 1
    ALLOWED = 2
    POINT_MASS_ALLOWED = 3


class Setting(IntEnum):
    """Columns of ``settings`` [B, 8] float32.

    TEMPERATURE: positive. UP and DOWN: what the repetition penalty r adds to a positive and to
    another logit, per unit: 1 / r - 1 and r - 1. GREEDY_LENIENCE: 0 where greedy rows keep nothing
    but the greatest; else the least probability, in units of the greatest, that is kept.
    """

    TEMPERATURE = 0
    MIN_P = 1
    UP = 2
    DOWN = 3
    PRESENCE = 4
    FREQUENCY = 5
    LENIENCE = 6
    GREEDY_LENIENCE = 7


class Answer(IntEnum):
    """Leading columns of ``answers`` [B, 4 + R] int64; overlaps in units of 2 ** -42 follow.

    NUM_ACCEPTED and NEXT_TOKEN mean nothing where IS_FINITE is 0.
    """

    NUM_ACCEPTED = 0
    NEXT_TOKEN = 1
    IS_FINITE = 2
    NUM_FALLBACKS = 3


NUM_COUNTS: Final = len(Count)
NUM_SETTINGS: Final = len(Setting)
NUM_ANSWERS: Final = len(Answer)

LOGITS: Final = "logits"  # [B, R, V] float32 (propose: [B, any, V of the draft], column 0 counts)
DRAFT_TOKENS: Final = "draft_tokens"  # [B, R] int64, padded with NO_TOKEN
COUNTS: Final = "counts"
SETTINGS: Final = "settings"
COINS: Final = "coins"  # [B, R] int64, uniforms of acceptance in units of 2 ** -53
DRAWS: Final = "draws"  # [B, R] int64 (propose: [B, 1]), uniforms of draws
KEPT_ROWS: Final = "kept_rows"  # [B, 1, D, V] float32, probabilities of the draft tokens
SEEN_IDS: Final = "seen_ids"  # [B, any] int64, distinct tokens of the history
SEEN_COUNTS: Final = "seen_counts"  # [B, any] float32, 1 + how often each is in the output
BIAS_IDS: Final = "bias_ids"  # [B, any] int64, distinct
BIAS_VALUES: Final = "bias_values"  # [B, any] float32
ALLOWED_IDS: Final = "allowed_ids"  # [B, any] int64
END_IDS: Final = "end_ids"  # [B, any] int64
BAD_PREFIXES: Final = "bad_prefixes"  # [B, any, P] int64, right-aligned, NO_TOKEN matches anything
BAD_LASTS: Final = "bad_lasts"  # [B, any] int64
RECENT: Final = "recent"  # [B, P] int64, end of the output, right-aligned, padded with NO_HISTORY
SEED_LIMBS: Final = 4
SEEDS: Final = "seeds"  # [B, 4] int64, of shared noise: limbs of 16 bits, lowest first
POSITIONS: Final = "positions"  # [B, R] int64 (propose: [B, 1]), where shared noise is drawn

NEXT_TOKENS: Final = "next_tokens"  # propose: [B, 1] int64, feeds the draft model
NEW_DRAFT_TOKENS: Final = "new_draft_tokens"  # propose: [B, R], with the token written in
ANSWERS: Final = "answers"

EMITTED: Final = "emitted"  # tops: [B, R] int64
LOGPROBS: Final = "logprobs"  # tops: [B, R] float32
TOP_IDS: Final = "top_ids"  # tops: [B, R, N] int64
TOP_LOGPROBS: Final = "top_logprobs"  # tops: [B, R, N] float32

OUTPUTS: Final[Mapping[Stage, tuple[str, ...]]] = {
    Stage.PROPOSE: (NEXT_TOKENS, NEW_DRAFT_TOKENS),
    Stage.JUDGE: (ANSWERS,),
    Stage.TOPS: (LOGPROBS, TOP_IDS, TOP_LOGPROBS),
}
# The input of a stage that has the axis R.
COUNTED: Final[Mapping[Stage, str]] = {
    Stage.PROPOSE: DRAFT_TOKENS,
    Stage.JUDGE: DRAFT_TOKENS,
    Stage.TOPS: EMITTED,
}


def kept_depth(max_gamma: int) -> int:
    """D: a position for each draft token and one for what nobody reads; at least two."""
    return max(max_gamma, 1) + 1


def output_size(
    name: str, *, num_rows: int, positions: int, vocab_size: int
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an output."""
    shape: tuple[int, ...] = {
        NEXT_TOKENS: (1,),
        NEW_DRAFT_TOKENS: (positions,),
        ANSWERS: (NUM_ANSWERS + positions,),
        LOGPROBS: (positions,),
        TOP_IDS: (positions, min(MAX_TOP_LOGPROBS, vocab_size)),
        TOP_LOGPROBS: (positions, min(MAX_TOP_LOGPROBS, vocab_size)),
    }[name]
    is_float = name in (LOGPROBS, TOP_LOGPROBS)
    return (num_rows, *shape), np.dtype(np.float32 if is_float else np.int64)
