"""``outrider analyze`` and ``outrider tune``; libraries that draw pictures are imported when a command runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from outrider.runtime.cli.refusals import EXIT_REFUSED, end_on_sigterm, refusals
from outrider.runtime.cli.signing import say_stale
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.runtime.offline.rig import RigOptions

Number = TypeVar("Number", int, float)
NEEDED = ("matplotlib", "jinja2")

Bundle = Annotated[Path, typer.Argument(help="Exported bundle.")]
Prompts = Annotated[
    Path, typer.Option(help="One prompt per line; .jsonl: strings, or objects with a prompt.")
]
Costs = Annotated[
    Path | None, typer.Option(help="Folder for measured step costs; default: as serve.")
]
CpuTime = Annotated[
    bool,
    typer.Option("--cpu-time", help="Count processor seconds, for a machine that others use too."),
]
Datastore = Annotated[Path | None, typer.Option(help="Corpus made by outrider datastore build.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens per prompt.")]
Batch = Annotated[int, typer.Option(help="Requests that decode together.")]
Rounds = Annotated[int, typer.Option(help="Interleaved runs of every setting.")]
Device = Annotated[str, typer.Option(help="cpu, cuda[:N], tensorrt[:N] or auto.")]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of a CPU backend; 0: one per physical core.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Four prompts, short answers, one round.")]


def analyze(
    bundle: Bundle,
    prompts: Prompts,
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and PNGs; default: NAME-analysis.")
    ] = None,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated; default: model, lookup, suffix.")
    ] = "",
    gammas: Annotated[
        str, typer.Option(help="Draft tokens per step, comma-separated.")
    ] = "1,2,4,8",
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,1",
    leniences: Annotated[str, typer.Option(help="Comma-separated, in (0, 1].")] = "1,0.5,0.3,0.1",
    max_tokens: MaxTokens = 96,
    batch: Batch = 1,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = 0,
    costs: Costs = None,
    refresh_costs: Annotated[bool, typer.Option(help="Measure step costs anew.")] = False,
    datastore: Datastore = None,
    cpu_time: CpuTime = False,
    quick: Quick = False,
) -> None:
    """Alpha, costs, predicted and measured speed-up of a bundle, as a page, and what to serve it with."""
    _require()
    from outrider.runtime.cli.progress import BuildProgress, compile_stage

    with compile_stage():
        from outrider.runtime.offline.advice import recommendation
        from outrider.runtime.offline.analysis import analyze as analyze_bundle
        from outrider.runtime.offline.options import AnalysisOptions
        from outrider.runtime.offline.pages.analysis_page import write_analysis

    end_on_sigterm()
    with refusals():
        rig = _rig_options(device, threads, costs, datastore, cpu_time=cpu_time)
        options = AnalysisOptions(
            drafters=split(drafters),
            gammas=numbers("gammas", gammas, int),
            temperatures=numbers("temperatures", temperatures, float),
            leniences=numbers("leniences", leniences, float),
            max_tokens=max_tokens,
            batch=batch,
            rounds=rounds,
            rig=replace(rig, refreshes_costs=refresh_costs),
        )
        with BuildProgress() as progress:
            wanted = options.quick() if quick else options
            progress.say(f"opening {bundle}")
            found = analyze_bundle(bundle, prompts, wanted, progress.report, progress.expect)
        page = write_analysis(found, out or Path(f"{found.bundle}-analysis"))
    typer.echo(str(page))
    typer.echo(recommendation(found))


def tune(
    bundle: Bundle,
    prompts: Prompts,
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and PNG; default: NAME-tuning.")
    ] = None,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated; default: model, ouroboros, lookup, suffix.")
    ] = "",
    gammas: Annotated[
        str, typer.Option(help="Draft tokens per step beside auto, comma-separated.")
    ] = "1,2,4,8",
    windows: Annotated[
        str, typer.Option(help="Of drafters with a lookahead window, comma-separated; 0 is none.")
    ] = "0,4,8",
    phrase_lengths: Annotated[
        str, typer.Option(help="Of drafters with phrases, comma-separated.")
    ] = "2,4,6",
    temperature: Annotated[float, typer.Option(help="Of all requests; 0 is greedy.")] = 0.0,
    max_tokens: MaxTokens = 96,
    batch: Batch = 1,
    rounds: Rounds = 9,
    device: Device = "auto",
    threads: Threads = 0,
    costs: Costs = None,
    datastore: Datastore = None,
    cpu_time: CpuTime = False,
    quick: Quick = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Leave the bundle as it is.")] = False,
) -> None:
    """Find the drafter and its parameters that serve fastest; written into the bundle if that is certain."""
    _require()
    from outrider.runtime.cli.progress import BuildProgress, compile_stage

    with compile_stage():
        from outrider.runtime.offline.pages.tuning_page import describe, write_tuning
        from outrider.runtime.offline.tuning import TuneOptions, write_serving_defaults
        from outrider.runtime.offline.tuning import tune as tune_bundle

    end_on_sigterm()
    with refusals():
        options = TuneOptions(
            drafters=split(drafters),
            gammas=numbers("gammas", gammas, int),
            windows=numbers("windows", windows, int),
            phrase_lengths=numbers("phrase_lengths", phrase_lengths, int),
            temperature=temperature,
            max_tokens=max_tokens,
            batch=batch,
            rounds=rounds,
            rig=_rig_options(device, threads, costs, datastore, cpu_time=cpu_time),
        )
        with BuildProgress() as progress:
            wanted = options.quick() if quick else options
            progress.say(f"opening {bundle}")
            found = tune_bundle(bundle, prompts, wanted, progress.report, progress.expect)
        page = write_tuning(found, out or Path(f"{found.bundle}-tuning"))
        if found.choice is not None and not dry_run:
            write_serving_defaults(bundle, found.choice)
    typer.echo(describe(found))
    if found.choice is None:
        typer.echo("Nothing is written; more rounds may decide (--rounds).")
    elif not dry_run:
        typer.echo("Written: the serving defaults of the bundle.")
        say_stale(bundle)
    typer.echo(str(page))


def split(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list, without empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(key: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Return the numbers of a comma-separated list, or raise ConfigError where a part is none."""
    try:
        return tuple(kind(part) for part in split(text))
    except ValueError as error:
        raise ConfigError(key, "must be numbers, separated by commas") from error


def _rig_options(
    device: str, threads: int, costs: Path | None, datastore: Path | None, *, cpu_time: bool
) -> RigOptions:
    from outrider.runtime.offline.rig import RigOptions

    return RigOptions(
        device=device,
        num_threads=threads,
        costs_folder=costs,
        counts_processor=cpu_time,
        drafting=DraftingConfig(datastore="" if datastore is None else str(datastore)),
    )


def _require() -> None:
    """Exit with the command to install what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"outrider: needs {' and '.join(missing)}: pip install 'outrider-server[analysis]'",
            err=True,
        )
        raise typer.Exit(EXIT_REFUSED)
