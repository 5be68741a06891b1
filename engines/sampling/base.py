"""The sampler contract: parameters of sampling, rows to draw for or to judge, and verdicts.

Pure value types and two protocols. The numpy oracle in ``runtime.oracle`` and every sampler implement the same
distributions; nothing here draws a random number or knows an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray, IntArray, step_value

IntArray32 = npt.NDArray[np.int32]

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class ExactnessMode(StrEnum):
    """Rule by which a draft token is judged.

    MAX_ACCEPT: ratio test with residual for sampled drafts, sample and match for point masses; exact.
    SEED_STABLE: draft and target share Gumbel noise keyed by (seed, position, token); the very tokens of plain seeded
        sampling, for any drafter.
    LENIENT: Leviathan et al. 2023, appendix A.5; not exact, no token above p / lenience.
    """

    MAX_ACCEPT = "max_accept"
    SEED_STABLE = "seed_stable"
    LENIENT = "lenient"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that turn a row of logits into the distribution of the next token.

    Applied in this order: the row's mask (``SamplingRow.masks``), allowed ids and bad words, logit bias, repetition
    penalty (prompt and output), presence and frequency penalties (output only), min_tokens ban of ``end_token_ids``
    (under a mask not where it would leave no token), ban of repeated n-grams; top-n-sigma; temperature; top-k
    (exactly k, ties by lower id; 0 or >= V is off); top-p (kept while the mass before is < top_p); min-p relative to
    the row's maximum; renormalise. Temperature 0 is greedy: all mass on the lowest id of the greatest logit.

    Attributes:
        bad_words: token sequences; the last token is banned wherever the ones before it have just been produced.
        min_tokens: ``end_token_ids`` are banned until this many output tokens exist.
        end_token_ids: EOS (unless ignored) and stop ids.
        no_repeat_ngram_size: n; banned is a token that would complete n tokens which prompt and output have already, as
            in Transformers. Where that would leave no token to draw, nothing is banned for it. 0 is off.
        top_n_sigma: n; kept are logits within n standard deviations (of the finite ones, over their number) of the
            greatest. 0 is off. Source: Tang et al. 2024 (arXiv:2411.07641), section 3.
        is_greedy: whether it is a point mass on the greatest logit.
        has_processors: whether anything but temperature and truncation changes the logits.
        is_dense: whether the distribution covers the whole vocabulary: temperature above 0, no processors, no top-k.
        inverse_temperature: 1 / temperature, finite at any temperature.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    top_n_sigma: float = 0.0
    is_greedy: bool = field(init=False, repr=False, compare=False)
    has_processors: bool = field(init=False, repr=False, compare=False)
    is_dense: bool = field(init=False, repr=False, compare=False)
    inverse_temperature: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out once the properties that every step asks for."""
        is_greedy = self.temperature == 0.0
        has_processors = (
            bool(self.allowed_token_ids or self.bad_words or self.logit_bias)
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or (self.min_tokens > 0 and bool(self.end_token_ids))
            or self.no_repeat_ngram_size > 0
            or self.top_n_sigma > 0.0
        )
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_processors", has_processors)
        is_dense = not (is_greedy or has_processors or self.top_k > 0)
        object.__setattr__(self, "is_dense", is_dense)
        inverse_temperature = 1.0 / max(self.temperature, _SMALLEST_TEMPERATURE)
        object.__setattr__(self, "inverse_temperature", inverse_temperature)


@step_value
class SamplingRow:
    """One row to draw for or to judge.

    The token after ``history + draft_tokens[:i]`` has position ``len(history) + i``; the round started at
    ``len(history)``.

    Attributes:
        index: row b of the logits [B, R, V] passed along.
        slot: key under which proposed probability rows are kept until judged.
        seed: 64-bit seed of the request.
        history: [n] int64, prompt and committed output.
        num_prompt: leading tokens of ``history`` that are prompt.
        draft_tokens: drafted so far this round (propose; a list may grow between calls), or the whole draft (judge).
        is_sampled_draft: judge only; whether the draft's probability rows were kept by ``propose``. False for point
            masses (retrieval, greedy drafts).
        num_logprobs: top entries wanted beside each emitted token's logprob; None for no logprobs.
        num_choices: judge only; most likely tokens wanted at every position of the draft, whether kept or not.
        verifies_block: judge only; whether a sampled draft of a max_accept row is judged as a whole instead of token by
            token (``engines.sampling.block_judge``): the same distribution, and never fewer tokens in expectation.
        parents: judge only; None for a chain. For a tree, draft token i is node i + 1 and stands behind node
            ``parents[i]``, one of 0..i, where node 0 is the last token of ``history`` (``engines.trees``); column n of
            the row's logits follows node n. Trees are judged by ``engines.sampling.tree_judge``.
        candidates: judge only, of a sampled tree: per node 0..N its children, the drawn one first, all
            different; ``CandidateSampler.propose_children`` kept their probabilities. Without them a tree holds point
            masses.
        masks: [M, ceil(V / 32)] int32, rows contiguous, V of the target; None where every token may follow. Bit t % 32
            of word t // 32 of row i says whether token t may follow ``history + draft_tokens[:i]``. Read are: to judge
            a chain, rows 0..gamma; a tree, row n of node n; ``propose``, row ``len(draft_tokens)``; and
            ``propose_children``, the row of ``CandidateNode.column``.
    """

    index: int
    slot: int
    params: SamplingParams
    mode: ExactnessMode
    lenience: float
    seed: int
    history: IntArray
    num_prompt: int
    draft_tokens: Sequence[int] = ()
    is_sampled_draft: bool = False
    num_logprobs: int | None = None
    num_choices: int = 0
    verifies_block: bool = False
    parents: tuple[int, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    masks: IntArray32 | None = None


def are_plain_greedy(rows: Sequence[SamplingRow]) -> bool:
    """Say whether every row is decided by its greatest raw logit."""
    for row in rows:
        params = row.params
        if not params.is_greedy or params.has_processors or row.masks is not None:
            return False
        if row.mode is ExactnessMode.LENIENT and row.lenience != 1.0:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateNode:
    """A node of a tree whose children are to be drawn.

    Attributes:
        row: as for ``Sampler.propose``; ``draft_tokens`` lead from the root to the node.
        column: of the row's logits, behind the node.
        node: the drafter's own number of it, another for every node of a round; part of its noise's address.
        count: children to draw.
    """

    row: SamplingRow
    column: int
    node: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities under the target's unadjusted softmax (temperature 1, no processors), natural logarithm."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuations:
    """Tokens that may follow a text, each once.

    Attributes:
        tokens: [K] int64.
        log_probs: [K] float64, their log-probabilities, defined as in ``TokenLogprobs``; no NaN.
    """

    tokens: IntArray
    log_probs: npt.NDArray[np.float64]


@step_value
class Verdict:
    """Outcome of one verification for one row.

    Attributes:
        num_accepted: leading draft tokens kept, 0..gamma.
        next_token: recovered (num_accepted < gamma) or bonus token; None when the row's logits were not finite, or no
            token may follow. Then nothing may be emitted.
        overlaps: sum of min(p, q) at each position reached, where probability rows exist; else empty.
        num_fallbacks: residuals of (numerically) zero mass replaced by p.
        logprobs: one per emitted token (num_accepted + 1), or empty.
        choices: per position 0..gamma the ``num_choices`` tokens of greatest raw logit, greatest first; or empty. They
            are functions of the tokens fed alone, so a drafter may learn from them what it likes. Of a tree, per node.
        path: of a tree, the nodes kept, from the root's child down; empty for a chain.
        has_conflict: whether mask, allowed ids and bans together leave no token to draw. Samplers of devices do not
            tell it from logits that are not finite.
    """

    num_accepted: int
    next_token: int | None
    overlaps: tuple[float, ...] = ()
    num_fallbacks: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    path: tuple[int, ...] = ()
    has_conflict: bool = False


MAX_BEHIND = 16
"""Point masses that a draft may have behind its gamma tokens, on the host: phrases behind a draft model's."""


class Sampler(Protocol):
    """Draws and judges on the engine's device; only integers (and asked-for logprobs) reach the host."""

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Draw one draft token per row and keep its probabilities for ``judge`` where the mode needs them.

        Args:
            logits: [B, R, V_draft] float32 of the draft model; column 0 of each row is used.
            rows: rows to draw for; ``len(draft_tokens)`` is the draft position.
            vocab_size: the target's V; ids at or beyond it are never proposed.
        """
        ...

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge whole drafts; a row without draft tokens is plain decoding.

        Args:
            logits: [B, R, V] float32 of the target; columns 0..gamma of a row follow the last committed token and each
                draft token.
            rows: what to judge, in any order; one verdict each, in the same order.
        """
        ...


@runtime_checkable
class CandidateSampler(Sampler, Protocol):
    """A sampler that also draws trees of candidates, and judges them by the probabilities they were drawn with."""

    def propose_children(
        self, logits: FloatArray, points: Sequence[CandidateNode], *, vocab_size: int
    ) -> list[tuple[int, ...]]:
        """Choose children of nodes, in the order they will be tested, and keep their probabilities for ``judge``.

        Drawing at the root of a row forgets what was kept of its last tree.

        Args:
            logits: [B, R, V_draft] float32 of the draft model.
            points: of rows whose drafts are judged by ratio: not greedy, not of mode seed_stable.
            vocab_size: the target's V; ids at or beyond it are never proposed.

        Returns:
            Per point as many different ids as wanted; fewer where nothing is left to draw.
        """
        ...
