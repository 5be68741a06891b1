"""Tables and figures of Zhao et al. 2024, "Ouroboros" (arXiv 2402.13720), on one's own pair of models, greedy.

Phrases are verified as trees (``trees_may_round_differently``), as the paper has them; one row of Table 4 keeps the
bits of plain decoding instead. The paper's beta is a phrase of beta - 2 tokens behind its key.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from outrider.runtime.core.drafting import PRESETS, DraftingConfig, HistoryScope
from outrider.runtime.core.params import Prompt, SpeculationParams
from outrider.runtime.offline.prompts import encode_prompts
from outrider.runtime.offline.rig import Rig

from scripts.lab.bench.papers.common import PLAIN, Cell, Context, Table
from scripts.tools.common import code_prompts
from scripts.tools.results import Scalar

OUROBOROS, MODEL = "ouroboros", "model"
BETA_LESS_PHRASE = 2
FEW_RUNS = (1, 4, 10, 20)

Figures = dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a pair is measured with; the paper's for HumanEval (Tables 11 and 12), where the bundle has room for them.

    Attributes:
        model_gammas: of plain speculative decoding, beside ``gamma``.
        lookahead: gamma, window and phrase length of lookahead decoding.
        grid: gammas, windows and betas of Table 10.
        locality: gamma, window and phrase length of Table 17.
    """

    gamma: int = 12
    window: int = 20
    phrase_length: int = 6
    model_gammas: tuple[int, ...] = (4, 8, 18)
    most_phrases: int = 9
    lookahead: tuple[int, int, int] = (19, 16, 5)
    grid: tuple[tuple[int, ...], ...] = ((3, 4, 5), (14, 15, 16), (5, 6, 7))
    locality: tuple[int, int, int] = (6, 18, 4)

    def of(self, context: Context) -> Sizes:
        """Return these sizes, with the draft's window of ``context`` in place of theirs where it has one."""
        if (window := context.window) is None:
            return self
        (gammas, _, betas), (gamma, _, length) = self.grid, self.locality
        return replace(
            self, window=window, grid=(gammas, (window,), betas), locality=(gamma, window, length)
        )


PAPER = Sizes()


def mechanisms(context: Context, sizes: Sizes = PAPER) -> Iterator[Cell]:
    """Table 4: the mechanisms added in turn, the window on the draft model from the second line on."""
    sizes = sizes.of(context)
    no_reuse = {"history_scope": HistoryScope.REQUEST}
    no_harvest = {**no_reuse, "harvests_rejected": False}
    bits_kept = {"trees_may_round_differently": False}
    yield _cell(context, "speculative decoding", _of_model(sizes.gamma), {})
    for name, num_phrases, settings in (
        ("+ phrases accelerate the draft", 0, no_harvest),
        ("+ lengthening", 3, no_harvest),
        ("+ phrases from verification", 3, no_reuse),
        ("+ reuse", 3, {}),
        ("reuse, K = 1, bits kept", 1, bits_kept),
    ):
        yield _cell(context, name, _of_phrases(sizes, num_phrases=num_phrases), settings)
    own = SpeculationParams(drafter=OUROBOROS, gamma=sizes.gamma)
    yield _cell(context, "preset=outrider", own, None)


def num_phrases(context: Context, sizes: Sizes = PAPER) -> Iterator[Cell]:
    """Figure 6: K phrases behind the draft."""
    sizes = sizes.of(context)
    for count in range(sizes.most_phrases + 1):
        yield _cell(context, count, _of_phrases(sizes, num_phrases=count), {}, by="K")


def grid(context: Context, sizes: Sizes = PAPER) -> Iterator[Cell]:
    """Table 10: gamma, W and beta."""
    for gamma, window, beta in product(*sizes.of(context).grid):
        here = replace(sizes, gamma=gamma, window=window, phrase_length=beta - BETA_LESS_PHRASE)
        name = f"{gamma}, {window}, {beta}"
        yield _cell(context, name, _of_phrases(here), {}, by="gamma, W, beta")


def tokens_per_pass(context: Context, sizes: Sizes = PAPER) -> Iterator[Cell]:
    """Table 13: tokens per pass of the target, beside plain decoding and drafters that the paper does not have."""
    sizes = sizes.of(context)
    gamma, window, length = sizes.lookahead
    lookahead = SpeculationParams(
        drafter="lookahead", gamma=gamma, window=window, phrase_length=length, num_phrases=3
    )
    yield _cell(context, "none", PLAIN, None)
    for one in (sizes.gamma, *sizes.model_gammas):
        yield _cell(context, f"{MODEL}, gamma {one}", _of_model(one), None)
    yield _cell(context, OUROBOROS, _of_phrases(sizes), {})
    yield _cell(context, "lookahead", lookahead, {})
    for name in ("lookup", "suffix"):
        params = SpeculationParams(drafter=name, gamma=sizes.gamma)
        yield _cell(context, f"{name}, gamma {sizes.gamma}", params, None)


def locality(context: Context, sizes: Sizes = PAPER) -> Iterator[Cell]:
    """Table 17: the file's prompts and as many heads of the standard library's functions, in runs of one kind."""
    gamma, window, length = sizes.of(context).locality
    here = replace(sizes, gamma=gamma, window=window, phrase_length=length)
    no_reuse = {"history_scope": HistoryScope.REQUEST}
    for settings, word in ((no_reuse, "off"), ({}, "on")):
        for run in (None, *FEW_RUNS):
            if run is None or (word == "on" and run <= len(context.texts)):
                name = f"{word}, {'shuffled' if run is None else f'runs of {run}'}"
                yield _cell(context, name, _of_phrases(here), settings, by="reuse", run=run)


TABLES: dict[str, Table] = {
    "ouroboros-4": mechanisms,
    "ouroboros-13": tokens_per_pass,
    "ouroboros-figure-6": num_phrases,
    "ouroboros-10": grid,
    "ouroboros-17": locality,
}


def _of_model(gamma: int) -> SpeculationParams:
    return SpeculationParams(drafter=MODEL, gamma=gamma)


def _of_phrases(sizes: Sizes, num_phrases: int = 3) -> SpeculationParams:
    return SpeculationParams(
        drafter=OUROBOROS,
        gamma=sizes.gamma,
        phrase_length=sizes.phrase_length,
        num_phrases=num_phrases,
        window=sizes.window,
    )


def _cell(
    context: Context, name: Scalar, params: SpeculationParams,
    settings: Mapping[str, object] | None, by: str = "drafting", **mixed: int | None,
) -> Cell:  # fmt: skip
    """Return a cell under the paper's settings with changes; None for this project's own."""
    config = DraftingConfig()
    if settings is not None:
        paper: dict[str, object] = {
            **PRESETS["paper"].settings, "draft_window": 0, "trees_may_round_differently": True, **settings,
        }  # fmt: skip
        config = DraftingConfig(**paper)  # type: ignore[arg-type]
    return Cell(case={by: name}, measure=partial(_measure, context, config, params, **mixed))


def _measure(
    context: Context, config: DraftingConfig, params: SpeculationParams, **mixed: int | None
) -> Figures:
    rig = context.open(drafting=config)
    most = rig.bundle.manifest.max_gamma
    if (params.gamma or 0) > most:
        raise ValueError(f"gamma {params.gamma}: the bundle has {most}; export with --max-gamma")
    prompts = _mixed(context, rig, mixed["run"]) if mixed else None
    return dict(context.run(rig, params, prompts=prompts).figures())


def _mixed(context: Context, rig: Rig, run: int | None) -> Sequence[Prompt]:
    """Return prompts of two kinds in runs of one kind; None for an order by chance."""
    # No longer than the file's, so that they fit too.
    longest = max(map(len, context.texts))
    heads = encode_prompts(
        tuple(text[-longest:] for text in code_prompts(len(context.texts))), rig.tokenizer,
        max_tokens=context.max_tokens, manifest=rig.bundle.manifest,
    )  # fmt: skip
    kinds = (context.prompts(rig), heads)
    if run is None:
        order = [prompt for kind in kinds for prompt in kind]
        random.Random(0).shuffle(order)
        return order
    starts = range(0, max(map(len, kinds)), run)
    return [prompt for start in starts for kind in kinds for prompt in kind[start : start + run]]
