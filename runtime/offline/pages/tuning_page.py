"""Writes the page of a search: table, plot and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from outrider.runtime.offline.figures import DPI, WIDE_INCHES, save
from outrider.runtime.offline.pages.page import PAGE, Section, filled, number, table, write_page
from outrider.runtime.offline.search import GAMMA, PHRASES, PLAIN_TRIAL, WINDOW, Trial
from outrider.runtime.offline.tuning import Tuning

AUTO = "auto"
TEXT = (
    "One drafter after another: gamma first, then the lookahead window and the length of phrases, "
    "for drafters that have them; "
    "what a stage kept is marked. Speed-up: over plain decoding of the same round, median of the "
    "rounds, and the interval that holds it with 95 % confidence. The paper's beta is phrase length + 2."
)


def write_tuning(tuning: Tuning, folder: Path) -> Path:
    """Write ``tuning.json``, the PNG and ``index.html``, and return the path of the page."""
    text = json.dumps(asdict(tuning), indent=2, allow_nan=False) + "\n"
    with filled(folder) as unfinished:
        (unfinished / "tuning.json").write_text(text, encoding="utf-8")
        picture = _draw(tuning.trials, unfinished / "tuning-grid.png")
        write_page(
            unfinished / PAGE,
            title=f"Tuning of {tuning.bundle}",
            summary=f"{describe(tuning)}. {tuning.source}, {tuning.rounds} rounds.",
            sections=[trial_section(tuning.trials), Section(title="Grid", pictures=(picture,))],
        )
    return folder / PAGE


def describe(tuning: Tuning) -> str:
    """Return what came of a search, in words."""
    found = tuning.contest
    winner, rival = found.winner, found.rival
    if found.is_decided or rival is None:
        against = "" if rival is None else f"; the next: {_with_speed(rival)}"
        return f"{_with_speed(winner)}{against}"
    if winner.interval is None or rival.interval is None:
        return f"undecided: {tuning.rounds} rounds are too few for intervals"
    return f"undecided: {_with_speed(winner)} is not apart from {_with_speed(rival)}"


def _with_speed(trial: Trial) -> str:
    if trial.drafter == PLAIN_TRIAL.drafter:
        return "plain decoding"
    return f"{_setting(trial)}, {_speed(trial)} times plain decoding"


def _speed(trial: Trial) -> str:
    """Return a speed-up with its interval, where there is one."""
    if trial.interval is None:
        return f"{trial.speedup:.2f}"
    low, high = trial.interval
    return f"{trial.speedup:.2f} ({low:.2f} to {high:.2f})"


def _setting(choice: Trial) -> str:
    """Return a setting in words."""
    words = [f"drafter {choice.drafter}"]
    words.append(f"gamma {_gamma(choice.gamma)}")
    if choice.phrase_length is not None:
        words.append(f"phrase length {choice.phrase_length}")
    if choice.num_phrases is not None:
        words.append(f"{choice.num_phrases} phrases")
    if choice.window is not None:
        words.append(f"window {choice.window}")
    return ", ".join(words)


def trial_section(trials: Sequence[Trial]) -> Section:
    """Return every setting that was tried, as a table."""
    columns: dict[str, Callable[[Trial], object]] = {
        "drafter": lambda trial: trial.drafter,
        "chosen here": lambda trial: trial.stage,
        "gamma": lambda trial: _gamma(trial.gamma),
        "phrase length": lambda trial: _count(trial.phrase_length),
        "phrases": lambda trial: _count(trial.num_phrases),
        "window": lambda trial: _count(trial.window),
        "tokens/s": lambda trial: f"{trial.tokens_per_s:.0f}",
        "speed-up": _speed,
        "alpha_hat": lambda trial: number(trial.alpha_hat),
        "tokens/pass": lambda trial: f"{trial.tokens_per_step:.2f}",
        "kept": lambda trial: "kept" if trial.is_kept else "",
    }
    return table("What was tried", TEXT, trials, columns)


def _draw(trials: Sequence[Trial], path: Path) -> Path:
    """Draw tokens per second over the settings of each stage, with those that earlier stages kept."""
    figure: Any = Figure(figsize=WIDE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(STAGES), sharey=True)
    for place, (stage, label_of) in zip(axes, STAGES.items(), strict=True):
        mine = [trial for trial in trials if trial.stage == stage]
        for name in dict.fromkeys(trial.drafter for trial in mine):
            line = [trial for trial in mine if trial.drafter == name]
            labels = [label_of(trial) for trial in line]
            place.plot(labels, [trial.tokens_per_s for trial in line], marker="o", label=name)
        place.set_xlabel(stage.replace("_", " "))
        place.grid(alpha=0.25)
        if mine:
            place.legend(fontsize=7)
    axes[0].set_ylabel("tokens/s")
    axes[0].set_ylim(bottom=0.0)
    return save(figure, path)


def _gamma(gamma: int | None) -> str:
    return AUTO if gamma is None else str(gamma)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


STAGES: dict[str, Callable[[Trial], str]] = {
    GAMMA: lambda trial: _gamma(trial.gamma),
    WINDOW: lambda trial: _count(trial.window),
    PHRASES: lambda trial: _count(trial.phrase_length),
}
"""Label of a trial on the axis of its stage."""
