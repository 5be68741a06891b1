"""The heuristic search of Ouroboros for the fastest parameters, for any drafter.

Coordinate descent on measured speed, one drafter after another: first gamma; then the lookahead window, for drafters
that have one; then the length of phrases. The number of phrases is fixed.

Source: Zhao et al. 2024 (arXiv:2402.13720), appendix; their beta is our phrase_length + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.core.drafting import check_drafter_params
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.speed import Measured

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
    is_kept: bool = False


def search_drafter(
    name: str,
    gammas: Sequence[int | None],
    windows: Sequence[int],
    phrase_lengths: Sequence[int],
    measure: Measure,
) -> list[Trial]:
    """Return every setting tried on one drafter; one of each stage is marked as kept.

    Args:
        name: of the drafter.
        gammas: candidates; None is adaptive.
        windows: candidates, for drafters that have a window; 0 is none.
        phrase_lengths: candidates, for drafters that have phrases.
        measure: given a stage's name and settings, measures plain decoding and the settings in the same rounds.
    """
    start = SpeculationParams(drafter=name)
    if is_used(with_phrases := replace(start, num_phrases=NUM_PHRASES)):
        start = with_phrases
    trials = _stage(GAMMA, [replace(start, gamma=gamma) for gamma in gammas], measure)
    best = replace(start, gamma=next(trial.gamma for trial in trials if trial.is_kept))
    if windows and is_used(replace(best, window=1)):
        found = _stage(WINDOW, [replace(best, window=width) for width in windows], measure)
        best = replace(best, window=next(trial.window for trial in found if trial.is_kept))
        trials += found
    settings = [replace(best, phrase_length=length) for length in phrase_lengths]
    if all(is_used(one) for one in settings):
        trials += _stage(PHRASES, settings, measure)
    return trials


def is_used(params: SpeculationParams) -> bool:
    """Return whether a drafter uses all of its parameters, by the rule for requests."""
    try:
        check_drafter_params(params, max_reference_bytes=0)
    except RequestError:
        return False
    return True


def choose(trials: Sequence[Trial], source: str) -> ServingDefaults:
    """Return the fastest setting that the drafters' last stages kept; no drafts where none was faster."""
    last = {trial.drafter: trial for trial in trials if trial.is_kept}
    best = max(last.values(), key=lambda trial: trial.speedup, default=None)
    if best is None or best.speedup <= 1.0:
        return ServingDefaults(drafter="none", gamma=None, source=source)
    return ServingDefaults(
        drafter=best.drafter,
        gamma=best.gamma,
        phrase_length=best.phrase_length,
        num_phrases=best.num_phrases,
        window=best.window,
        source=source,
    )


def keep_best(trials: Sequence[Trial]) -> list[Trial]:
    """Return one stage's trials with the fastest marked as kept; the adaptive gamma unless clearly beaten."""

    def worth(trial: Trial) -> float:
        is_preferred = trial.stage == GAMMA and trial.gamma is None
        return trial.speedup * (FIXED_MARGIN if is_preferred else 1.0)

    best = max(range(len(trials)), key=lambda index: worth(trials[index]))
    return [replace(trial, is_kept=index == best) for index, trial in enumerate(trials)]


def _stage(stage: str, settings: Sequence[SpeculationParams], measure: Measure) -> list[Trial]:
    plain, measured = measure(stage, settings)
    return keep_best(
        [
            Trial(
                drafter=one.drafter or "",
                stage=stage,
                gamma=one.gamma,
                phrase_length=one.phrase_length,
                num_phrases=one.num_phrases,
                window=one.window,
                tokens_per_s=found.tokens_per_s,
                speedup=found.over(plain),
                alpha_hat=found.alpha_hat,
                tokens_per_step=found.tokens_per_step,
            )
            for one, found in zip(settings, measured, strict=True)
        ]
    )
