"""Compares whole completions of a real pair with speculation and without."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import CandidateSampler, ExactnessMode, SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Event, Failed, Progressed
from outrider.runtime.core.params import Prompt, RequestSpec, SpeculationParams
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TokenizersCodec
from outrider.runtime.verify.chi_square import homogeneity
from outrider.runtime.verify.report import Check

NUM_TOKENS = 4
"""Tokens of a completion: on the host the first comes with the prompt, the others with rounds."""
PLAIN = SamplingParams()
PENALISED = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
_POINT_DRAFTER = "suffix"
"""All completions have one prompt and one scope, so that earlier ones are what it proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How completions are drafted for, and the parameters they are sampled with."""

    name: str
    speculation: SpeculationParams
    params: SamplingParams = PLAIN


def pair_steps(
    bundle: Bundle, pair: Pair, name: str, prompt: Prompt, num_samples: int, seed: int
) -> Iterator[Callable[[], list[Check]]]:
    """Yield the checks of completions with speculation of each kind against the target alone, to be called.

    One per position of the tokens, of completions with other seeds. ``seed_stable`` completions of the same seeds are
    equal, where the target gives a token the same bits in any batch.
    """
    with_seeds = range(seed, seed + num_samples)
    others = range(seed + num_samples, seed + 2 * num_samples)
    few = with_seeds[: math.ceil(num_samples / 4)]  # equality needs no large sample
    off = SpeculationParams(is_enabled=False)
    stable = replace(off, mode=ExactnessMode.SEED_STABLE)

    @cache
    def tokens_of(
        params: SamplingParams, speculation: SpeculationParams, seeds: range
    ) -> tuple[list[tuple[int, ...]], int]:
        return _completions(bundle, pair, prompt, params, speculation, seeds)

    def check(way: Way) -> list[Check]:
        found, num_drafted = tokens_of(way.params, way.speculation, with_seeds)
        alone, _ = tokens_of(way.params, off, others)
        # Where nothing is drafted, equal laws prove nothing.
        title = f"{name}: pair, {way.name}, {num_drafted} tokens drafted"
        checks = [Check(name=title, num_draws=0, p_value=float(num_drafted > 0))]
        checks += [
            Check(
                name=f"{name}: pair, {way.name}, token {k + 1}",
                num_draws=2 * num_samples,
                p_value=homogeneity(
                    Counter(run[k] for run in found), Counter(run[k] for run in alone)
                ),
            )
            for k in range(NUM_TOKENS)
        ]
        if pair.target.is_row_invariant and not way.speculation.verifies_block:
            asked = replace(way.speculation, mode=ExactnessMode.SEED_STABLE)
            found, _ = tokens_of(way.params, asked, few)
            checks.append(
                Check(
                    name=f"{name}: pair, {way.name}, seed_stable tokens equal",
                    num_draws=2 * len(few),
                    p_value=float(found == tokens_of(way.params, stable, few)[0]),
                )
            )
        return checks

    for way in _ways(bundle, pair, prompt):
        yield partial(check, way)


def _ways(bundle: Bundle, pair: Pair, prompt: Prompt) -> Iterator[Way]:
    gamma = min(4, bundle.manifest.max_gamma)
    points = SpeculationParams(drafter=_POINT_DRAFTER, gamma=gamma)
    yield Way(name="point masses", speculation=points)
    if pair.draft is None:
        yield Way(name="point masses, penalties", speculation=points, params=PENALISED)
        return
    model = SpeculationParams(drafter="model", gamma=gamma)
    yield Way(name="model", speculation=model)
    yield Way(name="model, penalties", speculation=model, params=PENALISED)
    yield Way(name="model, as a block", speculation=replace(model, verifies_block=True))
    last = prompt.tokens[-1]
    shaped = SamplingParams(
        logit_bias=((last, 2.0),),
        bad_words=((last, last),),
        no_repeat_ngram_size=3,
        min_tokens=NUM_TOKENS,
        end_token_ids=bundle.manifest.eos_token_ids,
    )
    title = "model, bias, bad words, n-grams, min_tokens"
    yield Way(name=title, speculation=model, params=shaped)
    if not pair.draft.limits.reads_features:  # a head reads drafted tokens one at a time
        yield Way(name="cascade", speculation=replace(model, drafter=f"model/{_POINT_DRAFTER}"))
    takes_trees = min(pair.target.limits.max_tree_nodes, pair.draft.limits.max_tree_nodes) > 1
    if takes_trees and isinstance(pair.sampler, CandidateSampler):
        yield Way(name="tree", speculation=replace(model, drafter="tree", branching=(3, 2)))


def _completions(
    bundle: Bundle, pair: Pair, prompt: Prompt, params: SamplingParams, speculation: SpeculationParams,
    seeds: range,
) -> tuple[list[tuple[int, ...]], int]:  # fmt: skip
    """Return the tokens of a completion for each seed, and how many tokens were drafted for them."""
    worker = _worker(bundle, pair, num_queued=len(seeds), num_tokens=len(prompt))
    receivers = [_Receiver() for _ in seeds]
    for seed, receiver in zip(seeds, receivers, strict=True):
        spec = RequestSpec(
            internal_id=str(seed),
            request_id=str(seed),
            prompt_tokens=prompt.tokens,
            source_tokens=prompt.source,
            source_is_quotable=prompt.is_quotable,
            params=params,
            seed=seed,
            max_tokens=NUM_TOKENS,
            speculation=speculation,
        )
        worker.submit(spec, receiver)
    while worker.run_step():
        pass
    if error := next((r.error for r in receivers if r.error is not None), None):
        raise error
    tokens = [tuple(receiver.tokens) for receiver in receivers]
    return tokens, worker.snapshot().num_drafted


def _worker(bundle: Bundle, pair: Pair, *, num_queued: int, num_tokens: int) -> Worker:
    """Return a worker whose queue takes ``num_queued`` prompts of ``num_tokens`` tokens, without a time limit."""
    num_rows = pair.target.limits.max_batch
    return Worker(
        ServedEngines(
            target=pair.target,
            draft=pair.draft,
            sampler=pair.sampler,
            rounds=pair.rounds,
            max_gamma=bundle.manifest.max_gamma,
        ),
        config=ServerConfig(
            max_running=num_rows,
            max_queued=num_queued,
            max_queued_tokens=num_queued * num_tokens,
            queue_timeout_s=math.inf,
        ),
        decoder=TokenizersCodec(bundle.read(TOKENIZER_FILE)),
    )


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
