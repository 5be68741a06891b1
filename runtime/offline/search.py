"""The heuristic search of Ouroboros for the fastest parameters, for any drafter.

Coordinate descent on measured speed, one drafter after another: first gamma; then the lookahead window, for drafters
that have one; then the length of phrases. The number of phrases is fixed. What comes of it is a choice only where its
interval is apart from the next drafter's and from plain decoding.

Source: Zhao et al. 2024 (arXiv:2402.13720), appendix; their beta is our phrase_length + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.core.drafting import DraftingConfig, check_drafter_params
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.speed import Interval, Measured

GAMMA, WINDOW, PHRASES = "gamma", "window", "phrase_length"
NUM_PHRASES = 3
"""K of the source, which keeps it fixed."""
FIXED_MARGIN = 1.02
"""A fixed gamma must be faster by this factor: the adaptive one also follows load and text."""

Measure = Callable[[str, Sequence[SpeculationParams]], tuple[Measured, list[Measured]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting that was measured.

    Attributes:
        stage: name of the parameter being chosen.
        gamma: None is adaptive.
        speedup: over plain decoding in the same rounds.
        interval: of the speed-up; None for too few rounds.
        is_kept: whether the stage chose it.
    """

    drafter: str
    stage: str
    gamma: int | None
    phrase_length: int | None
    num_phrases: int | None
    window: int | None
    tokens_per_s: float
    speedup: float
    alpha_hat: float | None
    tokens_per_step: float
    interval: Interval | None = None
    is_kept: bool = False


PLAIN_TRIAL = Trial(
    drafter="none",
    stage="",
    gamma=None,
    phrase_length=None,
    num_phrases=None,
    window=None,
    tokens_per_s=0.0,
    speedup=1.0,
    alpha_hat=None,
    tokens_per_step=1.0,
    interval=(1.0, 1.0),
)
"""Plain decoding, by definition as fast as itself; its tokens per second differ from stage to stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The fastest setting of a search, and the one that comes closest to it.

    Attributes:
        winner: ``PLAIN_TRIAL`` where nothing was faster.
        rival: of another drafter, or plain decoding; None where there is neither.
        is_decided: whether their intervals are apart.
    """

    winner: Trial
    rival: Trial | None
    is_decided: bool


def search_drafter(
    name: str,
    gammas: Sequence[int | None],
    windows: Sequence[int],
    phrase_lengths: Sequence[int],
    measure: Measure,
    takes: Callable[[SpeculationParams], bool] = lambda _: True,
) -> list[Trial]:
    """Return every setting tried on one drafter; one of each stage is marked as kept.

    Args:
        name: of the drafter.
        gammas: candidates; None is adaptive.
        windows: candidates, for drafters that have a window; 0 is none.
        phrase_lengths: candidates, for drafters that have phrases.
        measure: given a stage's name and settings, measures plain decoding and the settings in the same rounds.
        takes: whether the bundle has room for settings; others are not tried.
    """
    start = SpeculationParams(drafter=name)
    with_phrases = replace(start, num_phrases=NUM_PHRASES)
    if is_used(with_phrases) and takes(with_phrases):
        start = with_phrases
    trials = _stage(GAMMA, [replace(start, gamma=gamma) for gamma in gammas], measure)
    best = replace(start, gamma=next(trial.gamma for trial in trials if trial.is_kept))
    if windows and is_used(replace(best, window=1)):
        tried = [replace(best, window=width) for width in windows]
        found = _stage(WINDOW, [one for one in tried if takes(one)] or [best], measure)
        best = replace(best, window=next(trial.window for trial in found if trial.is_kept))
        trials += found
    settings = [replace(best, phrase_length=length) for length in phrase_lengths]
    settings = [one for one in settings if takes(one)]
    if settings and all(is_used(one) for one in settings):
        trials += _stage(PHRASES, settings, measure)
    return trials


def num_cells(
    name: str,
    gammas: Sequence[int | None],
    windows: Sequence[int],
    phrase_lengths: Sequence[int],
) -> int:
    """Return how many settings ``search_drafter`` measures in a round, plain decoding of each stage included."""
    start = SpeculationParams(drafter=name)
    stages = [len(gammas)]
    if windows and is_used(replace(start, window=1)):
        stages.append(len(windows))
    if all(is_used(replace(start, phrase_length=length)) for length in phrase_lengths):
        stages.append(len(phrase_lengths))
    return sum(1 + one for one in stages)


def is_used(params: SpeculationParams) -> bool:
    """Return whether a drafter uses all of its parameters, by the rule for requests."""
    try:
        check_drafter_params(params, max_reference_bytes=0)
    except RequestError:
        return False
    return True


def contest(trials: Sequence[Trial]) -> Contest:
    """Compare the settings that the drafters' last stages kept, and plain decoding."""
    last = {trial.drafter: trial for trial in trials if trial.is_kept}
    everyone = [PLAIN_TRIAL, *last.values()]
    winner = max(everyone, key=lambda trial: trial.speedup)
    others = [one for one in everyone if one is not winner]
    rival = max(others, key=_most, default=None)
    is_apart = winner.interval is not None and all(
        one.interval is not None and winner.interval[0] > one.interval[1] for one in others
    )
    return Contest(winner=winner, rival=rival, is_decided=is_apart)


def serving_defaults(trial: Trial, source: str) -> ServingDefaults:
    """Return a setting as a bundle keeps it."""
    return ServingDefaults(
        drafter=trial.drafter,
        gamma=trial.gamma,
        phrase_length=trial.phrase_length,
        num_phrases=trial.num_phrases,
        window=trial.window,
        source=source,
    )


def keep_best(trials: Sequence[Trial], measured: Sequence[Measured]) -> list[Trial]:
    """Return one stage's trials with the fastest marked as kept; the default unless clearly beaten.

    Defaults are the adaptive gamma, and the window and the length of phrases that servers take.

    Args:
        trials: of the stage.
        measured: of each of them, in the same rounds.
    """
    default = next((i for i, one in enumerate(trials) if _is_default(one)), None)
    is_gamma = trials[0].stage == GAMMA

    def worth(index: int) -> float:
        return trials[index].speedup * (FIXED_MARGIN if is_gamma and index == default else 1.0)

    best = max(range(len(trials)), key=worth)
    if default is not None:
        lead = measured[best].interval_over(measured[default])
        if not is_gamma if lead is None else lead[0] <= 1.0:
            best = default
    return [replace(trial, is_kept=index == best) for index, trial in enumerate(trials)]


def _is_default(trial: Trial) -> bool:
    """Return whether servers take what a stage tries where nobody says."""
    if trial.stage == GAMMA:
        return trial.gamma is None
    usual = DraftingConfig()
    if trial.stage == PHRASES:
        return trial.phrase_length == usual.phrase_length
    return trial.window == (usual.window if "lookahead" in trial.drafter else usual.draft_window)


def _most(trial: Trial) -> float:
    """Return the speed-up that a setting may have."""
    return trial.speedup if trial.interval is None else trial.interval[1]


def _stage(stage: str, settings: Sequence[SpeculationParams], measure: Measure) -> list[Trial]:
    plain, measured = measure(stage, settings)
    trials = [
        Trial(
            drafter=one.drafter or "",
            stage=stage,
            gamma=one.gamma,
            phrase_length=one.phrase_length,
            num_phrases=one.num_phrases,
            window=one.window,
            tokens_per_s=found.tokens_per_s,
            speedup=found.over(plain),
            interval=found.interval_over(plain),
            alpha_hat=found.alpha_hat,
            tokens_per_step=found.tokens_per_step,
        )
        for one, found in zip(settings, measured, strict=True)
    ]
    return keep_best(trials, measured)
