"""Writes the page of an analysis: tables, figures and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from outrider.runtime.offline.advice import recommendation
from outrider.runtime.offline.figures import best_rows, draw_figures
from outrider.runtime.offline.pages.page import PAGE, Section, filled, number, table, write_page
from outrider.runtime.offline.results import AlphaRow, Analysis, SpeedRow

ALPHA_TEXT = (
    "Mean probability that the target keeps the first draft token, over every position of text that "
    "the target wrote (Leviathan et al. 2023, section 4.1). Coverage: share of positions at which "
    "the drafter proposes at all; elsewhere alpha counts 0. Texts end with their end "
    "token. Thresholds below which counts do not draft are off here. Rejection: the same of plain rejection sampling "
    "(appendix A.2), the mean of min q / p. Tokens/pass at most: 1 / (1 - alpha), which no choice of gamma exceeds "
    "(section 3.5)."
)
COST_TEXT = (
    "In units of the runtime's plain step, sampling and host work included: c is one draft token, "
    "v(k) a step whose target pass verifies k tokens per row. The paper takes v as 1."
)
SPEED_TEXT = (
    "Paper: Theorem 3.8 as printed, N(alpha, gamma) / (gamma c + 1). Predicted: with the measured v, "
    "N(alpha, gamma) / (gamma c + v(gamma + 1)); alpha as "
    "above, or alpha_hat of the run for drafters without a distribution of one token. It takes every round "
    "to draft gamma tokens and their fates as independent, so a drafter that rarely proposes, or whose "
    "successes come in runs, is not bound by it. Measured: tokens per second over plain decoding of "
    "the same round, median of the rounds; answers run on past end tokens, so that every setting does "
    "the same work. Best gamma: by the formula. By place: alpha_hat of the first draft tokens, the second "
    "ones, and so on. *: fastest as measured."
)
LENIENT_TEXT = "Alpha where a token is kept at up to p / l (appendix A.5); not exact below l = 1."
FIGURE_TEXT = (
    "Curves: the paper's formulas. Points: this run, black greedy, white sampled; the number "
    "beside a point is its gamma."
)
TRACE_TEXT = "The paper's Figure 5 as a recording: the first request of this run, greedily."


def write_analysis(analysis: Analysis, folder: Path) -> Path:
    """Write ``analysis.json``, the PNGs and ``index.html``, and return the path of the page."""
    text = json.dumps(asdict(analysis), indent=2, allow_nan=False) + "\n"
    with filled(folder) as unfinished:
        (unfinished / "analysis.json").write_text(text, encoding="utf-8")
        figures = draw_figures(analysis, unfinished)
        write_page(
            unfinished / PAGE,
            title=f"Analysis of {analysis.bundle}",
            summary=(
                f"{analysis.num_prompts} prompts, {analysis.max_tokens} tokens each, batch "
                f"{analysis.batch}, rounds of every setting: {analysis.rounds}, {analysis.weights} weights, on "
                f"{analysis.device}; seconds are those of the {analysis.seconds}."
            ),
            sections=[
                Section(title="Recommendation", text=recommendation(analysis)),
                *table_sections(analysis),
                *_picture_sections(figures),
            ],
        )
    return folder / PAGE


def table_sections(analysis: Analysis) -> list[Section]:
    """Return the tables: alpha, costs, speed-up, lenience."""
    return [
        _alpha_section(analysis),
        _cost_section(analysis),
        speed_section(analysis.speeds, best_rows(analysis)),
        _lenience_section(analysis),
    ]


def speed_section(rows: Sequence[SpeedRow], best: Sequence[SpeedRow]) -> Section:
    """Return table 4, with the fastest gamma of each drafter marked."""
    columns: dict[str, Callable[[SpeedRow], object]] = {
        "drafter": lambda row: row.drafter,
        "T": lambda row: f"{row.temperature:g}",
        "gamma": lambda row: f"{row.gamma}{' *' if row in best else ''}",
        "alpha": lambda row: number(row.alpha),
        "c": lambda row: f"{row.draft_cost:.3f}",
        "v": lambda row: f"{row.verify_cost:.2f}",
        "paper": lambda row: number(row.paper),
        "predicted": lambda row: number(row.predicted),
        "measured": lambda row: f"{row.speedup:.2f}",
        "best gamma": lambda row: "-" if row.best_gamma is None else row.best_gamma,
        "alpha_hat": lambda row: number(row.alpha_hat),
        "by place": lambda row: " ".join(f"{one:.2f}" for one in row.alpha_by_place) or "-",
        "tokens/pass": lambda row: f"{row.tokens_per_step:.2f}",
        "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    }
    return table("Predicted and measured speed-up (Table 4)", SPEED_TEXT, rows, columns)


def _alpha_section(analysis: Analysis) -> Section:
    columns: dict[str, Callable[[AlphaRow], object]] = {
        "drafter": lambda row: row.drafter,
        "T": lambda row: f"{row.temperature:g}",
        "alpha": lambda row: f"{row.alpha:.3f}",
        "coverage": lambda row: f"{row.coverage:.2f}",
        "positions": lambda row: row.num_positions,
        "rejection": lambda row: f"{row.rejection:.3f}",
        "tokens/pass at most": lambda row: number(row.most_tokens),
    }
    return table("Alpha by drafter and temperature (Table 3)", ALPHA_TEXT, analysis.alphas, columns)


def _cost_section(analysis: Analysis) -> Section:
    drafters, tokens = list(analysis.costs[0].draft_cost), sorted(analysis.costs[0].verify_cost)
    return Section(
        title="Measured costs: c and v(k)",
        text=COST_TEXT,
        heads=("T", "plain step, ms", *(f"c {n}" for n in drafters), *(f"v({k})" for k in tokens)),
        rows=tuple(
            (
                f"{row.temperature:g}",
                f"{row.plain_ms:.2f}",
                *(f"{row.draft_cost[name]:.3f}" for name in drafters),
                *(f"{row.verify_cost[k]:.2f}" for k in tokens),
            )
            for row in analysis.costs
        ),
    )


def _lenience_section(analysis: Analysis) -> Section:
    wanted = list(analysis.alphas[0].lenient) if analysis.alphas else []
    return Section(
        title="Alpha and lenience (Table 5)",
        text=LENIENT_TEXT,
        heads=("drafter", "T", *(f"l = {one:g}" for one in wanted)),
        rows=tuple(
            (row.drafter, f"{row.temperature:g}", *(f"{row.lenient[one]:.3f}" for one in wanted))
            for row in analysis.alphas
        ),
    )


def _picture_sections(figures: dict[str, Path]) -> list[Section]:
    trace = figures["figure-5-trace"]
    others = tuple(path for path in figures.values() if path != trace)
    return [
        Section(title="Figures 2 to 4, and costs", text=FIGURE_TEXT, pictures=others),
        Section(title="Figure 5", text=TRACE_TEXT, pictures=(trace,)),
    ]
