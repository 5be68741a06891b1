"""Tables and figures of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), on one's own pair of models.

The unigram and bigram models count a corpus: the one that is given, or the target's own answers to prompts of the file
that are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from outrider.engines.base import Engine
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import Prompt, SpeculationParams
from outrider.runtime.drafters.text.ngrams import NgramEngine
from outrider.runtime.drafters.text.suffix_array import Datastore, write_datastore
from outrider.runtime.gamma.costs import RowKind
from outrider.runtime.offline.alpha import Text, measure_alphas, text_of
from outrider.runtime.offline.results import AlphaRow
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.step_costs import StepCosts
from outrider.runtime.oracle.analysis import operations_factor, walltime_factor

from scripts.lab.bench.papers.common import PLAIN, Cell, Context, Table
from scripts.tools.results import Scalar

GAMMAS = (1, 2, 3, 5, 7)
TEMPERATURES = (0.0, 1.0)
LENIENCES = (1.0, 0.5, 0.3, 0.1)
NGRAMS = {"unigram": 1, "bigram": 2}
MODEL = "model"
CORPUS_BATCH = 8

Figures = dict[str, Scalar]


def alphas(context: Context) -> Iterator[Cell]:
    """Table 3, with appendix A.2, the bound of section 3.5, and appendix A.5: the target's own text, every position."""
    measured = cache(partial(_alphas, context))
    for temperature in TEMPERATURES:
        for name in (*NGRAMS, MODEL):
            yield Cell(
                case=_alpha_case(context, temperature, name), measure=partial(_alpha, measured, temperature, name)
            )  # fmt: skip


def speeds(context: Context) -> Iterator[Cell]:
    """Table 4 and Theorems 3.8 and 3.11: predicted by alpha and costs, and measured, in processor seconds."""
    for temperature in TEMPERATURES:
        for gamma in (0, *GAMMAS):
            yield Cell(
                case={"temperature": temperature, "gamma": gamma},
                measure=partial(_speed, context, temperature, gamma),
            )


TABLES: dict[str, Table] = {"leviathan-3": alphas, "leviathan-4": speeds}


def _alpha_case(context: Context, temperature: float, name: str) -> Figures:
    given = "answers" if context.datastore is None else context.datastore.name
    corpus = given if name in NGRAMS else None
    return {"temperature": temperature, "drafter": name, "corpus": corpus}


def _alpha(
    measured: Callable[[float], Mapping[str, AlphaRow]], temperature: float, name: str
) -> Figures:
    row = measured(temperature)[name]
    return {
        "alpha": row.alpha,
        "rejection": row.rejection,
        "most_tokens": row.most_tokens,
        **{f"alpha_l{one:g}": row.lenient[one] for one in LENIENCES if one < 1.0},
        "num_positions": row.num_positions,
    }


def _alphas(context: Context, temperature: float) -> dict[str, AlphaRow]:
    """Return what all drafters keep of one text, which the target wrote."""
    rig = context.open(max_batch=CORPUS_BATCH)
    assert rig.draft is not None, "a table of pairs"
    texts = [
        Text(tokens, len(prompt.tokens), prompt.source, prompt.is_quotable)
        for prompt, tokens in _written(context, rig, context.prompts(rig), temperature, 1)
    ]
    store = Datastore.open(_corpus(context, rig), vocab_size=rig.target.limits.vocab_size)
    engines: dict[str, Engine] = {name: NgramEngine(store, order) for name, order in NGRAMS.items()}
    engines[MODEL] = rig.draft
    rows = measure_alphas(rig.target, engines, {}, texts, temperature, LENIENCES, lambda *_: None)
    return {row.drafter: row for row in rows}


def _written(
    context: Context, rig: Rig, prompts: Sequence[Prompt], temperature: float, batch: int
) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
    """Yield prompts with the target's own text, prompt included, up to its first end token."""
    params, ends = SamplingParams(temperature=temperature), rig.bundle.manifest.eos_token_ids
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        answers, _ = rig.answer(group, params, PLAIN, context.max_tokens, first_seed=first)
        for prompt, answer in zip(group, answers, strict=True):
            yield prompt, text_of(prompt, answer.tokens, ends).tokens


def _corpus(context: Context, rig: Rig) -> Path:
    """Return the datastore that was given, or one of answers to other prompts, greedy ones and sampled ones."""
    if context.datastore is not None:
        return context.datastore
    path = context.out / f"corpus-{context.bundle.name}-{context.settings()['prompts']}"
    if not path.exists():
        others = context.prompts(rig, are_others=True)
        answers = [
            text[len(prompt.tokens) :]
            for temperature in TEMPERATURES
            for prompt, text in _written(context, rig, others, temperature, CORPUS_BATCH)
        ]
        write_datastore(answers, path, vocab_size=rig.target.limits.vocab_size)
    return path


def _speed(context: Context, temperature: float, gamma: int) -> Figures:
    rig = context.open(knows_costs=True, counts_processor=True)
    wanted = SpeculationParams(drafter=MODEL, gamma=gamma) if gamma else PLAIN
    run = context.run(rig, wanted, temperature=temperature)
    figures = run.figures()
    if not gamma:
        return figures
    alpha = context.recorded("leviathan-3", _alpha_case(context, temperature, MODEL))["alpha"]
    plain = context.recorded("leviathan-4", {"temperature": temperature, "gamma": 0})
    costs = _costs(context, rig, temperature)
    c, v = costs.c(uses_model=True), costs.v(gamma + 1)
    assert isinstance(alpha, float)
    return {
        "alpha": alpha,
        "c": c,
        "v": v,
        "paper": walltime_factor(alpha, gamma, c),
        "predicted": walltime_factor(alpha, gamma, c, verify_cost=v),
        **{
            f"{kind}_speedup": _ratio(plain, figures, f"{kind}_ms_per_token")
            for kind in ("processor", "wall")
        },
        "operations_paper": operations_factor(alpha, gamma, 0.0),
        "operations": (run.num_drafted + run.num_steps) / run.num_emitted,
        **figures,
    }


def _ratio(one: Mapping[str, Scalar], other: Mapping[str, Scalar], name: str) -> float:
    above, below = one[name], other[name]
    assert isinstance(above, float) and isinstance(below, float)
    return above / below


def _costs(context: Context, rig: Rig, temperature: float) -> StepCosts:
    assert rig.costs is not None, "opened to know them"
    longest = max(len(prompt.tokens) for prompt in context.prompts(rig)) + context.max_tokens
    kind = RowKind.GREEDY if temperature == 0.0 else RowKind.SAMPLED
    return StepCosts(table=rig.costs, kind=kind, num_cached=longest)
