"""``outrider tune``: finds the fastest drafter and parameters of a bundle for given prompts on this machine.

The prompts are run many times, so requests share no history: a drafter would learn the answers by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.core.drafting import MAX_WINDOW
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.options import (
    MeasureOptions,
    check_distinct,
    check_option,
    chosen_drafters,
    opened,
    seconds_of,
)
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.search import (
    Contest,
    Trial,
    contest,
    num_cells,
    search_drafter,
    serving_defaults,
)
from outrider.runtime.offline.speed import Expect, Measured, Report, measure_settings, say_expected

DEFAULT_DRAFTERS = ("model", "ouroboros", "lookup", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(MeasureOptions):
    """Options of a search; gammas are tried beside the adaptive choice.

    Attributes:
        windows: columns of a lookahead window; 0 is none.
        phrase_lengths: tokens of a phrase.
        temperature: of all requests; 0 is greedy.
    """

    # Intervals leave out one round on each side: a disturbed one decides nothing.
    rounds: int = 9
    windows: tuple[int, ...] = (0, 4, 8)
    phrase_lengths: tuple[int, ...] = (2, 4, 6)
    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for an option that breaks its rule, as far as no bundle is needed."""
        MeasureOptions.__post_init__(self)
        check_distinct("windows", self.windows)
        is_window = all(0 <= width <= MAX_WINDOW for width in self.windows)
        check_option(is_window, "windows", f"must be in [0, {MAX_WINDOW}]")
        check_distinct("phrase_lengths", self.phrase_lengths)
        check_option(min(self.phrase_lengths) >= 1, "phrase_lengths", "must be at least 1")
        check_option(0.0 <= self.temperature <= 2.0, "temperature", "must be in [0, 2]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Trials of a search, what came of it, and how it was measured.

    Attributes:
        choice: None where the contest is not decided.
        source: who measured, and what, in words.
    """

    bundle: str
    device: str
    num_prompts: int
    max_tokens: int
    batch: int
    rounds: int
    temperature: float
    trials: tuple[Trial, ...]
    contest: Contest
    choice: ServingDefaults | None
    source: str


def tune(
    bundle: Path, prompts: Path, options: TuneOptions, report: Report, expect: Expect
) -> Tuning:
    """Search over drafters and their parameters, and leave the bundle as it is; arguments and errors as ``analyze``."""
    with opened(bundle, prompts, options) as (rig, encoded, fitted):
        return _search(rig, encoded, fitted, report, expect)


def write_serving_defaults(root: Path, defaults: ServingDefaults) -> None:
    """Write serving defaults into a bundle's manifest, atomically.

    Raises:
        BundleError: the bundle does not fit its manifest.
    """
    manifest = load_bundle(root).manifest
    write_manifest(root, replace(manifest, serving=defaults))


def _search(
    rig: Rig, prompts: Prompts, options: TuneOptions, report: Report, expect: Expect
) -> Tuning:
    worker = rig.worker
    names = chosen_drafters(
        options.drafters, worker.drafter_names, worker.guesser_names, default=DEFAULT_DRAFTERS
    )
    candidates = ((None, *options.gammas), options.windows, options.phrase_lengths)
    num_runs = options.rounds * sum(num_cells(name, *candidates) for name in names)
    say_expected(rig, prompts, options, options.temperature, num_runs, expect)
    trials: list[Trial] = []
    for name in names:

        def measure(
            stage: str, settings: Sequence[SpeculationParams], name: str = name
        ) -> tuple[Measured, list[Measured]]:
            return measure_settings(
                rig,
                prompts,
                settings,
                options,
                temperature=options.temperature,
                phase=f"{name}, {stage}",
                report=report,
            )

        trials += search_drafter(name, *candidates, measure, worker.takes)
    found, source = contest(trials), _source(rig, options, len(prompts))
    return Tuning(
        bundle=rig.bundle.root.name,
        device=rig.device,
        num_prompts=len(prompts),
        max_tokens=options.max_tokens,
        batch=options.batch,
        rounds=options.rounds,
        temperature=options.temperature,
        trials=tuple(trials),
        contest=found,
        choice=serving_defaults(found.winner, source) if found.is_decided else None,
        source=source,
    )


def _source(rig: Rig, options: TuneOptions, num_prompts: int) -> str:
    """Return how a choice was measured, in words."""
    return (
        f"outrider tune: {num_prompts} prompts, {options.max_tokens} tokens, batch "
        f"{options.batch}, temperature {options.temperature:g}, {rig.device}, "
        f"{seconds_of(options.rig.counts_processor)} seconds"
    )
