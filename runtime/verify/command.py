"""Proof on a user's own bundle that speculation leaves the target's distribution alone.

* Drawing: the sampler draws from rows of the target's real logits, against the numpy oracle's probabilities.
* Rounds: the draft model's real rows propose, the sampler judges, and the round's first token must have the target's
  distribution.
* Runs: over a few tokens every draft and every outcome can be enumerated. The oracle's distribution of whole rounds
  must be the target's, token by token and as a block, and the sampler's runs must follow it.
* Sequences: rounds over a few tokens, with penalties, that the oracle completes, against the target's sequences. Drafts
  are chains and trees, sampled and point masses, and the target's own, whose rounds all have a bonus token.
* Blocks: every token of such rounds, over the pair's own vocabulary.
* Pair: first tokens of whole completions, with speculation of every kind against without. Those of mode ``seed_stable``
  are equal.

Each sampled check is a chi-square test at level false_alarm / number of checks, so that a correct bundle fails with at
most about that probability in all. A token of probability zero fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.params import Prompt
from outrider.runtime.oracle.block import emitted_probs_block
from outrider.runtime.oracle.verification import emitted_probs
from outrider.runtime.verify.pair import NUM_TOKENS, pair_steps
from outrider.runtime.verify.report import Check, VerifyReport
from outrider.runtime.verify.rounds import NUM_SEQUENCE, RUN_GAMMA, Bench

Prompts = Sequence[Prompt]
Report = Callable[[str, int, int], None]
Step = Callable[[], list[Check]]

NUM_PROMPTS = 2
NUM_PROMPT_TOKENS = 8
# Rows judged in one call, and slots of the pair, where the bundle allows as many.
NUM_ROWS = 32

PENALISED = "min-p 0.05, penalties"
SETTINGS: Mapping[str, SamplingParams] = {
    "plain": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-k 8, top-p 0.9": SamplingParams(top_k=8, top_p=0.9),
    PENALISED: SamplingParams(
        min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
}
# Of sequences over a few tokens, which repeat: a row that misses one token of its history is far from the target's.
SEVERE = SamplingParams(repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.6)
MAX_TOKENS = NUM_TOKENS
"""Tokens behind a prompt that there must be room for."""


def verify(
    bundle_root: Path,
    *,
    num_samples: int,
    false_alarm: float,
    seed: int,
    device: str = "cpu",
    place: str = "auto",
    prompts_of: Callable[[Bundle], Prompts] | None = None,
    num_prompts: int = NUM_PROMPTS,
    report: Report = lambda phase, step, num_steps: None,
) -> VerifyReport:
    """Run all checks on a bundle.

    Args:
        bundle_root: folder of the bundle.
        num_samples: draws per check.
        false_alarm: wanted false-alarm rate of the whole, in (0, 1).
        seed: first of the request seeds.
        device: as in ``open_pair``.
        place: of the sampler: "host", "device" or "auto".
        prompts_of: prompts for a bundle; None for random tokens.
        num_prompts: of random tokens.
        report: called with the prompt, the checks done on it and their number.

    Raises:
        BundleError: the bundle does not fit its manifest.
        EngineError: the device cannot serve it.
    """
    bundle = load_bundle(bundle_root)
    manifest = bundle.manifest
    num_rows = min(NUM_ROWS, manifest.max_batch)
    pair = open_pair(bundle, device=device, sampler=place, max_batch=num_rows, with_trees=True)
    draft = pair.draft if manifest.max_gamma > 0 else None
    prompts = (prompts_of or partial(_random_prompts, seed, num_prompts))(bundle)
    checks: list[Check] = []
    for number, prompt in enumerate(prompts):
        name = f"prompt {number}"
        bench = Bench(
            target=pair.target,
            draft=draft,
            sampler=pair.sampler,
            num_rows=num_rows,
            prompt=prompt,
            num_samples=num_samples,
            seed=seed,
        )
        steps = list(_steps(bench, name, manifest.max_gamma, has_draft=draft is not None))
        # Whole completions take most of the time: of random prompts the first is enough.
        if number == 0 or prompts_of is not None:
            real = replace(pair, draft=draft)
            steps += pair_steps(bundle, real, name, prompt, num_samples, seed)
        for done, step in enumerate(steps):
            report(name, done, len(steps))
            checks += step()
    pair.close()
    return VerifyReport(
        checks=tuple(checks), false_alarm=false_alarm, accepted=manifest.accepted_words()
    )


def _steps(bench: Bench, name: str, max_gamma: int, *, has_draft: bool) -> Iterator[Step]:
    """Yield the checks of one prompt's rows, to be called."""
    mode = ExactnessMode.MAX_ACCEPT
    for title, params in SETTINGS.items():
        yield partial(bench.check_first, f"{name}: draw, {title}", params, mode, 0)
    if has_draft:
        yield from _round_steps(bench, name, min(RUN_GAMMA, max_gamma))
    for way, drafter in bench.drafts() if max_gamma >= NUM_SEQUENCE - 1 else ():
        title = f"{name}: sequences, {way}, penalties"
        yield partial(bench.check_sequences, title, SEVERE, drafter)


def _round_steps(bench: Bench, name: str, gamma: int) -> Iterator[Step]:
    """Yield a check of every rule that judges sampled drafts, to be called."""
    for title, params in SETTINGS.items():
        for mode in (ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE):
            yield partial(
                bench.check_first, f"{name}: round, {mode.value}, {title}", params, mode, 1
            )
    rules = {"token by token": (emitted_probs, False), "as a block": (emitted_probs_block, True)}
    for rule, (emitted, is_block) in rules.items():
        title = f"{name}: runs, {rule}"
        yield partial(bench.check_runs, title, emitted, gamma, verifies_block=is_block)
    if gamma >= NUM_SEQUENCE - 1:
        title = f"{name}: block, whole vocabulary"
        yield partial(bench.check_shares, title, SETTINGS[PENALISED], verifies_block=True)


def _random_prompts(seed: int, num_prompts: int, bundle: Bundle) -> Prompts:
    """Return prompts of random tokens; for models with an encoder random sources, in any language."""
    generator = np.random.default_rng(seed)
    manifest = bundle.manifest
    text2text, source = manifest.text2text, manifest.target.source
    vocab_size, length = manifest.target.vocab_size, NUM_PROMPT_TOKENS
    if source is not None:
        vocab_size, length = source.vocab_size, min(length, source.max_source)
    ids = generator.integers(0, vocab_size, size=(num_prompts, length))
    rows = [tuple(int(token) for token in row) for row in ids]
    if text2text is None:
        return [Prompt(row) for row in rows]
    any_language = next(iter(text2text.languages.values()), 0)
    prefix = tuple(
        one if isinstance(one, int) else any_language for one in text2text.decoder_prefix
    )
    return [Prompt(prefix, row, text2text.shares_vocabulary) for row in rows]
