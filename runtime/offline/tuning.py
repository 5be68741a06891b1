"""``outrider tune``: search, on prompts of one's own, for how a bundle is best served here.

The prompts are run again and again, so no request knows another's history: with shared history a
drafter would learn the answers by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.bundle import load_bundle, write_manifest
from engines.serving_defaults import ServingDefaults
from runtime.core.params import SpeculationParams
from runtime.offline.options import (
    QUICK_PROMPTS,
    QUICK_TOKENS,
    SERVED_ROWS,
    check_option,
    chosen_drafters,
    request_drafting,
    seconds_of,
)
from runtime.offline.prompts import encode_prompts, read_prompts
from runtime.offline.rig import Rig, RigOptions, open_rig
from runtime.offline.search import Trial, choose, search_drafter
from runtime.offline.speed import PLAIN, Cell, Measured, Report, measure_cells

DEFAULT_DRAFTERS = ("model", "ouroboros", "lookup", "suffix", "ngram")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What is tried; checked against the bundle when it is opened.

    Attributes:
        drafters: names; empty for the default ones that the bundle offers.
        gammas: draft tokens per step, beside the adaptive choice; beyond the cap they are left out.
        phrase_lengths: tokens of a phrase.
        temperature: of all requests; 0 is greedy.
        max_tokens: of every answer.
        batch: requests that decode together.
        rounds: runs of every setting.
        num_threads: of a CPU backend.
        device: as of ``outrider serve``.
        costs_folder: where measured step costs are kept; None for where the server keeps them.
        counts_processor: as of ``AnalysisOptions``.
        datastore: corpus for drafters that need one; empty for none.
        max_prompts: the first so many; None for all.
    """

    drafters: tuple[str, ...] = ()
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    phrase_lengths: tuple[int, ...] = (2, 4, 6)
    temperature: float = 0.0
    max_tokens: int = 96
    batch: int = 1
    rounds: int = 3
    num_threads: int = 2
    device: str = "cpu"
    costs_folder: Path | None = None
    counts_processor: bool = False
    datastore: str = ""
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        """Check what does not need the bundle.

        Raises:
            ConfigError: names the option and the rule.
        """
        for key in ("max_tokens", "batch", "rounds"):
            check_option(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("gammas", "phrase_lengths"):
            values = getattr(self, key)
            is_fit = len(set(values)) == len(values) and min(values, default=0) >= 1
            check_option(is_fit, key, "must be distinct and at least 1")
        check_option(0.0 <= self.temperature <= 2.0, "temperature", "must be in [0, 2]")

    def quick(self) -> TuneOptions:
        """The same over few prompts, short answers and one round."""
        length = min(self.max_tokens, QUICK_TOKENS)
        return replace(self, max_prompts=QUICK_PROMPTS, max_tokens=length, rounds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the search tried and chose."""

    bundle: str
    device: str
    num_prompts: int
    max_tokens: int
    batch: int
    rounds: int
    temperature: float
    trials: tuple[Trial, ...]
    choice: ServingDefaults


def tune(bundle: Path, prompts: Path, options: TuneOptions, report: Report) -> Tuning:
    """Search over drafters and their parameters.

    Args:
        bundle: folder; left as it is.
        prompts: file, see ``read_prompts``.
        options: what to try.
        report: told the phase, the runs done and their number.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: an option or a prompt does not fit the bundle.
    """
    texts = read_prompts(prompts)[: options.max_prompts]
    rig = open_rig(
        bundle,
        RigOptions(
            max_batch=max(SERVED_ROWS, options.batch),
            num_threads=options.num_threads,
            device=options.device,
            knows_costs=True,
            costs_folder=options.costs_folder,
            counts_processor=options.counts_processor,
            drafting=request_drafting(options.datastore),
        ),
    )
    try:
        return _search(rig, texts, options, report)
    finally:
        rig.close()


def write_serving_defaults(root: Path, defaults: ServingDefaults) -> None:
    """Put defaults into a bundle's manifest, whole or not at all.

    Raises:
        BundleError: the bundle does not fit its manifest.
    """
    manifest = load_bundle(root).manifest
    write_manifest(root, replace(manifest, serving=defaults))


def _search(rig: Rig, texts: tuple[str, ...], options: TuneOptions, report: Report) -> Tuning:
    manifest = rig.bundle.manifest
    check_option(
        options.batch <= manifest.max_batch, "batch", f"must be at most {manifest.max_batch}"
    )
    fitting = [gamma for gamma in options.gammas if gamma <= manifest.max_gamma]
    check_option(bool(fitting), "gammas", f"must include one of 1..{manifest.max_gamma}")
    prompts = encode_prompts(
        texts, rig.tokenizer, max_tokens=options.max_tokens, max_context=manifest.max_context
    )
    worker = rig.worker
    names = chosen_drafters(
        options.drafters, worker.drafter_names, worker.guesser_names, default=DEFAULT_DRAFTERS
    )
    trials: list[Trial] = []
    for name in names:

        def measure(
            stage: str, settings: Sequence[SpeculationParams], name: str = name
        ) -> tuple[Measured, list[Measured]]:
            plain, *measured = measure_cells(
                rig,
                prompts,
                [Cell(options.temperature, one) for one in (PLAIN, *settings)],
                max_tokens=options.max_tokens,
                batch=options.batch,
                rounds=options.rounds,
                phase=f"{name}, {stage}",
                report=report,
            )
            return plain, measured

        trials += search_drafter(name, (None, *fitting), options.phrase_lengths, measure)
    source = (
        f"outrider tune: {len(prompts)} prompts, {options.max_tokens} tokens, batch "
        f"{options.batch}, temperature {options.temperature:g}, {rig.device}, "
        f"{seconds_of(options.counts_processor)} seconds"
    )
    return Tuning(
        bundle=rig.bundle.root.name,
        device=rig.device,
        num_prompts=len(prompts),
        max_tokens=options.max_tokens,
        batch=options.batch,
        rounds=options.rounds,
        temperature=options.temperature,
        trials=tuple(trials),
        choice=choose(trials, source),
    )
