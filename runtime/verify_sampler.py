"""Proof on a user's own bundle that speculation leaves the target's distribution alone.

Three kinds of checks. Drawing: the device sampler draws from rows of the target's real logits, against
the laws that the numpy oracle computes. Rounds: the draft model's real rows propose, the sampler
judges, and the first token of the round must follow the target's law. Pair: whole completions with
speculation against whole completions without, first tokens compared. Each check is a chi-square test
at level false_alarm / number of checks, so that a correct bundle fails with at most about that
probability in all; a token of probability zero fails at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engines import open_engine
from engines.base import Engine, FloatArray, Span
from engines.bundle import TOKENIZER_FILE, Bundle, load_bundle
from engines.cpu_sampler import CpuSampler
from engines.laws import ExactnessMode, SamplingLaw, SamplingRow
from runtime.chi_square import goodness_of_fit, homogeneity
from runtime.core.config import ServerConfig
from runtime.core.params import Event, Failed, Progressed, RequestSpec, SpeculationParams
from runtime.core.sampling import adjusted_probs
from runtime.tokenizer import TokenizersCodec
from runtime.worker import Worker

NUM_PROMPTS = 2
NUM_PROMPT_TOKENS = 8
NUM_FIRST_TOKENS = 3
# Rows judged in one call, and slots of the pair, where the bundle allows as many.
NUM_ROWS = 32

LAWS: Mapping[str, SamplingLaw] = {
    "plain": SamplingLaw(),
    "temperature 0.7": SamplingLaw(temperature=0.7),
    "top-k 8, top-p 0.9": SamplingLaw(top_k=8, top_p=0.9),
    "min-p 0.05, penalties": SamplingLaw(
        min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One test: its p-value, 0.0 when a token of probability zero was drawn."""

    name: str
    num_draws: int
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Outcome of all checks.

    Attributes:
        false_alarm: chance that a correct bundle fails, all checks together.
    """

    checks: tuple[Check, ...]
    false_alarm: float

    @property
    def level(self) -> float:
        """Smallest p-value that passes (Bonferroni)."""
        return self.false_alarm / len(self.checks)

    @property
    def has_passed(self) -> bool:
        """Whether every check passed."""
        return all(check.p_value >= self.level for check in self.checks)

    def table(self) -> str:
        """Text for people."""
        lines = [
            f"{'ok  ' if check.p_value >= self.level else 'FAIL'} {check.name:50s} "
            f"draws {check.num_draws:6d}  p-value {check.p_value:.3g}"
            for check in self.checks
        ]
        verdict = "passed" if self.has_passed else "FAILED"
        lines.append(
            f"{verdict}: {len(self.checks)} checks, each at level {self.level:.2g}; "
            f"false-alarm rate of the whole at most about {self.false_alarm:.2g}"
        )
        return "\n".join(lines)


def verify(bundle_root: Path, *, num_samples: int, false_alarm: float, seed: int) -> VerifyReport:
    """Run all checks on a bundle.

    Args:
        bundle_root: folder of the bundle.
        num_samples: draws per check.
        false_alarm: wanted false-alarm rate of the whole, in (0, 1).
        seed: first of the request seeds.

    Raises:
        BundleError: the bundle does not fit its manifest.
    """
    bundle = load_bundle(bundle_root)
    manifest = bundle.manifest
    num_rows = min(NUM_ROWS, manifest.max_batch)
    target = open_engine(bundle, "target", max_batch=num_rows)
    draft = None
    if manifest.draft is not None and manifest.max_gamma > 0:
        draft = open_engine(bundle, "draft", max_batch=num_rows)
    sampler = CpuSampler(
        max_batch=num_rows,
        max_gamma=manifest.max_gamma,
        vocab_size=manifest.target.vocab_size,
    )
    prompts = _prompts(manifest.target.vocab_size, seed)
    checks: list[Check] = []
    for number, prompt in enumerate(prompts):
        bench = _Bench(target, draft, sampler, prompt, num_samples, seed)
        for name, law in LAWS.items():
            checks.append(bench.check_draws(f"prompt {number}: draw, {name}", law))
            if draft is not None:
                for mode in (ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE):
                    title = f"prompt {number}: round, {mode.value}, {name}"
                    checks.append(bench.check_rounds(title, law, mode))
    checks += _check_pair(bundle, target, draft, prompts[0], num_samples, seed)
    for engine in (target, draft):
        if engine is not None:
            engine.close()
    return VerifyReport(checks=tuple(checks), false_alarm=false_alarm)


class _Bench:
    """The sampler on one prompt's real rows."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        sampler: CpuSampler,
        prompt: tuple[int, ...],
        num_samples: int,
        seed: int,
    ) -> None:
        self._target = target
        self._draft = draft
        self._sampler = sampler
        self._prompt = prompt
        self._num_samples = num_samples
        self._seed = seed
        self._target_row = _last_row(target, prompt)
        self._draft_row = None if draft is None else _last_row(draft, prompt)

    def check_draws(self, name: str, law: SamplingLaw) -> Check:
        """Plain draws against the oracle's law."""
        counts: Counter[int] = Counter()
        for rows in self._batches(law, ExactnessMode.MAX_ACCEPT):
            logits = np.repeat(self._target_row[None, None], len(rows), axis=0)
            counts.update(_tokens([v.next_token for v in self._sampler.judge(logits, rows)]))
        return self._compare(name, counts, law)

    def check_rounds(self, name: str, law: SamplingLaw, mode: ExactnessMode) -> Check:
        """First tokens of rounds that drafted one token, against the oracle's law."""
        assert self._draft_row is not None
        vocab_size = len(self._target_row)
        counts: Counter[int] = Counter()
        after: dict[int, FloatArray] = {}
        for rows in self._batches(law, mode):
            logits = np.repeat(self._draft_row[None, None], len(rows), axis=0)
            drafted = self._sampler.propose(logits, rows, vocab_size=vocab_size)
            for token in set(drafted) - set(after):
                after[token] = _last_row(self._target, (*self._prompt, token))
            judged = [
                replace(row, draft_tokens=(token,), is_sampled_draft=True)
                for row, token in zip(rows, drafted, strict=True)
            ]
            pairs = np.stack([np.stack([self._target_row, after[token]]) for token in drafted])
            verdicts = self._sampler.judge(pairs, judged)
            firsts = [
                token if verdict.num_accepted else verdict.next_token
                for token, verdict in zip(drafted, verdicts, strict=True)
            ]
            counts.update(_tokens(firsts))
        return self._compare(name, counts, law)

    def _batches(self, law: SamplingLaw, mode: ExactnessMode) -> list[list[SamplingRow]]:
        history = np.array(self._prompt, dtype=np.int64)
        num_rows = self._target.limits.max_batch
        rows = [
            SamplingRow(
                index=number % num_rows,
                slot=number % num_rows,
                law=law,
                mode=mode,
                lenience=1.0,
                seed=self._seed + number,
                history=history,
                num_prompt=len(history),
            )
            for number in range(self._num_samples)
        ]
        return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]

    def _compare(self, name: str, counts: Counter[int], law: SamplingLaw) -> Check:
        history = np.array(self._prompt, dtype=np.int64)
        probs = adjusted_probs(self._target_row, law, history, len(history))
        p_value = goodness_of_fit(counts, probs)
        return Check(name=name, num_draws=counts.total(), p_value=p_value)


def _check_pair(
    bundle: Bundle,
    target: Engine,
    draft: Engine | None,
    prompt: tuple[int, ...],
    num_samples: int,
    seed: int,
) -> list[Check]:
    """Completions of the real pair, with speculation and without, by first-token marginals."""
    drafter = "lookup" if draft is None else "model"
    with_drafts = SpeculationParams(drafter=drafter, gamma=min(4, bundle.manifest.max_gamma))
    alone = SpeculationParams(is_enabled=False)
    sides = [
        _completions(bundle, target, draft, prompt, params, range(first, first + num_samples))
        for params, first in ((with_drafts, seed), (alone, seed + num_samples))
    ]
    return [
        Check(
            name=f"pair: token {k + 1} with {drafter} drafts, against the target alone",
            num_draws=2 * num_samples,
            p_value=homogeneity(*(Counter(tokens[k] for tokens in side) for side in sides)),
        )
        for k in range(NUM_FIRST_TOKENS)
    ]


def _completions(
    bundle: Bundle,
    target: Engine,
    draft: Engine | None,
    prompt: tuple[int, ...],
    params: SpeculationParams,
    seeds: range,
) -> list[tuple[int, ...]]:
    manifest = bundle.manifest
    num_rows = target.limits.max_batch
    worker = Worker(
        target=target,
        draft=draft,
        sampler=CpuSampler(
            max_batch=num_rows, max_gamma=manifest.max_gamma, vocab_size=manifest.target.vocab_size
        ),
        config=ServerConfig(
            max_running=num_rows,
            max_queued=len(seeds),
            max_queued_tokens=len(seeds) * len(prompt),
            queue_timeout_s=math.inf,
        ),
        max_gamma=manifest.max_gamma,
        decoder=TokenizersCodec(bundle.root / TOKENIZER_FILE),
    )
    receivers = [_Receiver() for _ in seeds]
    for seed, receiver in zip(seeds, receivers, strict=True):
        spec = RequestSpec(
            internal_id=str(seed),
            request_id=str(seed),
            prompt_tokens=prompt,
            law=SamplingLaw(),
            seed=seed,
            max_tokens=NUM_FIRST_TOKENS,
            speculation=params,
        )
        worker.submit(spec, receiver)
    while worker.run_step():
        pass
    if error := next((r.error for r in receivers if r.error is not None), None):
        raise error
    return [tuple(receiver.tokens) for receiver in receivers]


class _Receiver:
    """Collects the tokens of one completion, or its error."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self.tokens.extend(token.token for token in event.tokens)
        elif isinstance(event, Failed):
            self.error = event.error


def _prompts(vocab_size: int, seed: int) -> Sequence[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocab_size, size=(NUM_PROMPTS, NUM_PROMPT_TOKENS))
    return [tuple(int(token) for token in row) for row in ids]


def _last_row(engine: Engine, tokens: tuple[int, ...]) -> FloatArray:
    """[V] float32 logits after a prefix, owned by the caller."""
    logits = engine.extend([Span(slot=0, start=0, tokens=tokens, num_logits=1)])
    return np.array(logits[0, 0], dtype=np.float32)


def _tokens(drawn: Sequence[int | None]) -> list[int]:
    """Drawn tokens; a row without one had logits that were not finite."""
    if any(token is None for token in drawn):
        raise FloatingPointError("the model's logits are not finite")
    return [token for token in drawn if token is not None]
